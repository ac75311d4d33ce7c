"""smddprun --hostfile --ssh: one command for all hosts, with a script that stands for ssh."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hosts as namespaces
import programs
import psutil
import pytest
from ranks import reserved_port

from smddp.launch import cli, hostfile, remote

# Runs the command line here, as a host that has the name. Like ssh it joins the words by blanks.
_SSH = """#!/bin/sh
host=$1
shift
echo "$$ $*" > FOLDER/ssh-$host
SMDDP_NODE_ID=$host sh -c "$*"
exit $?
"""
_LATER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / ("ready" + os.environ["RANK"])).write_text(str(os.getpid()))
def await_files(*names):
    end = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < end, names
        time.sleep(0.01)
await_files("ready0", "ready1", "ready2")
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    file = tmp_path / "ssh"
    file.write_text(_SSH.replace("FOLDER", str(tmp_path)))
    file.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield str(file)


def command(tmp_path: Path, ssh: str, script: str, *options: str) -> list[str]:
    file = tmp_path / "train.py"
    file.write_text(script)
    words = ["-m", "smddp.launch", "--hostfile", str(tmp_path / "hosts"), f"--ssh={ssh}", *options]
    return [*words, str(file), str(tmp_path)]


def pids(tmp_path: Path) -> list[int]:
    return [int(file.read_text()) for file in tmp_path.glob("ready*")]


def await_end_of(*pids: int) -> None:
    end = time.monotonic() + 30
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.01)


@pytest.mark.parametrize("elastic", [["--elastic"], pytest.param([], marks=pytest.mark.costly)])
def test_all_hosts(elastic: list[str], tmp_path: Path, ssh: str) -> None:
    script = (
        "import os, sys\nnames = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK', 'MASTER_ADDR', "
        "'SMDDP_NODE_ID', 'SMDDP_INSTEAD_OF', 'SMDDP_TOKEN', 'NCCL_DEBUG', 'ASKED', 'SET')\n"
        "sys.stdout.write(f'{[os.environ.get(name) for name in names]} {os.getcwd()}\\n')\n"
    )
    words = command(tmp_path, ssh, script, *elastic, "-x", "ASKED", "-x", "SET=a b")
    words.insert(-2, "--instead-of=gloo")
    variables = {"SMDDP_TOKEN": 'it\'s "secret"', "NCCL_DEBUG": "INFO", "ASKED": "$HOME"}
    ended = programs.run(*words, **variables, SMDDP_NODE_ID="mine", PMI_RANK="7")
    assert ended.returncode == 0, ended.stderr
    for rank, (local, node) in enumerate([(0, 0), (1, 0), (0, 1)]):
        host = ("localhost", "127.0.0.1")[node]
        values = [str(rank), "3", str(local), str(node), "localhost", host, "gloo"]
        values += [variables["SMDDP_TOKEN"], "INFO", "$HOME", "a b"]
        assert f"[rank {rank}]: {values} {os.getcwd()}\n" in ended.stdout, ended.stdout
    # Other users of a host see command lines.
    assert "secret" not in (tmp_path / "ssh-localhost").read_text()


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getppid(), signal.SIGKILL)"])
def test_a_host_that_fails_ends_the_others(end: str, tmp_path: Path, ssh: str) -> None:
    script = _LATER + f"if os.environ['RANK'] == '2': {end}\ntime.sleep(60)\n"
    ended = programs.run(*command(tmp_path, ssh, script, "--elastic"))
    assert ended.returncode == (3 if "exit" in end else 128 + signal.SIGKILL)
    status = f"127.0.0.1: smddprun there ended with status {ended.returncode}"
    assert f"smddprun: {status}; the other hosts are ended\n" in ended.stderr
    await_end_of(*pids(tmp_path))


def test_an_elastic_job_goes_on_without_a_host_that_is_lost(tmp_path: Path, ssh: str) -> None:
    """As ssh does, the script says by 255 that the connection is lost."""
    file = tmp_path / "ssh"
    file.write_text(file.read_text().replace("exit $?", "exit 255"))
    script = _LATER + (
        "if os.environ['RANK'] == '2': os.kill(os.getppid(), signal.SIGKILL)\n"
        "pid = (folder / 'ready2').read_text()\n"
        "while os.path.exists(f'/proc/{pid}'): time.sleep(0.01)\n"
        "print('done')\n"
    )
    # The last host ends with 255, too; then it is known that the other one had.
    ended = programs.run(*command(tmp_path, ssh, script, "--elastic"))
    assert "127.0.0.1: smddprun there ended with status 255: the other hosts go on" in ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[rank 0]: done", "[rank 1]: done"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("elastic", [["--elastic"], pytest.param([], marks=pytest.mark.costly)])
def test_signals(number: signal.Signals, elastic: list[str], tmp_path: Path, ssh: str) -> None:
    script = _LATER + "time.sleep(60)\n"
    job = subprocess.Popen(
        [sys.executable, *command(tmp_path, ssh, script, *elastic)],
        env=programs.environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while len(pids(tmp_path)) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        hosts = [int(file.read_text().split()[0]) for file in tmp_path.glob("ssh-*")]
        job.send_signal(number)
        said = job.communicate(timeout=60)[1]
    finally:
        job.kill()
    if number == signal.SIGKILL:
        assert job.returncode == -signal.SIGKILL
    else:
        assert job.returncode == 128 + number
        assert said.endswith(f"smddprun: ended by {number.name}\n")
        assert "Traceback" not in said
    await_end_of(*hosts, *pids(tmp_path))


def test_a_command_that_passes_no_input(tmp_path: Path, ssh: str) -> None:
    file = tmp_path / "ssh"
    file.write_text(file.read_text().replace('"$*"', '"$*" < /dev/null'))
    ended = programs.run(*command(tmp_path, ssh, "", "--elastic"))
    assert ended.returncode == 1
    assert "the command of --ssh does not pass on its standard input" in ended.stderr
    file.write_text("#!/bin/sh\necho no route >&2\nexit 255\n")
    ended = programs.run(*command(tmp_path, ssh, "", "--elastic"))
    assert ended.returncode == 255
    assert "no route" in ended.stderr
    assert "ended with status 255 (ssh says so if it cannot connect)" in ended.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--ssh", "-n", "2"], "--ssh needs --hostfile"),
        (["--hostfile", "HOSTS", "--ssh", "--node-rank", "0"], "--ssh and --node-rank exclude"),
        (["--hostfile", "HOSTS", "--ssh=absent", "-n", "2"], "--ssh=absent: there is no such"),
        (["--hostfile", "HOSTS", "--ssh=sh"], "HOSTS does not say how many ranks b has"),
        (["--hostfile", "HOSTS", "--ssh=sh", "-n", "2", "-x", "ABSENT"], "-x ABSENT: there is no"),
        (["--hostfile", "HOSTS", "-n", "2", "-x", "HOME"], "-x needs --ssh"),
    ],
)
def test_wrong_options(
    options: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = str(tmp_path / "hosts")
    Path(hosts).write_text("a slots=2\nb\n")
    with pytest.raises(SystemExit) as raised:
        cli.main([*(word.replace("HOSTS", hosts) for word in options), "train.py"])
    assert raised.value.code == 2
    assert text.replace("HOSTS", hosts) in capsys.readouterr().err


def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nfe80::1\n")
    # The option of the script is its own.
    cli.main(["--hostfile", str(hosts), "--ssh", "-n", "2", "--dry-run", "x.py", "--ssh"])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [words[:2] for words in lines] == [["ssh", "a"], ["ssh", "fe80::1"]]
    job = json.loads(lines[1][-1])
    assert job["arguments"] == [
        "--hosts=[a]:2,[fe80::1]:0", "--ranks=2", "--node-rank=1", "x.py", "--ssh",
    ]  # fmt: skip
    assert hostfile.hosts_of_words("[a]:2,[fe80::1]:0") == [("a", 2), ("fe80::1", None)]


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if re.match("SMDDP_|NCCL_|FI_|MASTER_", name)]:
        monkeypatch.delenv(name)
    values = {"SMDDP_LOG": "info", "FI_PROVIDER": "efa", "SMDDP_NODE_ID": "n", "MASTER_PORT": "7"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    del values["SMDDP_NODE_ID"]
    assert remote.variables_to_pass([]) == values
    asked = {"HOME": os.environ["HOME"], "SMDDP_LOG": "", "A": "b=c"}
    assert remote.variables_to_pass(["HOME", "SMDDP_LOG=", "A=b=c"]) == values | asked


_SPARE = """
import os, signal, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from smddp.launch.spare import await_place
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*place, is_master=False, wait_for_workers=False)
is_spare = "SMDDP_ELASTIC_SPARE" in os.environ
store.add("spare" if is_spare else "ranks", 1)
await_place(store)
rank, starts = os.environ["RANK"], os.environ["SMDDP_ELASTIC"]
if rank == "2" and starts == "0":
    while store.add("ranks", 0) < 3 or store.add("spare", 0) < 1:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "2":
    store.set("again", "yes")
store.wait(["again"], timedelta(seconds=60))
store.add("done", 1)
while rank == "0" and store.add("done", 0) < 3:
    time.sleep(0.01)  # its host has the store
sys.stdout.write(f"{rank} {starts} {is_spare} {os.environ['LOCAL_RANK']}\\n")
"""


@pytest.mark.multiprocess
def test_a_spare_of_a_host_without_the_store(tmp_path: Path) -> None:
    """Two hosts with addresses of their own run the same command."""
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_text(_SPARE)
    with namespaces.Hosts(2) as network:
        hosts.write_text(f"{network.address(0)} slots=1\n{network.address(1)} slots=2\n")
        words = ["-m", "smddp.launch", "--elastic", "--spares", "1", "--hostfile", str(hosts)]
        words += [str(script)]
        done = programs.run_together([words] * 2, [programs.environment()] * 2, network=network)
    assert [host.returncode for host in done] == [0, 0], done
    lines = [line for host in done for line in host.stdout.splitlines()]
    assert sorted(lines) == [
        "[rank 0]: 0 0 False 0", "[rank 1]: 1 0 False 0", "[rank 2]: 2 1 True 1",
    ]  # fmt: skip
