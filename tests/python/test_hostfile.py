"""smddprun --hostfile: which line is this host, what torchrun gets, and jobs of several agents."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import hosts as namespaces
import programs
import pytest
from ranks import reserved_port

from smddp.launch import cli, hostfile

HOSTS = (
    "\ufeffnode0 slots=2\n# a comment\n\nnode1.cluster:4  # MPICH\nnode2 slots = 3 max_slots=8\n"
    "fe80::1\n[fe80::2]:5\r\n[fe80::3] slots=6\n"
)


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(HOSTS, encoding="utf-8")
    return path


def be(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str) -> None:
    """Gives this host another name; the names in `addresses` are its own, others are unknown."""

    def look_up(host: str, *_: object, **__: object) -> list[object]:
        if host not in addresses:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as raised:
        cli.main([*arguments, "train.py"])
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_lines(file: Path) -> None:
    hosts = [("node0", 2), ("node1.cluster", 4), ("node2", 3), ("fe80::1", None)]
    hosts += [("fe80::2", 5), ("fe80::3", 6)]
    assert hostfile.hosts_of_file(str(file)) == hosts


def test_a_line_for_each_rank(file: Path) -> None:
    """So PBS and LSF write it. Nodes with slots that this machine plays stay apart."""
    file.write_text("a\na\nb\nc slots=2\nc slots=2\na\nb\nd\n")
    hosts = [("a", 3), ("b", 2), ("c", 2), ("c", 2), ("d", None)]
    assert hostfile.hosts_of_file(str(file)) == hosts


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "a slots=2\nb slots=two",
            "hosts:2: expects a line such as node1 slots=4, not b slots=two",
        ),
        ("a 2", "hosts:1: expects a line"),
        ("slots=2", "hosts:1: expects a line"),
        ("a slots=0", "hosts:1: a has no slots: take the line out"),
        ("# nothing\n", "hosts names no host"),
        ("a\nb:four", "hosts:2: expects a line such as node1 slots=4, not b:four"),
        ("a:-1", "hosts:1: expects a line"),
        (":4", "hosts:1: expects a line"),
        ("[]:4", "hosts:1: expects a line"),
        ("a:4 slots=3", "hosts:1: expects a line"),
        ("a slots=4 slots=3", "hosts:1: expects a line"),
        ("\xff", "hosts is no text: expects lines"),
    ],
)
def test_wrong_lines(text: str, error: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text, encoding="latin-1")
    assert error in refused(capsys, "--hostfile", str(file))


@pytest.mark.parametrize(
    ("name", "addresses", "node"),
    [
        ("node1.cluster", [], 1),
        ("NODE1", [], 1),  # without its domain
        ("node2.cluster", [], 2),
        ("other", ["node0"], 0),  # another name of this host
        # The name counts, whatever the others resolve to.
        ("node2", ["node0", "node1.cluster"], 2),
    ],
)
def test_which_line_is_this_host(
    name: str, addresses: list[str], node: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, name, *addresses)
    hosts = [host for host, _ in hostfile.hosts_of_file(str(file))]
    assert hostfile.node_of_this_host(hosts) == node


def test_an_address_of_another_host() -> None:
    # 192.0.2.0/24 is for documentation; no host has it.
    assert hostfile.node_of_this_host(["192.0.2.1", "127.0.0.1"]) == 1


def test_no_line_or_several(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, "node1.elsewhere")
    said = refused(capsys, "--hostfile", str(file))
    assert "does not name this host, node1.elsewhere: say which of its 6 hosts" in said
    be(monkeypatch, "other", "node0", "node2")
    said = refused(capsys, "--hostfile", str(file))
    assert "names this host, other, several times" in said
    assert "0 (node0), 2 (node2)" in said


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    cli.main([*options, "--dry-run", "train.py"])
    return capsys.readouterr().out


def test_what_torchrun_gets(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, "node2")
    command = shlex.split(planned(capsys, "--hostfile", str(file), "--max-restarts", "2"))
    assert command == [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "6", "--node-rank", "2", "--master-addr", "node0", "--master-port", "29500"),
        *("--tee", "3", "--nproc-per-node", "3", "--max-restarts", "2", "--no-python"),
        *(sys.executable, "train.py"),
    ]
    # A port and an address that are already set stay.
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("MASTER_ADDR", "node0-fast")
    text = planned(capsys, "--hostfile", str(file), "--node-rank", "3", "-n", "2")
    assert "--node-rank 3 --master-addr node0-fast --master-port 1234 " in text
    assert "--nproc-per-node 2 " in text
    file.write_text("node2 slots=3")
    assert "--standalone --tee 3 --nproc-per-node 3" in planned(capsys, "--hostfile", str(file))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--node-rank", "6"],
            "--node-rank 6: ",
        ),
        (["--node-rank", "3"], "does not say how many ranks fe80::1 has: write slots=N"),
        (["--node-rank", "0", "-n", "4"], "gives node0 2 slots, but -n asks for 4 ranks"),
        (["--nodes", "2"], "--nodes and --hostfile exclude each other"),
    ],
)
def test_contradictions(
    options: list[str], error: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in refused(capsys, "--hostfile", str(file), *options)


def test_a_node_rank_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--node-rank needs --hostfile" in refused(capsys, "-n", "2", "--node-rank", "0")
    assert "missing: No such file or directory" in refused(capsys, "--hostfile", "missing")


_SCRIPT = """
import os, sys, torch, torch.distributed as dist, smddp
dist.init_process_group("smddp")
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if generation == 0 and dist.get_rank() == 1:
    os._exit(1)
