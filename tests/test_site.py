"""The documentation builds as a site that is complete in itself, and its examples run."""

from __future__ import annotations

import html
import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# What the API reference describes: each public name of these modules, under the name of the module.
DESCRIBED = [
    "smddp",
    "smddp.numpy",
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
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    fields = [line.split() for line in zlib.decompress(packed).decode().splitlines()]
    return {name for name, kind, *_ in fields if kind.startswith("py:")}


def _python(*arguments: str) -> str:
    """Returns the output of Python with this clone's packages."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The examples in docstrings, in a job of one rank.
_EXAMPLES = """
import doctest, importlib, sys
import torch, torch.distributed as dist
import smddp
import smdistributed.modelparallel.torch as smp

dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
smp.init({"microbatches": 2})
names = {"dist": dist, "smddp": smddp, "smp": smp, "torch": torch}
finder = doctest.DocTestFinder()
runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
for module in map(importlib.import_module, sys.argv[1:]):
    for name in sorted(set(dir(module)) - {"dist", "smddp", "smp", "torch"}):
        public = getattr(module, name)
        if hasattr(public, "__doc__") and not name.startswith("_") and callable(public):
            for test in finder.find(public, name, module=False, globs=names):
                runner.run(test)
print(runner.tries)
sys.exit(runner.failures > 0)
"""


@pytest.mark.costly
def test_the_examples_of_the_reference_run() -> None:
    examples = int(_python("-c", _EXAMPLES, "smddp", "smdistributed.modelparallel.torch"))
    assert examples >= 10


@pytest.mark.multiprocess
@pytest.mark.costly
def test_the_script_of_the_quickstart_learns(tmp_path: Path) -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(page.partition("```python\n")[2].partition("```")[0])
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = _python(*command, str(script))
    loss = re.search(r"^loss (\S+)$", output, re.MULTILINE)
    assert loss, output
    assert float(loss[1]) < 0.01
    assert "rank 0 of 2" in output


@pytest.mark.filterwarnings("ignore:smdistributed.dataparallel")
@pytest.mark.costly
def test_the_site_is_complete(tmp_path: Path) -> None:
    site = tmp_path / "site"
    _python(
        *("-m", "sphinx", "-q", "--fail-on-warning", "--keep-going"),
        *("-c", "docs/site", "-d", str(tmp_path / "doctrees"), ".", str(site)),
    )
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
        for name in importlib.import_module("smddp.modelparallel.torch").__all__
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
