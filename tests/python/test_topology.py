"""`smddp topo` on made-up machines, on this one, and in a job."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import programs
import pytest
import ranks

from smddp.tools import cli, topology, topology_drawing


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


def _machine(folder: Path, card: str = "efa") -> Path:
    """Makes up a /sys: 2 sockets with a NUMA node each, 2 cores of 2 hardware threads, 3 networks.

    Cores have the same numbers in both sockets, as on real machines.
    """
    files: dict[str, str] = {}
    for thread in range(8):
        number, core = divmod(thread % 4, 2)
        place = f"devices/system/cpu/cpu{thread}/topology"
        files[f"{place}/physical_package_id"] = str(number)
        files[f"{place}/core_id"] = str(core)
        files[f"{place}/thread_siblings_list"] = f"{thread % 4},{thread % 4 + 4}"
    for node, threads in enumerate(("0-1,4-5", "2-3,6-7")):
        files[f"devices/system/node/node{node}/cpulist"] = threads
        files[f"devices/system/node/node{node}/meminfo"] = f"Node {node} MemTotal: 33554432 kB"
    files["devices/system/node/possible"] = "0-1"
    files |= {
        "class/net/eth0/operstate": "up",
        "class/net/eth0/speed": "25000",
        "class/net/eth0/device/numa_node": "1",
        "class/net/eth1/operstate": "down",
        "class/net/eth1/speed": "-1",
        "class/net/eth1/device/numa_node": "-1",
        "class/net/lo/operstate": "unknown",
        "class/net/bonding_masters": "bond0",
    }
    if card:
        files["class/infiniband/card0/ports/1/rate"] = "100 Gb/sec (4X EDR)"
        files["class/infiniband/card0/device/numa_node"] = "0"
    _write(folder, files)
    if card:
        (folder / "drivers" / card).mkdir(parents=True)
        (folder / "class/infiniband/card0/device/driver").symlink_to(folder / "drivers" / card)
    return folder


def test_sockets_numa_nodes_and_cores(tmp_path: Path) -> None:
    found = topology.numa_nodes(_machine(tmp_path))
    assert found == [
        topology.NumaNode(0, 0, [[0, 4], [1, 5]], 32 << 30),
        topology.NumaNode(1, 1, [[2, 6], [3, 7]], 32 << 30),
    ]


def test_a_kernel_that_tells_little(tmp_path: Path) -> None:
    """As in containers and some virtual machines."""
    assert topology.numa_nodes(tmp_path) == [topology.NumaNode(0, 0, [], 0)]
    for thread in (0, 1, 10, 2):
        (tmp_path / f"devices/system/cpu/cpu{thread}").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/cpufreq").mkdir()
    assert topology.numa_nodes(tmp_path) == [topology.NumaNode(0, 0, [[0], [1], [2], [10]], 0)]
    assert topology.interfaces(tmp_path) == []
    assert topology.cards(tmp_path) == []


def test_interfaces(tmp_path: Path) -> None:
    found = topology.interfaces(_machine(tmp_path))
    assert [one.name for one in found] == ["eth0", "lo", "eth1"]  # those that are up first
    assert [one.megabits for one in found] == [25000, None, None]
    assert [one.numa_node for one in found] == [1, None, None]


@pytest.mark.parametrize(
    ("driver", "provider"), [("efa", "efa"), ("mlx5", "verbs"), ("unheard_of", "")]
)
def test_cards(driver: str, provider: str, tmp_path: Path) -> None:
    (card,) = topology.cards(_machine(tmp_path, driver))
    assert card == topology.Card("card0", driver, provider, "100 Gb/sec (4X EDR)", 0)


_HERE = [
    topology.Interface("eth0", "up", 25000, ["10.1.2.3"], None),
    topology.Interface("lo", "unknown", None, ["127.0.0.1", "::1"], None),
]
_EFA = topology.Card("card0", "efa", "efa", "", None)


@pytest.mark.parametrize(
    ("environ", "cards", "no_libfabric", "text", "used"),
    [
        ({"SMDDP_INTERFACE": "eth0"}, [], "",
         "TCP sockets (no card bypasses the kernel) over eth0 (SMDDP_INTERFACE=eth0)", "eth0"),
        ({"SMDDP_INTERFACE": "10.1.2.3"}, [], "", "over eth0", "eth0"),
        ({"MASTER_ADDR": "localhost"}, [], "", "over lo (MASTER_ADDR is localhost", "lo"),
        ({"MASTER_ADDR": "127.0.0.1"}, [], "", "over lo (it reaches rank 0 at 127.0.0.1)", "lo"),
        ({"SMDDP_INTERFACE": "lo"}, [_EFA], "", "libfabric on a card (efa); rendezvous over lo",
         "lo"),
        ({"SMDDP_INTERFACE": "lo"}, [_EFA], "libfabric cannot be loaded",
         "TCP sockets (a card (efa), but libfabric cannot be loaded) over lo", "lo"),
        ({"SMDDP_INTERFACE": "lo", "SMDDP_PROVIDER": "sockets"}, [_EFA], "",
         "TCP sockets (SMDDP_PROVIDER) over lo", "lo"),
        ({"SMDDP_INTERFACE": "lo", "SMDDP_PROVIDER": "tcp"}, [], "",
         "libfabric's provider tcp (SMDDP_PROVIDER); rendezvous over lo", "lo"),
        ({"SMDDP_INTERFACE": "eth9"}, [], "", "over eth9 (SMDDP_INTERFACE=eth9)", ""),
    ],
)  # fmt: skip
def test_which_network_and_why(
    environ: dict[str, str],
    cards: list[topology.Card],
    no_libfabric: str,
    text: str,
    used: str,
) -> None:
    for one in _HERE:
        one.is_used = False
    assert text in topology.network(_HERE, cards, no_libfabric, environ)
    assert [one.name for one in _HERE if one.is_used] == ([used] if used else [])


def test_a_made_up_machine_as_text_and_drawing(tmp_path: Path) -> None:
    host = topology.look(_machine(tmp_path))
    host.ranks = [0, 1, 2, 5]
    host.gpus = [topology.Gpu("Some <GPU>", 80 << 30)]
    text = topology.as_text(host)
    for line in (
        ": ranks 0-2,5",
        "  socket 1\n    NUMA node 1: 2 cores, hardware threads 2-3,6-7, 32.0 GiB",
        "    eth0: up, 25 Gbit/s, ",
        ", at NUMA node 1",
        "    card card0: efa, libfabric's efa, 100 Gb/sec (4X EDR), at NUMA node 0",
        "  GPU 0: Some <GPU>, 80.0 GiB",
    ):
        assert line in text, text
    _check_drawing(topology_drawing.draw([_as_json(host), _as_json(host)]), cores=8)


def _as_json(host: topology.Host) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(host)))


def _check_drawing(text: str, cores: int) -> None:
    """Checks that all cores and texts are inside, and that no two lines of text overlap."""
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    name = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{name}rect")
    assert sum(box.attrib["class"] == "core" for box in boxes) == cores
    for box in boxes:
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    texts = root.findall(f"{name}text")
    lines = sorted(float(one.attrib["y"]) for one in texts)
    assert all(below - line >= 13 for line, below in itertools.pairwise(lines))
    for one in texts:
        assert float(one.attrib["x"]) + 6.5 * len(one.text or "") <= width


def test_many_cores_fit(tmp_path: Path) -> None:
    host = topology.look(_machine(tmp_path))
    host.numa_nodes[0].cores = [[core] for core in range(192)]
    host.processor = "A processor with a name that is much too long for one line of a drawing " * 2
    _check_drawing(topology_drawing.draw([_as_json(host)]), cores=194)


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topo"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"NUMA node \d+: \d+ cores?, hardware threads \d", text)
    assert "  between nodes: " in text
    file = tmp_path / "topo.svg"
    assert topology.main(["--json", "--svg", str(file)]) == 0
    said = capsys.readouterr()
    (host,) = json.loads(said.out)["hosts"]
    assert said.err == f"wrote {file}\n"
    threads = [each for node in host["numa_nodes"] for core in node["cores"] for each in core]
    assert set(os.sched_getaffinity(0)) <= set(threads)
    assert "lo" in [one["name"] for one in host["interfaces"]]
    if not host["no_libfabric"]:
        assert "tcp" in host["libfabric"]
    _check_drawing(file.read_text(), sum(len(node["cores"]) for node in host["numa_nodes"]))
    assert topology.main(["--svg", str(tmp_path / "nowhere/topo.svg")]) == 1
    assert capsys.readouterr().err.startswith("smddp topo: ")


def _be_topology() -> None:
    os.environ.pop("SMDDP_PROVIDER", None)  # the choice of smddp is what is shown
    programs.become(["-m", "smddp.tools.topology", "--json"], dict(os.environ))


def _be_twins(folder: Path) -> None:
    """Each rank is on a host of its own, and all hosts have one name; there is no numpy."""
    os.environ.pop("SMDDP_PROVIDER", None)
    boot_id = folder / os.environ["RANK"]
    boot_id.write_text(os.environ["RANK"])
    script = f"""
    import torch
    from pathlib import Path
    from smddp.tools import doctor, topology
    def numpy(tensor, **options):
        raise RuntimeError("Numpy is not available")
    torch.Tensor.numpy = numpy
    doctor._BOOT_ID = Path({str(boot_id)!r})
    raise SystemExit(topology.main(["--json"]))
    """
    programs.become(["-c", textwrap.dedent(script)], dict(os.environ))


def _be_slow() -> None:
    """Rank 1 reads late what the others have told."""
    script = """
    import time
    from smddp.tools import _meeting, topology
    def told(self, what, told=_meeting.Meeting.told):
        time.sleep(2 if (what, self.rank) == ("host", 1) else 0)
        return told(self, what)
    _meeting.Meeting.told = told
    raise SystemExit(topology.main(["--json"]))
    """
    programs.become(["-c", textwrap.dedent(script)], dict(os.environ))


def _job(layout: list[int], target: Any = _be_topology, *arguments: Any, **options: Any) -> Any:
    """Returns what rank 0 of a job prints as JSON; the other ranks print nothing."""
    outcomes = ranks.run_ranks(target, "+".join(map(str, layout)), *arguments, **options)
    assert all(outcome.status == 0 for outcome in outcomes), outcomes
    assert not any(outcome.stdout for outcome in outcomes[1:])
    return json.loads(outcomes[0].stdout)


@pytest.mark.multiprocess
def test_a_job_of_two_nodes() -> None:
    found = _job([2, 1])
    assert [(host["name"], host["ranks"]) for host in found["hosts"]] == [
        ("node0", [0, 1]),
        ("node1", [2]),
    ]
    assert "2 nodes (2 + 1 ranks)" in found["group"]
    assert "it reaches rank 0 at 127.0.0.1" in found["hosts"][1]["network"]
    assert "address 127.0.0.1" in found["group"]  # what smddp has chosen itself


@pytest.mark.multiprocess
def test_a_job_on_one_host_uses_no_network() -> None:
    (host,) = _job([2])["hosts"]
    assert host["ranks"] == [0, 1]
    assert host["network"] == "no network: all ranks are on this host"
    assert not any(one["is_used"] for one in host["interfaces"])


@pytest.mark.multiprocess
def test_hosts_of_one_name(tmp_path: Path) -> None:
    """They are not merged, and numpy, which torch does not require, is not needed."""
    first, second = _job([2], _be_twins, tmp_path)["hosts"]
    assert (first["ranks"], second["ranks"]) == ([0], [1])
    assert first["name"] == second["name"]


@pytest.mark.multiprocess
def test_rank_0_serves_until_all_have_read() -> None:
    (host,) = _job([2], _be_slow, rank_0_serves=True)["hosts"]
    assert host["ranks"] == [0, 1]
