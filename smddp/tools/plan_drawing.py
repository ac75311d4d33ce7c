"""Draws the plans of all ranks as one HTML file, or as one SVG: `smddp plan draw`.

The HTML file needs nothing else: the drawings are SVG in it, one for each size and layout, and a
few lines of JavaScript show one of them.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

from smddp.tools.plan_steps import Job, Place, read

__all__ = ["LARGEST", "Choice", "document", "draw", "picture"]

LARGEST = 32
"""The most ranks that a drawing may have; more could not be read."""

_COLUMN, _ROW, _BOX = 18, 20, 14
_LEFT, _TOP = 172, 8
_RANK_GAP, _NODE_GAP = 6, 24
# The width of a letter of 10 pixels.
_LETTER = 6.5
# In larger drawings only the arrows of one rank can be told apart. The script has this number, too.
_RANKS_WITH_ALL_ARROWS = 4

# Operation -> letter in the drawing, colour, meaning.
_OPERATIONS = {
    "copy": ("C", "#7fb069", "copy"),
    "reduce": ("R", "#4f8a3c", "reduce"),
    "put": ("P", "#e07a1f", "put: send a message"),
    "receive": ("V", "#f2b36b", "receive a message"),
    "signal": ("S", "#5b7db1", "signal: set a counter"),
    "wait": ("W", "#a9c0e3", "wait for a counter"),
    "post": ("O", "#d9d2c5", "post: say where a message is to arrive"),
    "release": ("L", "#d9d2c5", "release the slot of a message"),
    "flush": ("F", "#d9d2c5", "flush: until the network no longer reads"),
}

# The style of the drawings, also of one in a file of its own.
_DRAWING_STYLE = """
svg text{font:10px sans-serif;fill:#222} svg .node{font-weight:bold;font-size:12px}
svg .rank{font-weight:bold} svg .step text{text-anchor:middle;font-size:9px}
.lane>rect{fill:#f4f4f2} .arrow{fill:none;stroke-width:1.2}
.arrow.put{stroke:#c2570c} .arrow.wait{stroke:#5b7db1} .arrow.dim{opacity:.1}
.step.earlier rect{stroke:#2f4a75;stroke-dasharray:3 2}
"""

_PAGE_STYLE = """
body{font:14px/1.4 sans-serif;margin:16px;color:#222;background:#fff}
h1{font-size:18px;margin:0 0 4px} h2{font-size:14px;margin:8px 0}
.controls{display:flex;flex-wrap:wrap;gap:8px 24px;margin:12px 0;padding:8px;
 background:#f4f4f2;position:sticky;top:0;z-index:1}
.controls label{display:flex;gap:6px;align-items:center} output{min-width:64px;font-weight:bold}
.pane{overflow-x:auto}
.key{display:inline-block;width:14px;height:14px;text-align:center;font-size:9px;margin-right:3px}
.keys span{margin-right:14px;white-space:nowrap}
.hide-put .arrow.put,.hide-wait .arrow.wait{display:none}
"""

_SCRIPT = """
const $ = id => document.getElementById(id), panes = [...document.querySelectorAll('.pane')];
const names = kind => JSON.parse($(kind).dataset.names);
let layout = $('layout').value;
function show() {
  for (const kind of ['size', 'layout']) $(kind + '-name').value = names(kind)[$(kind).value];
  const key = $('size').value + ' ' + $('layout').value;
  const shown = panes.find(pane => pane.dataset.key === key);
  for (const pane of panes) pane.hidden = pane !== shown;
  const count = +shown.dataset.ranks, choice = $('rank');
  const wanted = $('layout').value === layout ? choice.value : count > 4 ? '0' : '';
  layout = $('layout').value;
  choice.replaceChildren(new Option('all ranks', ''));
  for (let r = 0; r < count; ++r) choice.add(new Option('rank ' + r, r));
  choice.value = wanted;
  mark(shown);
}
function mark(pane) {
  const rank = $('rank').value;
  for (const arrow of pane.querySelectorAll('.arrow'))
    arrow.classList.toggle('dim',
      rank !== '' && arrow.dataset.from !== rank && arrow.dataset.to !== rank);
}
for (const id of ['size', 'layout']) $(id).oninput = show;
$('rank').oninput = () => mark(panes.find(pane => !pane.hidden));
for (const kind of ['put', 'wait'])
  $(kind).oninput = () => document.body.classList.toggle('hide-' + kind, !$(kind).checked);
show();
"""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A position of one of the two sliders."""

    name: str  # such as "25 MiB" or "2x2"
    bytes: int = 0
    nodes: Sequence[Sequence[int]] = ()


def _trips_width(trips: int) -> int:
    """Returns the columns that a text such as "25 ×" takes before a block."""
    return 0 if trips == 1 else math.ceil((len(f"{trips} ×") * _LETTER + 4) / _COLUMN)


class _Drawing:
    """One SVG: a lane for each rank and stage, a box for each step, arrows between them."""

    def __init__(self, job: Job, all_arrows: bool) -> None:
        self._job = job
        self._rank = None if all_arrows else 0
        widths = {
            place: _trips_width(job.plans[place.rank].stages[place.stage].blocks[place.block].trips)
            for place in job.steps
            if place.index == 0
        }
        self._columns = job.columns(widths)
        self._rows: dict[tuple[int, int], int] = {}
        self._earlier = set(job.earlier)
        self._parts: list[str] = []
        self._height = self._place_lanes()
        self._width = _LEFT + (max(self._columns.values(), default=0) + 1) * _COLUMN + 8

    def _place_lanes(self) -> int:
        y = _TOP
        for number, node in enumerate(self._job.nodes):
            y += _NODE_GAP if number else 12
            self._parts.append(f'<text class="node" x="4" y="{y}">node {number}</text>')
            y += 6
            for rank in node:
                for stage in range(len(self._job.plans[rank].stages)):
                    self._rows[rank, stage] = y
                    y += _ROW
                y += _RANK_GAP
        return y + 8

    def _center(self, place: Place) -> tuple[int, int]:
        y = self._rows[place.rank, place.stage]
        return _LEFT + self._columns[place] * _COLUMN + _COLUMN // 2, y + _ROW // 2

    def _lanes(self) -> None:
        for (rank, stage), y in self._rows.items():
            lane = self._job.plans[rank].stages[stage]
            name = html.escape(lane.name)
            self._parts.append(
                f'<g class="lane" data-rank="{rank}" data-stage="{name}">'
                f'<rect x="{_LEFT}" y="{y + 1}" width="{self._width - _LEFT - 4}" '
                f'height="{_ROW - 2}"/>'
            )
            if stage == 0:
                self._parts.append(f'<text class="rank" x="12" y="{y + 14}">rank {rank}</text>')
            self._parts.append(f'<text x="68" y="{y + 14}">{name}</text>')
            for b, block in enumerate(lane.blocks):
                for i in range(len(block.steps)):
                    self._step(Place(rank, stage, b, i), block.trips)
            self._parts.append("</g>")

    def _step(self, place: Place, trips: int) -> None:
        step = self._job.steps[place]
        letter, color, _ = _OPERATIONS[step.operation]
        x, y = self._center(place)
        if place.index == 0 and trips > 1:
            left = x - _COLUMN // 2 - _trips_width(trips) * _COLUMN + 3
            self._parts.append(f'<text x="{left}" y="{y + 4}">{trips} ×</text>')
        half = _BOX // 2
        kind = f"{step.operation}{' earlier' if place in self._earlier else ''}"
        self._parts.append(
            f'<g class="step {kind}"><title>rank {place.rank}: {html.escape(step.text)}'
            f'</title><rect x="{x - half}" y="{y - half}" width="{_BOX}" height="{_BOX}" '
            f'fill="{color}"/><text x="{x}" y="{y + 3}">{letter}</text></g>'
        )

    def _arrow(self, kind: str, ranks: tuple[int, int], path: str, title: str) -> None:
        dim = "" if self._rank is None or self._rank in ranks else " dim"
        self._parts.append(
            f'<path class="arrow {kind}{dim}" data-from="{ranks[0]}" data-to="{ranks[1]}" '
            f'd="{path}"><title>{html.escape(title)}</title></path>'
        )

    def _arrows(self) -> None:
        half = _BOX // 2
        for link in self._job.links:
            (x, y), (to_x, to_y) = self._center(link.source), self._center(link.target)
            ranks = link.source.rank, link.target.rank
            title = f"rank {ranks[0]}: {self._job.steps[link.source].text} → rank {ranks[1]}"
            if y == to_y:
                y -= half
                to_y -= half
                path = f"M{x} {y}C{x} {y - 8} {to_x} {to_y - 8} {to_x} {to_y}"
                head = -4
            else:
                head = -4 if to_y > y else 4
                y -= half * head // 4
                to_y += half * head // 4
                middle = (y + to_y) // 2
                path = f"M{x} {y}C{x} {middle} {to_x} {middle} {to_x} {to_y}"
            # An arrowhead of its own; markers would be references.
            path += f"m-3 {head}l3 {-head}l3 {head}"
            self._arrow(link.kind, ranks, path, title)

    def text(self, label: str) -> str:
        """Returns the SVG."""
        self._lanes()
        self._arrows()
        return (
            f'<svg role="img" aria-label="{html.escape(label)}" width="{self._width}" '
            f'height="{self._height}" viewBox="0 0 {self._width} {self._height}">'
            + "".join(self._parts)
            + "</svg>"
        )


def draw(texts: Sequence[str], nodes: Sequence[Sequence[int]]) -> tuple[str, str]:
    """Returns a headline and the SVG of a collective.

    Args:
        texts: the plan of each rank, as `print_plan` writes it.
        nodes: the ranks of each node.
    """
    job = Job([read(text) for text in texts], nodes)
    name, rest = job.plans[0].title.split(", rank ", 1)
    extras = rest.split(")", 1)[1]
    messages = sum(plan.messages for plan in job.plans)
    sent = sum(plan.message_bytes for plan in job.plans)
    between = f"{messages} messages with {sent} bytes between nodes" if messages else "one node"
    headline = f"{name}{extras}: {len(texts)} ranks, {between}"
    return headline, _Drawing(job, all_arrows=len(texts) <= _RANKS_WITH_ALL_ARROWS).text(headline)


def picture(texts: Sequence[str], nodes: Sequence[Sequence[int]]) -> str:
    """Returns the drawing of a collective as an SVG file; the arguments are those of `draw`."""
    _, drawing = draw(texts, nodes)
    start, rest = drawing.split(">", 1)
    # A page may be dark.
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return (
        f'{start} xmlns="http://www.w3.org/2000/svg"><style>{_DRAWING_STYLE}</style>{background}'
        f"{rest}\n"
    )


def _legend() -> str:
    keys = "".join(
        f'<span><span class="key" style="background:{color}">{letter}</span>{meaning}</span>'
        for letter, color, meaning in _OPERATIONS.values()
    )
    return (
        f'<p class="keys">{keys}</p><p>A lane is a stage of a rank. Its steps run in order, from '
        "left to right; the lanes of a rank run at the same time, after its preamble. Steps behind "
        "a number with × are repeated so often, and drawn once. Distances mean order, not time. "
        "Orange arrows are messages between nodes, blue ones lead from a signal to the step that "
        "waits for it. A wait with a dashed border is for an earlier repetition. Point at a step "
        "or an arrow to read it.</p>"
    )


def _slider(kind: str, choices: Sequence[Choice], chosen: int) -> str:
    names = ", ".join(f'"{choice.name}"' for choice in choices)
    return (
        f'<label>{kind} <input type="range" id="{kind}" min="0" max="{len(choices) - 1}" '
        f'value="{chosen}" data-names="{html.escape(f"[{names}]")}">'
        f'<output id="{kind}-name">{choices[chosen].name}</output></label>'
    )


def document(
    collective: str,
    sizes: Sequence[Choice],
    layouts: Sequence[Choice],
    chosen: tuple[int, int],
    plans: Callable[[Choice, Choice], list[str]],
) -> str:
    """Returns the HTML file.

    Args:
        collective: its name.
        sizes: what the first slider offers.
        layouts: what the second one offers.
        chosen: the size and the layout to begin with.
        plans: returns the plan of each rank for a size and a layout.

    Raises:
        ValueError: there is no plan for the chosen size and layout. Others say so in their place.
    """
    panes = []
    for s, size in enumerate(sizes):
        for n, layout in enumerate(layouts):
            count = sum(map(len, layout.nodes))
            try:
                headline, picture = draw(plans(size, layout), layout.nodes)
            except ValueError as error:
                if (s, n) == chosen:
                    raise
                headline, picture = str(error), ""
            hidden = "" if (s, n) == chosen else " hidden"
            panes.append(
                f'<section class="pane" data-key="{s} {n}" data-ranks="{count}"{hidden}>'
                f"<h2>{html.escape(headline)}</h2>{picture}</section>"
            )
    count = sum(map(len, layouts[chosen[1]].nodes))
    rank = "" if count <= _RANKS_WITH_ALL_ARROWS else "0"
    selected = f'<option value="{rank}">{"rank 0" if rank else "all ranks"}</option>'
    controls = (
        f"{_slider('size', sizes, chosen[0])}{_slider('layout', layouts, chosen[1])}"
        f'<label>arrows of <select id="rank">{selected}</select></label>'
        '<label><input type="checkbox" id="put" checked>messages</label>'
        '<label><input type="checkbox" id="wait" checked>waits</label>'
    )
    title = f"Plan of {collective}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_PAGE_STYLE}{_DRAWING_STYLE}</style></head><body><h1>{title}</h1>{_legend()}"
        f'<div class="controls">{controls}</div>\n'
        + "\n".join(panes)
        + f"\n<script>{_SCRIPT}</script></body></html>\n"
    )
