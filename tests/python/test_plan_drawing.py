"""`smddp plan draw`: one HTML file with the plans of all ranks."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from ranks import ROOT

from smddp.tools import plan
from smddp.tools.plan_steps import Job, Number, read
from smddp.torch import _load

_VOID = {"meta", "input"}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclasses.dataclass
class _Text:
    x: float
    y: float
    content: str
    kind: str

    def box(self) -> tuple[float, float, float, float]:
        """Returns left, top, right and bottom; letters are taken to be as wide as wide ones."""
        size = {"node": 12, "letter": 9}.get(self.kind, 10)
        width = 0.65 * size * len(self.content)
        left = self.x - width / 2 if self.kind == "letter" else self.x
        return left, self.y - 0.8 * size, left + width, self.y + 0.2 * size


@dataclasses.dataclass
class _Pane:
    key: str
    ranks: int
    hidden: bool
    lanes: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    arrows: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    texts: list[_Text] = dataclasses.field(default_factory=list)
    headline: str = ""
    steps: list[str] = dataclasses.field(default_factory=list)


class _Reader(HTMLParser):
    """Reads the file, and checks that its elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.panes: list[_Pane] = []
        self._in_step = False
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        assert not {"src", "href", "xlink:href", "action"} & set(found)
        if tag not in _VOID:
            self.open.append(tag)
        kind = found.get("class", "")
        if tag == "section":
            self.panes.append(_Pane(found["data-key"], int(found["data-ranks"]), "hidden" in found))
        elif kind == "lane":
            self.panes[-1].lanes.add((int(found["data-rank"]), found["data-stage"]))
        elif kind.startswith("arrow"):
            ranks = int(found["data-from"]), int(found["data-to"])
            self.panes[-1].arrows.append((kind.split()[1], *ranks))
        elif kind.startswith("step"):
            self.panes[-1].steps.append(kind.split()[1])
            self._in_step = True
        elif tag == "text":
            style = "letter" if self._in_step else kind
            self.panes[-1].texts.append(_Text(float(found["x"]), float(found["y"]), "", style))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in {"rect", "path"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "g":
            self._in_step = False

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "text":
            self.panes[-1].texts[-1].content += data
        elif self.open and self.open[-1] == "h2" and self.panes:
            self.panes[-1].headline += data


def _draw(tmp_path: Path, command: str) -> tuple[str, list[_Pane]]:
    file = tmp_path / "plan.html"
    assert plan.main(["draw", *command.split(), "--output", str(file)]) == 0
    text = file.read_text()
    return text, _Reader(text).panes


def _puts(command: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> int:
    """Returns the number of put steps of all ranks, as `print` writes them."""
    count = 0
    for rank in range(ranks):
        assert plan.main(["print", *command.split(), "--rank", str(rank)]) == 0
        count += len(re.findall("^ +put to", capsys.readouterr().out, re.MULTILINE))
    return count


@pytest.mark.parametrize(
    ("text", "base", "per_trip"),
    [("4", 4, 0), ("-3", -3, 0), ("k", 0, 1), ("k+1", 1, 1), ("2k-5", -5, 2), ("-k+2", 2, -1)],
)
def test_numbers(text: str, base: int, per_trip: int) -> None:
    assert Number.read(text) == Number(base, per_trip)


def test_repetitions_that_a_number_reaches() -> None:
    assert Number(1, 1).trip_of(7, 25) == 6
    assert Number(1, 1).trip_of(27, 25) is None
    assert Number(1, 2).trip_of(4, 25) is None
    assert Number(1, 2).first_trip(4, 25) == 2
    assert Number(5, 0).first_trip(4, 1) == 0
    assert Number(3, 0).first_trip(4, 1) is None


@pytest.mark.parametrize(
    "command",
    [
        "allreduce 25MiB --nodes 2x2",
        "allreduce 25MiB --nodes 4x4",
        "allreduce 1000003 --nodes 3+2 --algorithm ring",
        "allreduce 1MiB --nodes 1x4 --shared",
        "allreduce 1KiB --nodes 4x2",
        "allreduce 25MiB --nodes 2x2 --wire int8",
        "broadcast 3MiB --nodes 3x2 --root 3",
        "alltoall 64KiB --nodes 2+1",
        "barrier --nodes 2x2",
    ],
)
def test_a_lane_for_each_stage_and_an_arrow_for_each_put(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, panes = _draw(tmp_path, command)
    assert capsys.readouterr().out == f"wrote {tmp_path / 'plan.html'}\n"
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<link|<img|fetch\(", text)
    (shown,) = [pane for pane in panes if not pane.hidden]
    count = shown.ranks
    assert {rank for rank, _ in shown.lanes} == set(range(count))
    expected = set()
    for rank in range(count):
        assert plan.main(["print", *command.split(), "--rank", str(rank)]) == 0
        printed = capsys.readouterr().out
        expected |= {(rank, "preamble")}
        expected |= {(rank, name) for name in re.findall("^  stage (.*)$", printed, re.MULTILINE)}
    assert shown.lanes == expected
    puts = [arrow for arrow in shown.arrows if arrow[0] == "put"]
    assert len(puts) == _puts(command, count, capsys) == shown.steps.count("put")
    waits = [arrow for arrow in shown.arrows if arrow[0] == "wait"]
    # Each rank with a mate waits at least for its arrival.
    nodes = plan.parse_nodes(command.split("--nodes ")[1].split()[0])
    assert {to for _, _, to in waits} >= {rank for node in nodes if len(node) > 1 for rank in node}
    for pane in panes:
        assert len(pane.arrows) >= pane.steps.count("put")


def test_every_algorithm_can_be_read() -> None:
    """Each put is received, and all arrows lead from left to right."""
    module = _load.load()
    count = 0
    for collective, algorithm, _, _ in module.list_algorithms():
        for layout, size in itertools.product(("1x3", "2x2", "3+1+2", "4x1"), (4096, 5 << 20)):
            nodes = plan.parse_nodes(layout)
            ranks = sum(map(len, nodes))
            arguments = {"bytes": size, "nodes": nodes, "root": ranks - 1, "wire": "fp32"}
            arguments |= {"collective": collective, "algorithm": algorithm, "shared": False}
            try:
                texts = [module.print_plan(rank=rank, **arguments) for rank in range(ranks)]
            except ValueError:
                continue  # the algorithm is not for such layouts, sizes or buffers
            job = Job([read(text) for text in texts], nodes)
            puts = sum(step.operation == "put" for step in job.steps.values())
            assert puts == sum(link.kind == "put" for link in job.links)
            columns = job.columns({})
            assert all(columns[link.source] < columns[link.target] for link in job.links)
            count += 1
    assert count > 60


@pytest.mark.parametrize("command", ["allreduce 25MiB --nodes 2x2", "allreduce 9GiB --nodes 4x4"])
def test_no_two_texts_overlap(command: str, tmp_path: Path) -> None:
    _, panes = _draw(tmp_path, command)
    for pane in panes:
        boxes = sorted(text.box() for text in pane.texts)
        assert boxes
        for index, (left, top, right, bottom) in enumerate(boxes):
            assert left >= 0
            for other in boxes[index + 1 :]:
                if other[0] >= right:
                    break
                assert other[1] >= bottom or other[3] <= top, (pane.key, left, other)


def test_sliders_have_a_drawing_for_each_position(tmp_path: Path) -> None:
    text, panes = _draw(tmp_path, "allreduce 3MiB --nodes 3+1")
    for kind, chosen in (("size", "3 MiB"), ("layout", "3+1")):
        slider = re.search(rf'id="{kind}" min="0" max="(\d+)" value="(\d+)"', text)
        assert slider is not None
        assert f'<output id="{kind}-name">{chosen}</output>' in text
    keys = {pane.key for pane in panes}
    assert keys == {f"{size} {layout}" for size in range(6) for layout in range(5)}
    assert {pane.ranks for pane in panes} == {4, 8, 16}
    assert len({pane.headline for pane in panes}) > 8


def test_the_picture_in_the_documentation_is_what_the_command_draws(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    arguments = ["--nodes", "2x2", "--output", str(file)]
    assert plan.main(["draw", "allreduce", "25MiB", *arguments]) == 0
    assert file.read_text() == (ROOT / "docs/plan-allreduce.svg").read_text()
    drawing = ElementTree.parse(file).getroot()
    steps = [each for each in drawing.iter() if each.get("class", "").startswith("step")]
    _, panes = _draw(tmp_path, "allreduce 25MiB --nodes 2x2")
    (shown,) = [pane for pane in panes if not pane.hidden]
    assert len(steps) == len(shown.steps)


def test_layouts_that_an_algorithm_cannot_take_say_so(tmp_path: Path) -> None:
    _, panes = _draw(tmp_path, "allreduce 1MiB --nodes 1x2 --algorithm two_phase")
    assert any("two_phase" in pane.headline and not pane.lanes for pane in panes)
    assert any(pane.lanes for pane in panes if pane.hidden)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("draw allreduce", "how many bytes? For example: draw allreduce 25MiB"),
        ("draw allreduce 8 --nodes 8x8", "--nodes 8x8 has 64 ranks, and a drawing has at most 32"),
        ("draw reduction 8", '"reduction" is not a collective'),
        ("draw broadcast 8 --root 2", "--root 2 is not one of the ranks 0 to 1"),
        ("draw allreduce 8 --nodes 2x2 --algorithm two_phase", "two_phase"),
        ("draw allreduce 8 --output /nowhere/plan.html", "/nowhere/plan.html"),
        ("draw allreduce 8 --output plan.png", "--output plan.png: draws .html and .svg only"),
    ],
)
def test_errors_are_one_sentence(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(command.split()) == 1
    said = capsys.readouterr().err
    assert said.startswith("smddp plan: ")
    assert said.count("\n") == 1
    assert text in said


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("draw allreduce 3parsecs", "'3parsecs' is not a number of bytes"),
        ("draw allreduce 8 --nodes 2y2", "'2y2' is not a layout of ranks"),
    ],
)
def test_what_cannot_be_read_is_refused(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan.main(command.split())
    assert text in capsys.readouterr().err


def test_a_browser_shows_it(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(_BROWSERS)}")
    _draw(tmp_path, "allreduce 25MiB --nodes 2x2")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{tmp_path / 'plan.html'}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    # The script has run: it makes an entry for each rank.
    assert done.stdout.count("<option") == 5


# What the script uses of a browser, and then what a reader does.
_STAND_IN = """
class Option { constructor(text, value) { this.text = text; this.value = String(value); } }
const toggle = owner => ({toggle: (name, on) => { owner[name] = on; }});
const panes = DATA.panes.map(pane => {
  const arrows = pane.arrows.map(([, from, to]) => {
    const arrow = {dataset: {from: String(from), to: String(to)}};
    arrow.classList = toggle(arrow);
    return arrow;
  });
  const dataset = {key: pane.key, ranks: String(pane.ranks)};
  return {hidden: pane.hidden, dataset, arrows, querySelectorAll: () => arrows};
});
const elements = {put: {checked: true}, wait: {checked: true}, 'size-name': {}, 'layout-name': {}};
for (const kind of ['size', 'layout'])
  elements[kind] = {value: DATA[kind].value, dataset: {names: DATA[kind].names}};
elements.rank = {
  value: '', replaceChildren(option) { this.options = [option]; },
  add(option) { this.options.push(option); },
};
const body = {};
body.classList = toggle(body);
const document = {body, querySelectorAll: () => panes, getElementById: id => elements[id]};
const said = [];
function say() {
  const shown = panes.filter(pane => !pane.hidden);
  said.push([
    shown.map(pane => pane.dataset.key), elements['size-name'].value, elements['layout-name'].value,
    elements.rank.options.length, elements.rank.value,
    shown[0].arrows.filter(arrow => !arrow.dim).length, shown[0].arrows.length,
  ]);
}
(() => { SCRIPT })();
say();
elements.layout.value = '3'; elements.layout.oninput(); say();
elements.rank.value = ''; elements.rank.oninput(); say();
elements.size.value = '0'; elements.size.oninput(); say();
elements.put.checked = false; elements.put.oninput();
console.log(JSON.stringify([said, body['hide-put']]));
"""


def test_the_script_shows_one_drawing_at_a_time(tmp_path: Path) -> None:
    """In node, with a stand-in for the browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    text, panes = _draw(tmp_path, "allreduce 25MiB --nodes 2x2")
    data: dict[str, Any] = {"panes": [dataclasses.asdict(pane) | {"lanes": []} for pane in panes]}
    for kind in ("size", "layout"):
        found = re.search(rf'id="{kind}" min="0" max="\d+" value="(\d+)" data-names="(.*?)"', text)
        assert found is not None
        data[kind] = {"value": found[1], "names": html.unescape(found[2])}
    script = re.search("<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    program = f"const DATA = {json.dumps(data)};{_STAND_IN.replace('SCRIPT', script[1])}"
    file = tmp_path / "script.js"
    file.write_text(program)
    done = subprocess.run(
        [node, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said, puts_are_hidden = json.loads(done.stdout)
    first, larger, everything, smallest = said
    assert first[:5] == [["3 1"], "25 MiB", "2x2", 5, ""]
    assert first[5] == first[6] > 0
    # Of many ranks, the arrows of one, until the reader asks for all. That stays so.
    assert larger[:5] == [["3 3"], "25 MiB", "4x4", 17, "0"]
    assert 0 < larger[5] < larger[6]
    assert everything[5] == everything[6]
    assert smallest[:5] == [["0 3"], "1 KiB", "4x4", 17, ""]
    assert smallest[5] == smallest[6]
    assert puts_are_hidden
