"""smddprun --elastic: what is started again, what ends the job, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import programs
import psutil
import pytest

from smddp.launch import cli

# What the scripts below begin with. They import no torch.
_BEGIN = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
rank, starts = os.environ.get("RANK"), int(os.environ.get("SMDDP_ELASTIC", -1))

def tell(name):
    (folder / (name + ".new")).write_text(str(os.getpid()))
    (folder / (name + ".new")).rename(folder / name)  # never an empty file

def await_files(*names):
    end = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < end, names
        time.sleep(0.01)

def await_end_of(name):
    await_files(name)
    while os.path.exists(f"/proc/{(folder / name).read_text()}"):
        time.sleep(0.01)

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)
"""


def run(
    tmp_path: Path, script: str, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "train.py"
    file.write_text(_BEGIN + script)
    command = ["-m", "smddp.launch", "--elastic", *options, str(file), str(tmp_path)]
    return programs.run(*command, **variables)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def await_end_of(*pids: int) -> None:
    end = time.monotonic() + 30
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.01)


@pytest.mark.parametrize("end", ["die()", "die(signal.SIGTERM)", "sys.exit(75)"])
def test_only_what_is_lost_starts_again(end: str, tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "print('here', os.getpid(), starts)\n"
        f"if rank == '1' and starts == 0: {end}\n"
        "if rank == '1': tell('again')\n"
        "await_files('again')\n"
        "print('done', os.getpid(), starts)\n",
        *("-n", "3"),
    )
    assert ended.returncode == 0, ended.stderr
    here = {f"{rank} {n}": pid for rank, pid, n in _found(r"(\d)\]: here (\d+) (\d)", ended.stdout)}
    done = {f"{rank} {n}": pid for rank, pid, n in _found(r"(\d)\]: done (\d+) (\d)", ended.stdout)}
    assert sorted(here) == ["0 0", "1 0", "1 1", "2 0"]
    assert sorted(done) == ["0 0", "1 1", "2 0"]
    assert done.items() <= here.items()
    how = {"die()": "was killed by SIGKILL", "die(signal.SIGTERM)": "was killed by SIGTERM"}
    said = ended.stderr.splitlines()
    assert said == [
        f"smddprun: starts rank 0 (pid {here['0 0']}), rank 1 (pid {here['1 0']}), "
        f"rank 2 (pid {here['2 0']})",
        f"smddprun: rank 1 (pid {here['1 0']}) left: it {how.get(end, 'ended with status 75')}",
        f"smddprun: rank 1 (pid {here['1 1']}) came",
    ]


def _found(pattern: str, text: str) -> list[tuple[str, ...]]:
    return [match.groups() for match in re.finditer(pattern, text)]


def test_the_variables_are_those_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys\nname = sys.argv[1] + os.environ['RANK']\n"
        "with open(name, 'w') as file: json.dump(dict(os.environ), file)\n"
    )
    found = []
    for options in ([], ["--elastic"]):
        file = str(tmp_path / f"variables{len(options)}")
        command = ["-m", "smddp.launch", *options, "-n", "2", str(script), file]
        ended = programs.run(*command, OMP_NUM_THREADS="3")
        assert ended.returncode == 0, ended.stderr
        texts = [(rank, json.loads(Path(file + rank).read_text())) for rank in "01"]
        found.append({(rank, name): text[name] for rank, text in texts for name in text})
    torchrun, ours = found
    # Of the ranks; and what is another with each start, or says where the error goes.
    assert ours.keys() - torchrun.keys() == {(rank, "SMDDP_ELASTIC") for rank in "01"}
    left_out = {name for _, name in torchrun.keys() - ours.keys()}
    assert left_out <= {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
                        "TORCHELASTIC_SIGNALS_TO_HANDLE"}  # fmt: skip
    other = {name for place, name in ours if ours[place, name] != torchrun.get((place, name))}
    assert other == {"SMDDP_ELASTIC", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
                     "TORCHELASTIC_MAX_RESTARTS"}  # fmt: skip


_FAILURE = """
signal.signal(signal.SIGTERM, lambda *_: (tell(f"told{rank}"), sys.exit(0)))
tell(f"ready{rank}")
if rank == "1":
    await_files("ready0", "ready2")
    FAIL
time.sleep(60)
"""


def test_another_status_ends_the_job(tmp_path: Path) -> None:
    ended = run(tmp_path, _FAILURE.replace("FAIL", "sys.exit('too hot')"), "-n", "3")
    assert ended.returncode == 1
    assert all((tmp_path / f"told{rank}").exists() for rank in "02")
    pid = (tmp_path / "ready1").read_text()
    assert f"Root cause: rank 1 (pid {pid}) ended with status 1: too hot\n" in ended.stderr
    assert "left" not in ended.stderr
    await_end_of(*(int((tmp_path / f"ready{rank}").read_text()) for rank in "012"))


