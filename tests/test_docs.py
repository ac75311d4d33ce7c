"""Links in the documentation lead somewhere, and every page can be found from the README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
]


def _prose(page: Path) -> str:
    """Returns a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", _prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def _anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", _prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


def broken_links(page: Path) -> list[str]:
    """Returns the links of a page whose file or heading does not exist."""
    broken = []
    for link in _links(page):
        if re.match(r"[a-z]+:", link):  # another site
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in _anchors(target)
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert broken_links(page) == []


def test_every_page_can_be_found() -> None:
    seen: set[Path] = set()
    left = [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        left += [(page.parent / link.partition("#")[0]).resolve() for link in _links(page)]
    assert [page for page in PAGES if page not in seen] == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two` three\n[a](#one-two-three) [b](#four) [c](page.md#one-two-three)\n"
        "[d](absent.md) [e](https://example.org/x) `[f](absent.md)`\n"
        "```\n[g](absent.md)\n# four\n```\n"
    )
    assert broken_links(page) == ["#four", "absent.md"]
