"""Draws hosts as SVG: `smddp topo --svg`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["draw"]

_WIDTH, _LINE, _CORE, _PAD = 640, 18, 14, 10
_CORES_IN_ROW = (_WIDTH - 6 * _PAD) // _CORE
_LETTER = 6.5  # of 11 pixels

_STYLE = (
    "text{font:11px sans-serif;fill:#222}.name{font-weight:bold;font-size:13px}"
    ".host{fill:#fff;stroke:#444}.socket{fill:#f4f4f2;stroke:#999}.numa{fill:#fff;stroke:#5b7db1}"
    ".core{fill:#a9c0e3}.used{fill:#c2570c;font-weight:bold}"
)


def _fitting(text: str, width: float) -> str:
    room = int(width / _LETTER)
    return html.escape(text if len(text) <= room else f"{text[: room - 1]}…")


class _Column:
    """Draws from top to bottom."""

    def __init__(self) -> None:
        self.y = _PAD
        self.parts: list[str] = []

    def line(self, text: str, left: int, kind: str = "") -> None:
        self.y += _LINE
        style = f' class="{kind}"' if kind else ""
        shown = _fitting(text, _WIDTH - left - 3 * _PAD)
        self.parts.append(f'<text{style} x="{left}" y="{self.y - 4}">{shown}</text>')

    def begin(self) -> tuple[int, int]:
        """Leaves room for a frame; end() draws it behind what is in it."""
        self.parts.append("")
        return len(self.parts) - 1, self.y

    def end(self, begun: tuple[int, int], level: int, kind: str) -> None:
        index, top = begun
        self.y += _PAD // 2
        self.parts[index] = (
            f'<rect class="{kind}" x="{level * _PAD}" y="{top}" '
            f'width="{_WIDTH - 2 * level * _PAD}" height="{self.y - top}" rx="3"/>'
        )
        self.y += _PAD // 2

    def cores(self, cores: Sequence[Sequence[int]], left: int) -> None:
        for number, threads in enumerate(cores):
            row, place = divmod(number, _CORES_IN_ROW)
            name = ", ".join(map(str, threads))
            self.parts.append(
                f'<rect class="core" x="{left + place * _CORE}" y="{self.y + row * _CORE + 2}" '
                f'width="{_CORE - 3}" height="{_CORE - 3}"><title>hardware threads {name}</title>'
                "</rect>"
            )
        self.y += -(-len(cores) // _CORES_IN_ROW) * _CORE


def _speed(megabits: int | None) -> str:
    return "" if megabits is None else f", {megabits / 1000:g} Gbit/s"


def _host(column: _Column, host: Mapping[str, Any]) -> None:
    frame = column.begin()
    ranks = f": ranks {', '.join(map(str, host['ranks']))}" if host["ranks"] else ""
    column.line(f"{host['name']}{ranks}", 2 * _PAD, "name")
    column.line(f"{host['processor']}, {host['simd']}", 2 * _PAD)
    for number in sorted({node["socket"] for node in host["numa_nodes"]}):
        inside = column.begin()
        column.line(f"socket {number}", 3 * _PAD)
        for node in host["numa_nodes"]:
            if node["socket"] != number:
                continue
            numa = column.begin()
            memory = f", {node['memory_bytes'] / 2**30:.1f} GiB" if node["memory_bytes"] else ""
            count = len(node["cores"])
            text = f"NUMA node {node['number']}: {count} core{'' if count == 1 else 's'}{memory}"
            column.line(text, 4 * _PAD)
            column.cores(node["cores"], 4 * _PAD)
            column.end(numa, 3, "numa")
        column.end(inside, 2, "socket")
    column.line(f"between nodes: {host['network']}", 2 * _PAD)
    for interface in host["interfaces"]:
        text = f"{interface['name']}: {interface['state']}{_speed(interface['megabits'])}"
        if interface["addresses"]:
            text += f", {interface['addresses'][0]}"
        used = interface["is_used"]
        column.line(f"{text}{' — used' if used else ''}", 2 * _PAD, "used" if used else "")
    for card in host["cards"]:
        column.line(f"card {card['name']}: {card['driver']} {card['rate']}", 2 * _PAD)
    for index, gpu in enumerate(host["gpus"]):
        column.line(f"GPU {index}: {gpu['name']}", 2 * _PAD)
    column.end(frame, 1, "host")


def draw(hosts: Sequence[Mapping[str, Any]]) -> str:
    """Returns an SVG file.

    Args:
        hosts: as `smddp topo --json` has them.
    """
    column = _Column()
    for host in hosts:
        _host(column, host)
        column.y += _PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{column.y}" '
        f'viewBox="0 0 {_WIDTH} {column.y}"><style>{_STYLE}</style>'
        + "\n".join(column.parts)
        + "</svg>\n"
    )