def test_the_status_is_passed_on_and_a_kill_comes_first(tmp_path: Path) -> None:
    """A script without smddp.elastic fails when another rank is killed."""
    script = _FAILURE.replace("FAIL", "die()").replace("time.sleep(60)\n", "")
    script += "if rank == '0': await_end_of('ready1'); sys.exit(3)\ntime.sleep(60)\n"
    ended = run(tmp_path, script, "-n", "3", "--max-restarts", "0")
    assert ended.returncode == 3
    pids = [(tmp_path / f"ready{rank}").read_text() for rank in range(2)]
    assert (
        f"Root cause: rank 1 (pid {pids[1]}) was killed by SIGKILL; then rank 0 (pid {pids[0]}) "
        "ended with status 3\n" in ended.stderr
    )


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    ended = run(tmp_path, "die(signal.SIGSEGV)", "-n", "2", "--max-restarts", "1")
    assert ended.returncode == 128 + signal.SIGSEGV
    assert ended.stderr.count("was killed by SIGSEGV") == 4
    for rank in range(2):
        pattern = rf"rank {rank} \(pid \d+\) is not started again: --max-restarts 1 in a minute"
        assert re.search(pattern, ended.stderr)


def test_others_go_on_without_what_is_given_up(tmp_path: Path) -> None:
    script = "if rank == '1': tell('gone'); die()\nawait_files('gone')\nprint('done')\n"
    ended = run(tmp_path, script, "-n", "2", "--max-restarts", "0")
    assert ended.returncode == 0
    assert ended.stdout == "[rank 0]: done\n"


def test_nothing_starts_again_when_the_job_is_done(tmp_path: Path) -> None:
    """It would wait for members that have ended."""
    script = "if rank == '0': tell('pid'); sys.exit(0)\nawait_end_of('pid')\ndie()\n"
    ended = run(tmp_path, script, "-n", "2")
    assert ended.returncode == 0
    assert "is not started again: others have ended with 0" in ended.stderr


def test_what_waits_to_start_again_does_not_when_the_job_is_done(tmp_path: Path) -> None:
    script = (
        "if rank == '1': tell(f'start{starts}'); die()\n"
        "await_end_of('start1')\n"  # the next start would be a second later
    )
    ended = run(tmp_path, script, "-n", "2")
    assert ended.returncode == 0
    assert ended.stderr.count("left") == 2
    assert ended.stderr.count("came") == 1


_SPARE = """
from torch.distributed import TCPStore
from smddp.launch.spare import await_place
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*place, is_master=False, wait_for_workers=False)
number = os.environ.get("SMDDP_ELASTIC_SPARE")
assert (rank is None) == ("LOCAL_RANK" not in os.environ) == (number is not None)
tell(f"spare{number}" if number else f"rank{rank}")
if number == "2": tell("second")
await_place(store)
assert "SMDDP_ELASTIC_SPARE" not in os.environ
rank, starts = os.environ["RANK"], os.environ["SMDDP_ELASTIC"]
if rank == "1" and starts == "0":
    await_files("spare1")
    die()
if rank == "1":
    tell("again")
await_files("again", "second")
print(rank, os.environ["LOCAL_RANK"], os.environ["SMDDP_NODE_ID"], starts, os.getpid())
"""


@pytest.mark.multiprocess
def test_a_spare_takes_the_place(tmp_path: Path) -> None:
    ended = run(tmp_path, _SPARE, "--nodes", "1+1", "--spares", "1", RANK="7", LOCAL_RANK="7")
    assert ended.returncode == 0, ended.stderr
    pids = {name: (tmp_path / name).read_text() for name in ("rank0", "spare1", "spare2")}
    assert sorted(ended.stdout.splitlines()) == [
        f"[rank 0]: 0 0 node0 0 {pids['rank0']}",
        f"[rank 1]: 1 1 node1 1 {pids['spare1']}",
    ]
    assert f"rank 1 (pid {pids['spare1']}) came: it was spare 1\n" in ended.stderr
    assert f"spare 2 (pid {pids['spare2']}) came\n" in ended.stderr
    await_end_of(int(pids["spare2"]))


def test_a_spare_that_fails_is_not_needed(tmp_path: Path) -> None:
    script = "if rank is None: tell('spare'); sys.exit(4)\nawait_files('spare')\n"
    script += (
        "while os.path.exists(f\"/proc/{(folder / 'spare').read_text()}\"): time.sleep(0.01)\n"
    )
    ended = run(tmp_path, script, "-n", "1", "--spares", "1")
    assert ended.returncode == 0
    assert "ended with status 4 before it was needed" in ended.stderr