ones = torch.ones(3)
dist.all_reduce(ones)
names = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SMDDP_NODE_ID")]
sys.stdout.write(f"{dist.get_rank()} {names} {ones.tolist()} of {generation}\\n")
dist.destroy_process_group()
"""


def _run(
    commands: list[list[str]], network: namespaces.Network | None = None, **variables: str
) -> str:
    """Runs the commands as the agents of node 0 and node 1; returns what their ranks write."""
    environments = [
        programs.environment(SMDDP_NODE_ID=f"node{node}", **variables)
        for node in range(len(commands))
    ]
    done = programs.run_together(commands, environments, network=network)
    assert [agent.returncode for agent in done] == [0, 0], done
    return "".join(agent.stdout for agent in done)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_agents_and_a_restart(tmp_path: Path) -> None:
    """The rank of the second agent fails once, and both agents start theirs again."""
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_text(_SCRIPT)
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.1 slots=1\n")
    command = ["-m", "smddp.launch", "--hostfile", str(hosts)]
    command += ["--max-restarts", "1", "--node-rank"]
    with reserved_port() as port:
        commands = [[*command, str(node), str(script)] for node in range(2)]
        text = _run(commands, MASTER_PORT=str(port))
    for rank in range(2):
        assert f"{rank} ['0', '1', 'node{rank}'] [2.0, 2.0, 2.0] of 1" in text


@pytest.mark.multiprocess
@pytest.mark.slow
def test_each_host_finds_its_line(tmp_path: Path) -> None:
    """Two hosts with addresses of their own run the same command."""
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_text(_SCRIPT.replace("generation == 0", "generation == 1"))
    with namespaces.Hosts(2) as network:
        hosts.write_text(f"{network.address(0)} slots=1\n{network.address(1)} slots=2\n")
        command = ["-m", "smddp.launch", "--hostfile", str(hosts), str(script)]
        text = _run([command] * 2, network)
    assert "0 ['0', '1', 'node0'] [3.0, 3.0, 3.0] of 0" in text
    assert "1 ['0', '2', 'node1'] [3.0, 3.0, 3.0] of 0" in text
    assert "2 ['1', '2', 'node1'] [3.0, 3.0, 3.0] of 0" in text
