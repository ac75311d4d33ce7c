"""The documentation builds as a site that is complete in itself, and its examples run."""

from __future__ import annotations

import html
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What the API reference describes: each public name of these modules, under the name of the module.
DESCRIBED = [
    "smddp",
    "smdistributed.dataparallel.torch.distributed",
    "smdistributed.dataparallel.torch.parallel.distributed",
    "smdistributed.modelparallel.torch",
    "smdistributed.modelparallel.torch.amp",
    "smdistributed.modelparallel.torch.nn",
    "smdistributed.modelparallel.torch.optimizers",
    "smdistributed.modelparallel.torch.patches.checkpoint",
    "smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint",
    "smdistributed.modelparallel.torch.utils",
]
# Names that are described under another name, or are modules.
ELSEWHERE = {
    "FusedLamb",
    "amp",
    "exceptions",
    "huggingface",
    "model",
    "nn",
    "optimizers",
    "patches",
    "sharded_data_parallel_checkpoint",
    "state_mod",
    "utils",
}


class _Page:
    """What a page links to and loads, and its anchors."""

    def __init__(self, text: str) -> None:
        targets = re.findall(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]*)"', text)
        self.links = [html.unescape(target) for tag, target in targets if tag == "a"]
        self.loads = [html.unescape(target) for tag, target in targets if tag != "a"]
        self.anchors = {
            html.unescape(name) for name in re.findall(r'\s(?:id|name)="([^"]*)"', text)
        }


def broken(site: Path) -> list[str]:
    """Returns what the pages of a site link to or load that is not in the site."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if link in page.loads:
                    found.append(f"{path.relative_to(site)}: loads {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target in pages and unquote(parts.fragment) in pages[target].anchors | {""}
            if not known and (parts.fragment or not target.is_file()):
                found.append(f"{path.relative_to(site)}: {link}")
    for sheet in sorted(site.rglob("*.css")):
        remote = re.findall(
            r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", sheet.read_text()
        )
        found += [f"{sheet.relative_to(site)}: {what}" for what in remote]
    return found


def _described(site: Path) -> set[str]:
    """Returns the full names of what the API reference describes."""
    import sphinx.util.inventory as inventory

    with (site / "objects.inv").open("rb") as file:
        items = inventory.InventoryFile.load(file, "", lambda base, uri: uri)
    return {name for kind, names in items.items() if kind.startswith("py:") for name in names}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_site_is_complete(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going"]
    command += ["-c", "docs/site", "-d", str(tmp_path / "doctrees"), ".", str(site)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (site / "index.html").exists()
    assert (site / "searchindex.js").exists()
    assert broken(site) == []
    public = {
        f"{name}.{public}"
        for name in DESCRIBED
        for public in importlib.import_module(name).__all__
        if public not in ELSEWHERE
    }
    public |= {
        f"smdistributed.modelparallel.torch.{name}"
        for name in importlib.import_module("smddp.modelparallel").__all__
        if name not in ELSEWHERE
    }
    missing = sorted(public - _described(site))
    assert missing == [], "describe them in docs/api"


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="x">A</h1><a href="b.html#y">1</a><a href="#x">2</a><a href="#z">3</a>'
        '<a href="c.html">4</a><a href="b.html#x">5</a><a href="https://example.org">6</a>'
        '<script src="https://example.org/s.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="y">B</h1><link href="sheet.css">')
    (tmp_path / "sheet.css").write_text("a { background: url(https://example.org/font) }")
    assert broken(tmp_path) == [
        "a.html: #z",
        "a.html: c.html",
        "a.html: b.html#x",
        "a.html: loads https://example.org/s.js",
        "sheet.css: url(https://example.org/font",
    ]
