"""A Sphinx extension: what the site needs because its pages live in a repository.

* A link to a file or folder that is no page of the site, such as `../csrc/engine/engine.h`, leads
  to a page that shows it.
* The navigation is a table in conf.py, so pages need no directives, which GitHub would show.
* `index.html` leads to the start page, which is the README.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

# Where the pages that show files lie in the site.
FOLDER = "source"
_LANGUAGES = {
    ".cc": "c++",
    ".cu": "c++",
    ".h": "c++",
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
}


class RepositoryLinks(SphinxTransform):
    """Turns links to files and folders of the repository into links to pages that show them."""

    # Before Sphinx collects files to download, which these are not.
    default_priority = 5

    def apply(self, **_kwargs: Any) -> None:
        """Replaces the links of one page."""
        shown: set[str] = _shown(self.env).setdefault(self.env.docname, set())
        for link in [*self.document.findall(addnodes.download_reference)] + [
            node
            for node in self.document.findall(addnodes.pending_xref)
            if node["reftype"] == "myst" and node.get("refdomain") != "doc"
        ]:
            name = self._file_of(link["reftarget"])
            if name is None:
                continue
            page = f"{name}/README"
            if page in self.env.found_docs:
                target: nodes.Element = addnodes.pending_xref(
                    "",
                    refdomain="doc",
                    reftype="myst",
                    refdoc=self.env.docname,
                    reftarget=page,
                    reftargetid=None,
                    refexplicit=True,
                )
            else:
                shown.add(name)
                target = nodes.reference("", "", refuri=self._uri(name), internal=True)
            target.extend(link.children)
            link.replace_self(target)

    def _file_of(self, link: str) -> str | None:
        """Returns the path from the root of what a link names; None if there is no such file."""
        root = Path(self.env.srcdir)
        path = (root / self.env.docname).parent / link.partition("#")[0]
        path = Path(os.path.normpath(path))
        if not link or link.startswith("#") or not path.exists() or root not in path.parents:
            return None
        return path.relative_to(root).as_posix()

    def _uri(self, name: str) -> str:
        return os.path.relpath(f"{FOLDER}/{name}.html", Path(self.env.docname).parent)


def _shown(env: BuildEnvironment) -> dict[str, set[str]]:
    """Returns which files and folders each page links to."""
    if not hasattr(env, "shown_files"):
        env.shown_files = {}
    return env.shown_files


def _forget(_app: Sphinx, env: BuildEnvironment, page: str) -> None:
    _shown(env).pop(page, None)


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the navigation to the start page."""
    if page != app.config.root_doc:
        return
    for caption, pages in app.config.NAVIGATION.items():
        lines = "\n".join(f"/{name}" for name in pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def _add_index(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    start = app.builder.get_target_uri(app.config.root_doc)
    yield "index", {"start": start}, "start.html"


def _write_shown(app: Sphinx, error: Exception | None) -> None:
    """Writes the pages that show files and folders.

    They have no navigation, which would take longer to make than all other pages.
    """
    if error is not None or app.builder.format != "html":
        return
    shown = set().union(*_shown(app.env).values())
    for name in shown:
        path = Path(app.srcdir, name)
        page = Path(app.outdir, FOLDER, f"{name}.html")
        top = os.path.relpath(app.outdir, page.parent)
        body = _list(path, name, shown) if path.is_dir() else _highlight(app, path)
        context = {"title": name, "top": top, "body": body, "start": app.config.root_doc}
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(app.builder.templates.render("file.html", context))


def _list(folder: Path, name: str, shown: set[str]) -> str:
    """Returns a list of the files in a folder, with links to those that have a page."""
    items = []
    for path in sorted(folder.rglob("*")):
        file = path.relative_to(folder).as_posix()
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        link = f'<a href="{folder.name}/{file}.html">{file}</a>'
        items.append(f"<li>{link if f'{name}/{file}' in shown else file}</li>")
    return f"<ul>{' '.join(items)}</ul>"


def _highlight(app: Sphinx, file: Path) -> str:
    language = _LANGUAGES.get(file.suffix, "text")
    highlighter = app.builder.highlighter
    return str(highlighter.highlight_block(file.read_text(), language, force=True))


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension with Sphinx."""
    app.add_config_value("NAVIGATION", {}, "env")
    app.add_transform(RepositoryLinks)
    app.connect("source-read", _add_navigation)
    app.connect("env-purge-doc", _forget)
    app.connect("html-collect-pages", _add_index)
    app.connect("build-finished", _write_shown)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
