"""`smddp doctor` finds faults that are seeded here, and nothing on a machine without any."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import interpreters
import programs
import pytest

from smddp.tools import _local_ranks, doctor
from smddp.torch import _C

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("_no_settings")


def _diagnose(
    preparation: str = "", run: Callable[..., Any] = programs.run, **variables: str
) -> dict[str, tuple[str, str, str]]:
    """Returns state, text and remedy of the worst finding of each check, in a new process."""
    script = f"""
    import dataclasses, json
    from pathlib import Path
    from smddp.tools import doctor
    {preparation}
    print(json.dumps([dataclasses.asdict(finding) for finding in doctor.examine_host()]))
    """
    ended = run("-c", textwrap.dedent(script), **variables)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, tuple[str, str, str]] = {}
    for row in json.loads(ended.stdout):
        if row["check"] not in found or row["state"] != "ok":
            found[row["check"]] = (row["state"], row["text"], row["remedy"])
    return found


def _limit(which: int, value: int) -> str:
    """Returns a statement that limits a resource of the process."""
    return f"import resource; resource.setrlimit({which}, ({value}, {value}))"


def _system(tmp_path: Path, card: str = "", clock: str = "tsc", nodes: int = 1) -> str:
    """Returns statements that show the doctor a made-up /sys."""
    if card:
        (tmp_path / "drivers" / card).mkdir(parents=True)
        device = tmp_path / "class/infiniband/card0/device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(tmp_path / "drivers" / card)
    for node in range(nodes):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    folder = tmp_path / "devices/system/clocksource/clocksource0"
    folder.mkdir(parents=True)
    (folder / "current_clocksource").write_text(clock + "\n")
    return f"doctor._SYS = Path({str(tmp_path)!r})"


def test_nothing_is_wrong_here() -> None:
    for check, (state, text, remedy) in _diagnose().items():
        assert state != "fault", (check, text)
        assert bool(remedy) == (state == "warning")


@pytest.mark.parametrize(
    ("variables", "check", "state", "text", "remedy"),
    [
        ({"SMDDP_PROVIDR": "tcp"}, "settings", "fault", "did you mean SMDDP_PROVIDER?", "correct"),
        ({"SMDDP_IN_FLIGHT": "many"}, "settings", "fault", "SMDDP_IN_FLIGHT=many", "unset"),
        ({"SMDDP_INTERFACE": "eth77"}, "interface", "fault", "no such interface", "use one of lo"),
        ({"SMDDP_SIMD": "scalar"}, "processor", "warning", "no vector instructions", "SMDDP_SIMD"),
        ({"LOCAL_WORLD_SIZE": "500"}, "cores", "warning", "500 ranks", "one rank per core"),
        ({"OMP_NUM_THREADS": "500"}, "cores", "warning", "500 threads", "set OMP_NUM_THREADS="),
        ({"OMP_NUM_THREADS": "500,2"}, "cores", "warning", "500 threads", "set OMP_NUM_THREADS="),
        ({"LOCAL_WORLD_SIZE": "all"}, "cores", "fault", "LOCAL_WORLD_SIZE=all is not", "correct"),
    ],
)
def test_variables(
    variables: dict[str, str], check: str, state: str, text: str, remedy: str
) -> None:
    found = _diagnose(**variables)
    assert found[check][0] == state, found
    assert text in found[check][1]
    assert remedy in found[check][2]
    assert not [name for name in found if name != check and found[name][0] == "fault"]


@pytest.mark.parametrize(("hindered", "state"), [(False, "ok"), (True, "warning")])
def test_congestion_control(hindered: bool, state: str) -> None:
    made_up = {"system": "bbr", "on_short_paths": "bbr", "text": "bbr", "hindered": hindered}
    found = _diagnose(f"doctor._load.load().congestion_control = lambda: {made_up}")
    assert found["TCP"][:2] == (state, "bbr")
    assert ("sysctl" in found["TCP"][2]) == hindered


@pytest.mark.parametrize(
    ("which", "value", "check", "state", "text", "remedy"),
    [
        (resource.RLIMIT_NOFILE, 256, "open files", "fault", "the limit is 256", "LimitNOFILE"),
        (resource.RLIMIT_FSIZE, 1 << 20, "shared memory", "fault", "1 MiB", "ulimit -f"),
        (resource.RLIMIT_AS, 50 << 30, "address space", "warning", "50 GiB", "ulimit -v"),
    ],
)
def test_limits(which: int, value: int, check: str, state: str, text: str, remedy: str) -> None:
    found = _diagnose(_limit(which, value))
    assert found[check][0] == state, found
    assert text in found[check][1]
    assert remedy in found[check][2]


@pytest.mark.parametrize(
    ("system", "check", "state", "text", "remedy"),
    [
        ({"clock": "hpet"}, "clock", "warning", "the clock is hpet", "clocksource=tsc"),
        ({"nodes": 2}, "NUMA", "warning", "2 nodes", "--numa-binding"),
        ({"card": "efa"}, "huge pages", "warning", "none is reserved", "vm.nr_hugepages"),
        ({"card": "efa"}, "locked memory", "fault", "64 KiB", "ulimit -l unlimited"),
    ],
)
def test_machines(
    system: dict[str, str], check: str, state: str, text: str, remedy: str, tmp_path: Path
) -> None:
    # A limit that no system sets by itself.
    limit = _limit(resource.RLIMIT_MEMLOCK, 64 << 10)
    found = _diagnose(f"{_system(tmp_path, **system)}; {limit}")
    assert found[check][0] == state, found
    assert text in found[check][1]
    assert remedy in found[check][2]


@pytest.mark.costly
def test_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("1:cpu:/\n0::/job/task\n")
    files = {
        "job/memory.max": "1000", "job/memory.current": "990",
        "job/memory.stat": "anon 90\nactive_file 500\ninactive_file 300\nslab_reclaimable 20\n",
        "job/cpu.max": "150000 100000", "job/task/cpu.max": "max 100000",
        "job/task/memory.max": "max", "job/task/memory.current": "980",
        "job/pids.max": "10", "job/pids.current": "3", "job/task/pids.max": "max",
    }  # fmt: skip
    (tmp_path / "job/task").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    groups = _C.ControlGroups(str(tmp_path / "own"), str(tmp_path))
    monkeypatch.setattr(doctor, "_control_groups", lambda: groups)
    assert groups.available_memory() == 1000 - 990 + 820
    assert groups.available_threads() == 7
    assert doctor._quota() == 1.5
    assert {finding.check: finding.state for finding in doctor._memory()}["threads"] == "fault"
    (tmp_path / "own").unlink()
    assert groups.available_memory() > 1 << 20
    assert groups.available_threads() is None
    assert doctor._quota() is None


def test_limits_of_control_groups_of_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, only the host knows the group that is named."""
    (tmp_path / "own").write_text(
        "5:pids:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n"
        "2:name=systemd:/docker\n0::/\n"
    )
    files = {
        "memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "990",
        "memory/memory.stat": "active_file 1\ntotal_active_file 500\ntotal_inactive_file 300\n",
        "cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000",
        "memory/docker/memory.limit_in_bytes": "9223372036854771712",
        "pids/pids.max": "max", "pids/docker/pids.max": "10", "pids/docker/pids.current": "5",
        "memory/docker/memory.usage_in_bytes": "1", "memory/docker/memory.stat": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    groups = _C.ControlGroups(str(tmp_path / "own"), str(tmp_path))
    monkeypatch.setattr(doctor, "_control_groups", lambda: groups)
    assert groups.available_memory() == 1000 - 990 + 800
    assert groups.available_threads() == 5
    assert doctor._quota() == 1.5
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1")
    assert doctor._quota() is None


def test_a_host_whose_name_is_in_no_encoding() -> None:
    """The report of the test processes is read, whatever bytes it has."""
    program = (
        'import sys; sys.stdout.buffer.write(b\'[{"where": "h\\xff", "check": "c", \' '
        'b\'"state": "ok", "text": "t", "remedy": ""}]\')'
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        findings, _ = doctor._end_of(process, time.monotonic() + 60)
    assert [finding.text for finding in findings] == ["t"]


def test_a_card_without_libfabric(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "libfabric.so.1").write_text("no library")
    # The loader reads this variable when a program starts.
    found = _diagnose(
        _system(tmp_path, card="efa"),
        lambda _, script, **variables: interpreters.run(script, **variables),
        LD_LIBRARY_PATH=str(folder),
    )
    state, text, remedy = found["network cards"]
    assert state == "fault"
    assert "this host has a card (efa): " in text
    assert "EFA installer" in remedy


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.costly
def test_two_processes_talk() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "smddp.tools.cli", "doctor"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert "✓ all_reduce: 2 ranks have summed 16 MiB" in ended.stdout
    assert "✗" not in ended.stdout


@pytest.mark.multiprocess
def test_a_fault_of_this_host_is_told_once() -> None:
    ended = programs.run("-m", "smddp.tools.doctor", SMDDP_PROVIDR="tcp")
    assert ended.returncode == 1
    assert ended.stdout.count("✗") == 1, ended.stdout
    assert "✓ all_reduce: 2 ranks have summed 16 MiB" in ended.stdout


def test_ranks_import_what_their_parent_does(tmp_path: Path) -> None:
    """Also in the folder of a clone that is not built, where smddp is installed elsewhere."""
    (tmp_path / "smddp").mkdir()
    (tmp_path / "smddp/__init__.py").write_text("raise ImportError('not built')")
    command = [*_local_ranks.python_command("smddp.tools.plan"), "list"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_ranks_under_torchrun_have_a_store_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this variable torch's rank 0 makes no store, but looks for that of torchrun."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with _local_ranks.reserved_port() as port:
        (rank,) = _local_ranks.start_ranks([1], ["env"], port, subprocess.PIPE)
        output, _ = rank.communicate(timeout=60)
    assert f"MASTER_PORT={port}" in output.decode()
    assert "TORCHELASTIC" not in output.decode()


ROW = {"where": "w", "check": "all_reduce", "text": "t", "remedy": ""}
HEALTHY = f"[ $RANK = 0 ] && echo '{json.dumps([ROW | {'state': 'ok'}])}'\n"
FAULTY = f"[ $RANK = 0 ] && echo '{json.dumps([ROW | {'state': 'fault'}])}'\n"
DIED = "a test process failed: "


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (HEALTHY + "exit 0", ["t"]),
        (FAULTY + "exit 1", ["t"]),
        (HEALTHY + "[ $RANK = 0 ] || kill -SEGV $$",
         ["t", DIED + "signal SIGSEGV, no error output"]),
        (HEALTHY + "[ $RANK = 0 ] && kill -KILL $$; exit 0",
         ["t", DIED + "signal SIGKILL, no error output"]),
        (HEALTHY + "[ $RANK = 0 ] && exit 0; echo why >&2; exit 1", ["t", DIED + "status 1, why"]),
        (FAULTY + "[ $RANK = 0 ] && exit 1; exit 3", ["t", DIED + "status 3, no error output"]),
        ("exit 0", [DIED + "status 0, no error output"]),
        ("[ $RANK = 0 ] && echo '[{'; exit 0", [DIED + "status 0, no error output"]),
    ],
)  # fmt: skip
def test_processes_that_die(
    script: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(layout: list[int], _: Any, *others: Any) -> list[subprocess.Popen[bytes]]:
        return _local_ranks.start_ranks(layout, ["bash", "-c", script], *others)

    monkeypatch.setattr(doctor, "start_ranks", start)
    monkeypatch.setattr(doctor, "examine_host", list)
    (_, found) = doctor._report_alone()[-1]
    assert [finding.text for finding in found] == expected
    assert (doctor.main([]) == 0) == (expected == ["t"] and script.startswith(HEALTHY))


def test_test_processes_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(real(["sleep", "100"]))
        return started[0]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(doctor, "examine_host", list)
    ((finding,),) = (found for _, found in doctor._report_alone() if found)
    assert finding.state == "fault"
    assert "cannot be started: [Errno 11] Resource temporarily unavailable" in finding.text
    assert "ulimit -u" in finding.remedy
    assert started[0].poll() is not None, "a test process is left"


# Two ranks on each of two hosts.
UNKNOWN_HOST = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ONE_OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "text", "remedy"),
    [
        (UNKNOWN_HOST, "the job has several hosts, and nothing says where rank 0 is",
         "set MASTER_ADDR, for instance by mpirun -x"),
        ({**ONE_OF_TWO, "WORLD_SIZE": "two"}, "a variable of the launcher is wrong: ",
         "correct RANK, WORLD_SIZE"),
        ({**ONE_OF_TWO, "RANK": "?"}, "a variable of the launcher is wrong: ", "correct RANK"),
        ({**ONE_OF_TWO, "MASTER_PORT": "99999"}, "a variable of the launcher is wrong: ",
         "MASTER_PORT"),
        ({**UNKNOWN_HOST, "SM_HOSTS": "a-1,a-2"}, "SM_HOSTS=a-1,a-2: expects a list of hosts",
         "or SM_HOSTS"),
    ],
)  # fmt: skip
def test_variables_with_which_ranks_cannot_meet(
    variables: dict[str, str], text: str, remedy: str
) -> None:
    examined, shown = (
        programs.run("-m", module, **variables)
        for module in ("smddp.tools.doctor", "smddp.tools.topology")
    )
    (finding,) = re.findall(r"✗ (rendezvous: .*)\n      → (.*)", examined.stdout)
    assert text in finding[0]
    assert remedy in finding[1]
    assert shown.stderr.startswith("smddp topo: ")
    assert text in shown.stderr
    assert remedy in shown.stderr
    assert (examined.returncode, shown.returncode) == (1, 1)
    assert "Traceback" not in examined.stderr + shown.stderr


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.costly
def test_a_rank_that_meets_nobody() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ended = subprocess.run(
        [sys.executable, "-c", "from datetime import timedelta\nfrom smddp.tools import doctor\n"
         "doctor._WAIT = timedelta(seconds=3)\nraise SystemExit(doctor.main([]))"],
        env=os.environ | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                          "MASTER_PORT": str(port)},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert f"✗ rendezvous: not all ranks have met at 127.0.0.1:{port}" in ended.stdout
    assert "firewall of rank 0" in ended.stdout


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
@pytest.mark.costly
def test_hosts_that_reach_one_another() -> None:
    ended = programs.run(
        str(ROOT / "tools/hosts.py"), "--hosts", "2", "--", "-m", "smddp.tools.doctor"
    )
    assert ended.returncode == 0, ended.stderr
    assert "✓ all_reduce: 2 ranks" in ended.stdout
    assert "host1\n  ✓ cores" in ended.stdout


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
@pytest.mark.costly
def test_hosts_that_do_not_reach_one_another() -> None:
    # Every host has this interface, and reaches only itself there.
    command = [str(ROOT / "tools/hosts.py"), "--hosts", "2", "--", "-m", "smddp.tools.doctor"]
    ended = programs.run(*command, SMDDP_INTERFACE="lo")
    assert ended.returncode != 0
    for here, there in (("host0", "host1"), ("host1", "host0")):
        assert f"✗ connections: {here} does not reach {there} at 127.0.0.1:" in ended.stdout
    assert "name the network that connects them in SMDDP_INTERFACE" in ended.stdout
    assert ended.stdout.count("✓ versions") == 2  # rank 0 has printed what both have found


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
@pytest.mark.costly
def test_hosts_with_a_firewall_between_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On another network than the launcher's, all packets vanish, as a firewall drops them."""
    monkeypatch.setenv("SMDDP_INTERFACE", "eth1")
    with hosts.Hosts(2) as network:
        for number, host in enumerate(network.hosts):
            host.run("ip link add eth1 type veth peer name nowhere")
            host.run(f"ip addr add 10.78.0.{number + 1}/24 dev eth1")
            host.run("ip link set eth1 up")
            host.run("ip link set nowhere up")
            # An address that nobody has; without it, the sender would hear of the missing host.
            host.run(f"ip neigh add 10.78.0.{2 - number} lladdr 02:00:00:00:00:99 dev eth1")
        assert hosts.launch(network, 1, ["-m", "smddp.tools.doctor"]) != 0
    found = capfd.readouterr().out
    for here, there in (("host0", "host1"), ("host1", "host0")):
        assert f"✗ connections: {here} does not reach {there} at 10.78.0." in found
    remedy = "→ ranks connect to one another on any port: open the firewall between the hosts"
    assert found.count(f"no answer within 3 s\n      {remedy}") == 2


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
@pytest.mark.costly
def test_a_job_whose_hosts_do_not_reach_one_another(tmp_path: Path) -> None:
    """Both ranks raise at once: also the one that would wait for the other to connect."""
    script = tmp_path / "join.py"
    script.write_text(
        "import time, torch.distributed as dist\n"
        "from smddp.tools import doctor\n"
        "doctor.is_job()\n"
        "meeting = doctor.join_job()\n"  # the time does not count until both are here
        "began = time.monotonic()\n"
        "try:\n    doctor.make_group(meeting)\n"
        "except dist.DistError as error:\n"
        "    print(f'{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}')\n"
    )
    command = [str(ROOT / "tools/hosts.py"), "--hosts", "2", "--", str(script)]
    ended = programs.run(*command, SMDDP_INTERFACE="lo")
    found = re.findall(r"SMDDPPeerLostError after (\S+) s: (.*)", ended.stdout)
    assert len(found) == 2, ended.stdout + ended.stderr
    assert all(float(seconds) < 10 for seconds, _ in found), found
    for _, text in found:
        assert re.search(r"rank [01] has no connection to rank [01] .*Connection refused", text)
        assert "SMDDP_INTERFACE" in text