@contextmanager
def started(tmp_path: Path, script: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a job whose ranks have told that they are ready."""
    file = tmp_path / "train.py"
    file.write_text(_BEGIN + script)
    command = ["-m", "smddp.launch", "--elastic", *options, str(file), str(tmp_path)]
    job = subprocess.Popen(
        [sys.executable, *command], env=programs.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("ready?"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield job
    finally:
        job.kill()
        job.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        f"signal.signal({int(number)}, lambda *_: (print('told', flush=True), sys.exit(0)))\n"
        "tell(f'ready{rank}')\ntime.sleep(60)\n"
    )
    with started(tmp_path, script, "-n", "2") as job:
        job.send_signal(number)
        output, said = job.communicate(timeout=60)
    assert job.returncode == 128 + number
    assert sorted(output.splitlines()) == ["[rank 0]: told", "[rank 1]: told"]
    assert said.endswith(f"smddprun: ended by {number.name}\n")
    assert "Traceback" not in said


def test_a_second_signal_kills_what_does_not_end(tmp_path: Path) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: tell(f'told{rank}'))\n"
        "tell(f'ready{rank}')\nwhile True: time.sleep(60)\n"
    )
    with started(tmp_path, script, "-n", "2") as job:
        job.terminate()
        while len(list(tmp_path.glob("told?"))) < 2:
            time.sleep(0.01)
        assert job.poll() is None
        job.terminate()
        assert job.wait(timeout=60) == 128 + signal.SIGTERM


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntell(f'ready{rank}')\ntime.sleep(60)\n"
    with started(tmp_path, script, "-n", "2", "--spares", "1") as job:
        pids = [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
        assert len(pids) == 4  # the store, too
        job.kill()
        await_end_of(*pids)


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        "if starts == 0:\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    (folder / 'child').write_text(str(child.pid))\n"
        "    die()\n"
    )
    assert run(tmp_path, script, "-n", "1").returncode == 0
    await_end_of(int((tmp_path / "child").read_text()))


def test_a_store_that_ends(tmp_path: Path) -> None:
    """Who is there goes on, and a lost rank is not replaced: it could not find the others."""
    script = "tell(f'ready{rank}')\nawait_files('go')\nif rank == '1': die()\n"
    with started(tmp_path, script, "-n", "2") as job:
        commands = {
            child.pid: child.cmdline() for child in psutil.Process(job.pid).children(recursive=True)
        }
        (store,) = [pid for pid, words in commands.items() if "smddp.launch.store" in words]
        os.kill(store, signal.SIGKILL)
        assert job.stderr is not None
        while "the store was killed by SIGKILL" not in job.stderr.readline():
            pass
        (tmp_path / "go").touch()
        said = job.communicate(timeout=60)[1]
    assert job.returncode == 0
    assert "is not started again: the store has ended" in said


def test_lines_of_output(tmp_path: Path) -> None:
    script = (
        "os.write(1, b'a\\r50%\\r\\nb\\n\\nwithout ')\nos.write(2, b'x\\n')\nos.write(1, b'end')\n"
        "os.write(1, 70000 * b'y')\n"
    )
    ended = run(tmp_path, script, "-n", "1")
    lines = ended.stdout.splitlines()
    assert lines[:4] == ["[rank 0]: " + line for line in ("a", "50%", "b", "")]
    # What has no end in sight is divided.
    assert "".join(line.removeprefix("[rank 0]: ") for line in lines[4:]) == (
        "without end" + 70000 * "y"
    )
    assert "[rank 0]: x\n" in ended.stderr


def test_output_that_nobody_reads(tmp_path: Path) -> None:
    script = "tell(f'ready{rank}')\nwhile True: print('x', flush=True); time.sleep(0.01)\n"
    with started(tmp_path, script, "-n", "2") as job:
        assert job.stdout is not None
        job.stdout.close()
        assert job.wait(timeout=60) == 128 + signal.SIGPIPE
        job.stdout = None


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "--elastic needs -n, --nodes or --hostfile"),
        (["-n", "0"], "-n 0: expects a number of ranks of at least 1"),
        (["-n", "2", "--spares", "-1"], "--spares -1: expects"),
        (["-n", "2", "--max-restarts", "-1"], "--max-restarts must be at least 0"),
        (["-n", "2", "--distribution", "{}"], "--elastic and --distribution exclude each other"),
        (["-n", "2"], "there is no file absent.py"),
    ],
)
def test_wrong_options(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert text in refused(capsys, "--elastic", *options, "absent.py")


def test_options_of_elastic_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--spares needs --elastic" in refused(capsys, "-n", "2", "--spares", "1", "true")
    monkeypatch.setenv("MASTER_PORT", "many")
    assert "MASTER_PORT=many: expects a port" in refused(capsys, "--elastic", "-n", "2", "true")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = run(tmp_path, "tell('started')", "-n", "2", MASTER_PORT=str(port))
    assert ended.returncode == 1
    assert f"cannot listen at port {port} of 127.0.0.1, where the ranks would meet: Address" in (
        ended.stderr
    )
    assert not (tmp_path / "started").exists()


def test_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=1\nc slots=2\n")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    options = ["--elastic", "--hostfile", str(hosts), "--node-rank", "2", "--dry-run"]
    cli.main([*options, "train.py"])
    lines = capsys.readouterr().out.splitlines()
    ranks = [found[1] for line in lines if (found := re.search(r" RANK=(\d)", line))]
    assert ranks == ["3", "4"]
    assert all(" MASTER_ADDR=a MASTER_PORT=29500 " in line for line in lines)
    assert all(" WORLD_SIZE=5 " in line for line in lines)
