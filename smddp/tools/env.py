"""Prints the settings that environment variables change: `smddp env`.

The table comes from the compiled module (csrc/common/config.h), so it is always up to date.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from smddp.tools import _files
from smddp.tools._command import run
from smddp.torch import _load
from smddp.torch._misspelt import misspelt

if TYPE_CHECKING:
    from smddp.torch._C import Setting

__all__ = ["BEGIN", "END", "insert", "markdown", "misspelt_settings", "settings"]

BEGIN = "<!-- settings: written by `smddp env --markdown docs/settings.md` -->"
END = "<!-- end of settings -->"

_FOR_EXPERTS = """\
You do not need these to use smddp. Their defaults were measured.
[performance.md](performance.md) says how to measure."""


def settings() -> list[Setting]:
    """Returns every setting with its current value.

    Raises:
        ValueError: the text of a variable cannot be parsed; the error names the variable.
    """
    rows: list[Setting] = _load.load().settings()
    return rows


def misspelt_settings() -> list[str]:
    """Returns a sentence for each variable that is no setting; also if values are wrong."""
    return misspelt(os.environ, _load.load().setting_names())


def markdown(rows: Iterable[Setting]) -> str:
    """Returns the settings and their defaults as two tables in Markdown: for users, for experts."""
    head = ["| variable | default | what it does |", "|---|---|---|"]
    users, experts = list(head), list(head)
    for row in rows:
        default = f"`{row['default']}`" if row["default"] else ""
        line = f"| `{row['name']}` | {default} | {row['doc'].replace('|', chr(92) + '|')} |"
        (experts if row["expert"] else users).append(line)
    return "\n".join([*users, "", "## For experts", "", _FOR_EXPERTS, "", *experts]) + "\n"


def insert(text: str, table: str) -> str:
    """Returns `text` with the lines between the markers BEGIN and END replaced by `table`.

    Raises:
        ValueError: the markers are missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the text has no lines {BEGIN!r} and {END!r}")
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{table}{END}{rest.split(END, 1)[1]}"


def _plain(rows: Iterable[Setting]) -> str:
    lines = []
    for row in rows:
        origin = "from the environment" if row["from_environment"] else "default"
        lines.append(f"{row['name']}={row['value']}  ({row['type']}, {origin})\n    {row['doc']}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the settings, or writes them into a document; returns the exit status."""
    parser = argparse.ArgumentParser(prog="smddp env", description=main.__doc__)
    parser.add_argument(
        "--markdown",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print a Markdown table; with FILE, write it between the two markers of that file",
    )
    options = parser.parse_args(arguments)
    try:
        for sentence in misspelt_settings():
            print(f"smddp env: {sentence}", file=sys.stderr)
        rows = settings()
        if options.markdown not in (None, "-"):
            path = Path(options.markdown)
            _files.write(path, insert(path.read_text(encoding="utf-8"), markdown(rows)))
    except (ValueError, OSError) as error:
        print(f"smddp env: {error}", file=sys.stderr)
        return 1
    if options.markdown is None:
        print(_plain(rows))
    elif options.markdown == "-":
        print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    run(main)