def _two_hosts(*scripts: str, **of_rank_1: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs the doctor on two ranks, as on two hosts; before it, each rank runs its script."""
    begin = "from datetime import timedelta\nfrom smddp.tools import doctor\n"
    end = "\ndoctor._WAIT = timedelta(seconds=3)\nraise SystemExit(doctor.main([]))"
    with _local_ranks.reserved_port() as port:
        variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        return programs.run_together(
            [["-c", begin + script + end] for script in scripts],
            [
                programs.environment(
                    RANK=str(rank), SMDDP_NODE_ID=f"host{rank}", **variables, **own
                )
                for rank, own in enumerate(({}, of_rank_1))
            ],
        )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "value"), [("SMDDP_INTERFACE", "eth77"), ("SMDDP_POOL_BYTES", "many")]
)
def test_a_wrong_setting_on_one_host(name: str, value: str) -> None:
    first, second = _two_hosts("", "", **{name: value})
    assert (first.returncode, second.returncode) == (1, 1), (first, second)
    of_second = first.stdout.partition("host1\n")[2].partition("between the ranks\n")[0]
    assert f"{name}={value}" in of_second, first.stdout
    assert "Traceback" not in first.stderr + second.stderr


@pytest.mark.multiprocess
def test_findings_are_printed_although_a_rank_has_ended() -> None:
    first, _ = _two_hosts("", "import os\ndoctor.dial_all = lambda *_: os._exit(3)")
    assert first.returncode == 1
    assert first.stdout.count("✓ versions") == 2, first
    assert "✗ connections: not all ranks have answered: " in first.stdout
    assert "Traceback" not in first.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("scripts", "text"),
    [
        (["", "import os\ndoctor.examine_host = lambda *_: os._exit(3)"],
         "✗ rendezvous: not all ranks have answered: "),
        (["import os\ndoctor._talk = lambda: os._exit(3)", ""], ""),
    ],
)  # fmt: skip
def test_a_rank_that_ends_early(scripts: list[str], text: str) -> None:
    both = _two_hosts(*scripts)
    (alive,) = (done for done in both if done.returncode != 3)
    assert alive.returncode == 1, alive
    assert text in alive.stdout
    assert "Traceback" not in alive.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("script", "address", "reason", "remedy"),
    [
        ("doctor._load.load().address_for_peers = lambda: '192.0.2.7'", "192.0.2.7",
         os.strerror(errno.EADDRNOTAVAIL), "in SMDDP_INTERFACE"),
        ("import socket\ndef create_server(*_, **__): raise OSError(24, 'Too many open files')\n"
         "socket.create_server = create_server", "127.0.0.1",
         os.strerror(errno.EMFILE), "raise the limit of open files (ulimit -n)"),
    ],
)  # fmt: skip
def test_a_host_that_cannot_wait_for_connections(
    script: str, address: str, reason: str, remedy: str
) -> None:
    first, second = _two_hosts("", script)
    assert (first.returncode, second.returncode) == (1, 1), (first, second)
    line = f"✗ connections: host1 cannot wait for connections at {address}: {reason}\n      → "
    assert remedy in first.stdout.partition(line)[2], first.stdout
    assert first.stdout.count("✗ connections") == 1, "others have tried to connect to it"
    assert "Traceback" not in first.stderr + second.stderr


@pytest.mark.parametrize(
    ("affinities", "state", "text"),
    [
        ([{0}, {1}, {2}, {3}], "ok", "4 of "),
        ([{0}, {0}, {1, 2}, {3}], "warning", "but 2 of them are bound to 1 core"),
        ([{0, 1}, {0, 1}, {0}, {2, 3}], "warning", "but 3 of them are bound to 2 cores"),
        ([{0}, {0}], "warning", "start at most one rank per core"),
    ],
)
def test_cores_of_all_ranks(
    affinities: list[set[int]], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_quota", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = doctor.examine_host([frozenset(cores) for cores in affinities])
    (cores,) = (finding for finding in found if finding.check == "cores")
    assert cores.state == state, cores
    assert text in f"{cores.text}; {cores.remedy}"


@pytest.mark.costly
def test_another_torch_is_one_sentence() -> None:
    script = "import torch\ntorch.__version__ = '9.8.7'\nfrom smddp.tools import cli\ncli.command()"
    said = {}
    for command in ("doctor", "env"):
        ended = subprocess.run(
            [sys.executable, "-c", script, command],
            env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert ended.returncode == 1
        said[command] = ended.stdout, ended.stderr
    (line,) = said["env"][1].strip().splitlines()
    assert line.startswith("smddp was built for torch ")
    # What needs no torch is examined all the same.
    findings, errors = said["doctor"]
    assert errors == ""
    assert findings.count(line) == 1
    assert f"✗ versions: {line}" in findings
    assert "✓ open files" in findings


def test_lines_have_a_sign_and_a_remedy() -> None:
    line = str(doctor.Finding("open files", "fault", "the limit is 4", "ulimit -n 1024"))
    assert line == "  ✗ open files: the limit is 4\n      → ulimit -n 1024"


def test_a_loaded_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(doctor, "_STAT", stat)
    stat.write_text(f"cpu 1 2 3\nprocs_running {(os.cpu_count() or 1) + 7}\nprocs_blocked 0\n")
    found = doctor._others(2)
    assert found.state == "warning"
    assert (
        f"this machine is loaded: besides this command {(os.cpu_count() or 1) + 5} pro"
        in found.text
    )
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        findings, how = doctor._end_of(process, time.monotonic())
    assert not findings
    assert "did not end within" in how
    assert "this machine is loaded" in how
    stat.write_text("procs_running 1\n")
    assert doctor._others().state == "ok"


def test_the_reason_of_a_test_process_is_no_frame_of_a_stack() -> None:
    script = "import sys; print('Error: why\\n  File x, line 1', file=sys.stderr); sys.exit(3)"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        _, how = doctor._end_of(process, time.monotonic() + 60)
    assert how == "status 3, Error: why"
