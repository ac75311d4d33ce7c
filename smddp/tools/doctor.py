"""Finds out what is wrong with a machine or a cluster: `smddp doctor`.

On its own it looks at this host, and lets two processes of it talk as if they were two hosts. Under
a launcher (torchrun, mpirun, srun) with one or more ranks on each host, it looks at every host and
lets all of them talk: this finds firewalls and interfaces that do not reach one another.

Each line is one check: ✓, ! (works, but could be faster or may fail later) or ✗ with what to do.
The exit status is 1 if there is any ✗.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smddp.launch.environment import complete_from_launcher
from smddp.launch.rendezvous import UNKNOWN_HOST, complete_rendezvous
from smddp.tools import env
from smddp.tools._command import run
from smddp.tools._local_ranks import leaving_at_signals, python_command, reserved_port, start_ranks
from smddp.tools._meeting import Dial, Meeting, dial_all
from smddp.tools._spans import plural
from smddp.torch import _load

if TYPE_CHECKING:
    import torch

__all__ = [
    "CARDS",
    "Finding",
    "examine_host",
    "identity",
    "is_job",
    "join_job",
    "main",
    "make_group",
]

_OK, _WARNING, _FAULT = "ok", "warning", "fault"
_SIGNS = {_OK: "✓", _WARNING: "!", _FAULT: "✗"}
# A group of 64 ranks on one node, with other nodes (docs/troubleshooting.md).
_ENOUGH_FILES = 1024
_ENOUGH_SHARED = 256 << 20
_ENOUGH_THREADS = 100  # torch starts one or more for each core, smddp some for each rank
_CHECKED_BYTES = 16 << 20
_WAIT = timedelta(seconds=20)
_LIMIT = 45  # seconds for the test processes; the checks of the host come before
_STAT = Path("/proc/stat")
_SYS = Path("/sys")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHOWN = 8  # how many pairs of hosts that do not connect are named
CARDS = {"efa": "efa", "hfi1": "opx", "mlx5": "verbs", "bnxt_re": "verbs", "irdma": "verbs"}
"""Driver of a card that bypasses the kernel -> libfabric's provider for it."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    state: str  # "ok", "warning" or "fault"
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n      → {self.remedy}" if self.remedy else ""
        return f"  {_SIGNS[self.state]} {self.check}: {self.text}{remedy}"


def _versions() -> Finding:
    import torch

    facts = _load.load().build_info()
    text = (
        f"smddp {facts['version']} with torch {torch.__version__}, "
        f"Python {platform.python_version()}, Linux {platform.release()}"
    )
    return Finding("versions", _OK, text)


def _settings() -> Iterator[Finding]:
    for sentence in env.misspelt_settings():
        yield Finding("settings", _FAULT, sentence, "the variable has no effect: correct its name")
    try:
        rows = env.settings()
    except ValueError as error:
        yield Finding("settings", _FAULT, str(error), "correct the variable, or unset it")
        return
    changed = [f"{row['name']}={row['value']}" for row in rows if row["from_environment"]]
    yield Finding("settings", _OK, ", ".join(changed) or "defaults")


def _instructions() -> Finding:
    simd = _load.load().build_info()["simd"]
    if simd == "scalar":
        return Finding(
            "processor", _WARNING, "sums use no vector instructions, and are several times slower",
            "let the virtual machine pass AVX2 on to its guest, and unset SMDDP_SIMD",
        )  # fmt: skip
    return Finding("processor", _OK, f"sums use {simd}")


def _control_groups() -> Any:
    """Returns this process's control groups, as the engine sees them."""
    return _load.load().ControlGroups()


def _quota() -> float | None:
    """Returns how many cores the control groups may use; None without a limit."""
    quotas = []
    groups = _control_groups()
    for folder in map(Path, groups.folders("")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            quotas.append(quota / period)
    for folder in map(Path, groups.folders("cpu")):
        with contextlib.suppress(OSError, ValueError):
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            if quota > 0:  # -1: there is no limit
                quotas.append(quota / int((folder / "cpu.cfs_period_us").read_text()))
    return min(quotas, default=None)


def _threads() -> int:
    """Returns with how many threads a rank computes."""
    # OpenMP also takes a list, of which the first number counts here.
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    import torch

    return torch.get_num_threads()


def _cores(affinities: Sequence[frozenset[int]]) -> Finding:
    """Compares cores with the ranks of this host.

    Args:
        affinities: the cores on which each of them may run.
    """
    usable = frozenset().union(*affinities)
    quota = _quota()
    cores = len(usable) if quota is None else min(len(usable), quota)
    ranks = len(affinities)
    threads = _threads()
    text = f"{cores:g} of {os.cpu_count()} cores for {plural(ranks, 'rank')}"
    if ranks > cores:
        return Finding(
            "cores",
            _WARNING,
            text,
            "start at most one rank per core, or ranks wait for one another",
        )
    for own in set(affinities):
        there = sum(other <= own for other in affinities)
        if there > len(own):
            return Finding(
                "cores",
                _WARNING,
                f"{text}, but {there} of them are bound to {plural(len(own), 'core')}",
                "let the launcher bind ranks to different cores (mpirun --bind-to core, srun "
                "--cpu-bind=cores), or bind none",
            )
    if ranks * threads > cores:
        return Finding(
            "cores", _WARNING, f"{text}, each of which computes with {threads} threads",
            f"set OMP_NUM_THREADS={max(1, int(cores / ranks))}",
        )  # fmt: skip
    return Finding("cores", _OK, text)


def _others(ours: int = 1) -> Finding:
    """Looks how many processes and threads run or wait for a core.

    Args:
        ours: how many of them are ranks that examine this host.
    """
    cores = os.cpu_count() or 1
    counts = []
    for _ in range(7):
        text = _STAT.read_text()
        counts.append(int(text.partition("procs_running ")[2].split()[0]))
        time.sleep(0.03)
    running = max(0, int(statistics.median(counts)) - ours)
    if running >= cores:
        return Finding(
            "load", _WARNING,
            f"this machine is loaded: besides this command {running} processes or threads run on "
            f"{plural(cores, 'core')}, so all below takes longer",
            "look again when they have ended, before you trust any time",
        )  # fmt: skip
    return Finding("load", _OK, f"{running} other processes or threads run")


def _numa() -> Finding:
    nodes = len(list((_SYS / "devices/system/node").glob("node[0-9]*"))) or 1
    if nodes > 1 and len(os.sched_getaffinity(0)) == os.cpu_count():
        return Finding(
            "NUMA", _WARNING, f"{nodes} nodes, and ranks may run on all of them",
            "bind each rank to one node: torchrun --numa-binding=node, or numactl",
        )  # fmt: skip
    return Finding("NUMA", _OK, plural(nodes, "node"))


def _clock() -> Finding:
    source = "unknown"
    with contextlib.suppress(OSError):
        path = "devices/system/clocksource/clocksource0/current_clocksource"
        source = (_SYS / path).read_text().strip()
    if source in ("hpet", "acpi_pm", "jiffies"):
        return Finding(
            "clock", _WARNING, f"the clock is {source}: reading it takes microseconds",
            "boot with clocksource=tsc",
        )  # fmt: skip
    return Finding("clock", _OK, source)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _ENOUGH_FILES:
        enough = hard >= _ENOUGH_FILES
        raisable = f"ulimit -n {min(hard, 65536)}" if enough else "raise LimitNOFILE"
        return Finding(
            "open files", _FAULT, f"the limit is {soft}; large jobs need {_ENOUGH_FILES}", raisable
        )
    return Finding("open files", _OK, f"the limit is {soft}")


def _memory() -> Iterator[Finding]:
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size not in (resource.RLIM_INFINITY, -1) and size < _ENOUGH_SHARED:
        yield Finding(
            "shared memory", _FAULT, f"files may have {size >> 20} MiB only",
            "ulimit -f unlimited",
        )  # fmt: skip
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space not in (resource.RLIM_INFINITY, -1) and space < 64 << 30:
        yield Finding(
            "address space", _WARNING, f"the limit is {space >> 30} GiB", "ulimit -v unlimited"
        )
    available = _control_groups().available_memory()
    if available is not None and available < _ENOUGH_SHARED:
        yield Finding(
            "memory", _FAULT, f"{available >> 20} MiB are available",
            "raise the memory limit of the container, or lower SMDDP_POOL_BYTES",
        )  # fmt: skip
    elif available is not None:
        yield Finding("memory", _OK, f"{available / 2**30:.1f} GiB are available")
    threads = _control_groups().available_threads()
    if threads is not None and threads < _ENOUGH_THREADS:
        yield Finding(
            "threads", _FAULT, f"{plural(threads, 'thread')} more may be started",
            "raise the limit on processes of the container or job (pids.max, --pids-limit)",
        )  # fmt: skip


def _providers_of_cards() -> set[str]:
    """Returns libfabric's providers for the cards of this host that bypass the kernel."""
    drivers = {path.resolve().name for path in (_SYS / "class/infiniband").glob("*/device/driver")}
    cards = {CARDS[name] for name in drivers if name in CARDS}
    return cards | {"cxi" for _ in (_SYS / "class/cxi").glob("*")}


def _huge_pages() -> Finding:
    pools = sorted((_SYS / "kernel/mm/hugepages").glob("hugepages-*kB/nr_hugepages"))
    counts = {
        int(pool.parent.name.removeprefix("hugepages-")[:-2]) >> 10: int(pool.read_text())
        for pool in pools
    }
    reserved = ", ".join(f"{count} of {size} MiB" for size, count in counts.items() if count)
    if "efa" in _providers_of_cards() and not reserved:
        return Finding(
            "huge pages", _WARNING, "none is reserved; EFA's provider takes its buffers from them",
            "reserve some, as the EFA installer does: sysctl vm.nr_hugepages=5120",
        )  # fmt: skip
    return Finding("huge pages", _OK, f"reserved: {reserved or 'none; only EFA needs them'}")


def _cards() -> Iterator[Finding]:
    cards = _providers_of_cards()
    why = _load.load().build_info()["no_libfabric"]
    if cards and why:
        yield Finding(
            "network cards", _FAULT, f"this host has a card ({', '.join(cards)}): {why}",
            "install libfabric with that provider (on AWS: the EFA installer)",
        )  # fmt: skip
        return
    text = ", ".join(sorted(cards)) if cards else "none that bypasses the kernel: TCP sockets"
    yield Finding("network cards", _OK, text + (f" ({why})" if why else ""))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if cards and soft != resource.RLIM_INFINITY:
        yield Finding(
            "locked memory", _FAULT, f"the limit is {soft >> 10} KiB; the card locks its buffers",
            "ulimit -l unlimited (in containers: --ulimit memlock=-1)",
        )  # fmt: skip


def _congestion_control() -> Finding:
    found = _load.load().congestion_control()
    if found["hindered"]:
        return Finding(
            "TCP", _WARNING, found["text"],
            "allow cubic or reno, or what SMDDP_CONGESTION_CONTROL names, as root: sysctl "
            'net.ipv4.tcp_allowed_congestion_control="reno cubic ..."; within a data centre BBR '
            "takes up to twice the time",
        )  # fmt: skip
    return Finding("TCP", _OK, found["text"])


def _interface() -> Finding:
    names = [name for _, name in socket.if_nameindex()]
    asked = os.environ.get("SMDDP_INTERFACE", "")
    if asked and asked not in names and not _is_address_here(asked):
        return Finding(
            "interface", _FAULT, f"SMDDP_INTERFACE={asked}: there is no such interface",
            f"use one of {', '.join(names)}",
        )  # fmt: skip
    host = socket.gethostname()
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        return Finding(
            "interface", _WARNING, f"the name of this host, {host}, is unknown here: {error}",
            "let /etc/hosts or DNS know it, or set SMDDP_INTERFACE",
        )  # fmt: skip
    what = asked or "the one that reaches rank 0"
    text = f"{what}, {_load.load().address_for_peers()}; {host} is {', '.join(sorted(found))}"
    return Finding("interface", _OK, text)


def _is_address_here(text: str) -> bool:
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            text, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        with socket.socket(family, kind) as tried:
            tried.bind(address)
    except (OSError, UnicodeError):
        return False
    return True


_CHECKS: list[Callable[[], Any]] = [
    _settings, _versions, _instructions, _numa, _clock, _files, _memory, _huge_pages, _cards,
    _congestion_control, _interface,
]  # fmt: skip


def examine_host(affinities: Sequence[frozenset[int]] = ()) -> list[Finding]:
    """Returns the findings about this host and the environment of this process.

    Args:
        affinities: the cores on which each rank of this host may run; without them, those of this
            process count for all.
    """
    findings: list[Finding] = []
    try:
        _load.check()
    except ImportError as error:
        remedy = "until then only what needs no torch is examined"
        findings.append(Finding("versions", _FAULT, str(error), remedy))

    def cores() -> Finding:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        if not affinities and not ranks.isdecimal():
            return Finding(
                "cores", _FAULT, f"LOCAL_WORLD_SIZE={ranks} is not a number of ranks",
                "correct the variable, or unset it",
            )  # fmt: skip
        return _cores(affinities or [frozenset(os.sched_getaffinity(0))] * int(ranks))

    def load() -> Finding:
        return _others(max(1, len(affinities)))

    for check in [cores, load, *_CHECKS]:
        try:
            found = check()
            findings += [found] if isinstance(found, Finding) else found
        except Exception as error:
            # A wrong setting, or no torch, makes several checks fail: one says what to do.
            if all(str(error) not in finding.text for finding in findings):
                name = check.__name__.strip("_")
                findings.append(Finding(name, _FAULT, f"this check failed: {error}"))
    return findings


def _talk() -> Iterator[Finding]:
    """Lets the ranks of a job sum a vector; every rank yields the same number of findings."""
    import torch
    import torch.distributed as dist

    import smddp

    rank, size = dist.get_rank(), dist.get_world_size()
    vector = torch.full((_CHECKED_BYTES // 4,), float(rank + 1))
    dist.all_reduce(torch.ones(1))
    start = time.monotonic()
    dist.all_reduce(vector)
    seconds = time.monotonic() - start
    text = (
        f"{size} ranks have summed {_CHECKED_BYTES >> 20} MiB in {1e3 * seconds:.1f} ms (for "
        f"comparison: to copy as much takes one process {1e3 * _time_of_copy(vector):.1f} ms)"
    )
    if not torch.all(vector == size * (size + 1) / 2):
        yield Finding("all_reduce", _FAULT, f"{text}, and the sum is wrong", "report this")
        return
    yield Finding("all_reduce", _OK, f"{text}; {smddp.describe()}")


def _time_of_copy(vector: torch.Tensor) -> float:
    """Returns how many seconds it takes to copy a tensor into memory that is in use already."""
    copy, best = vector.clone(), float("inf")
    for _ in range(3):
        start = time.monotonic()
        copy.copy_(vector)
        best = min(best, time.monotonic() - start)
    return best


def identity() -> tuple[str, str]:
    """Returns the name of this host, and a text that another host of that name does not have."""
    name = os.environ.get("SMDDP_NODE_ID") or socket.gethostname()
    boot = ""
    with contextlib.suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    return name, f"{name} {boot}"


def is_job() -> bool:
    """Returns whether this process is one of several ranks, as its launcher says."""
    complete_from_launcher()
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def join_job() -> Meeting | Finding:
    """Completes the variables of a rank, and meets all ranks of the job.

    Returns:
        What prevents that, if something does.
    """
    try:
        if not complete_rendezvous():
            text, _, remedy = UNKNOWN_HOST.partition(": ")
            return Finding("rendezvous", _FAULT, text, remedy)
        return Meeting(_WAIT)
    except ValueError as error:
        return Finding(
            "rendezvous", _FAULT, f"a variable of the launcher is wrong: {error}",
            "correct RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT or SM_HOSTS",
        )  # fmt: skip
    except RuntimeError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return Finding(
            "rendezvous", _FAULT, f"not all ranks have met at {address}: {error}",
            "do all hosts run this command? Is that port open for them in the firewall of rank 0?",
        )  # fmt: skip


def make_group(meeting: Meeting) -> None:
    """Makes the group of all ranks.

    Raises:
        RuntimeError: that fails.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "smddp",
        store=meeting.store,
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=_WAIT,
    )


def _connections(meeting: Meeting, hosts: dict[int, str]) -> list[Finding]:
    """Lets all hosts connect to one another.

    Args:
        meeting: of the job.
        hosts: the first rank of each -> its name.
    """
    if len(hosts) == 1:
        return []
    try:
        address = _load.load().address_for_peers()
    except (RuntimeError, ValueError):  # the findings about this host have it
        address = "127.0.0.1"
    try:
        failed = dial_all(meeting, list(hosts), address)
    except RuntimeError as error:
        return [_silence("connections", error)]
    if not failed:
        return [Finding("connections", _OK, f"each of {len(hosts)} hosts reaches each other one")]
    findings = [_of_dial(dial, hosts) for dial in failed[:_SHOWN]]
    if rest := failed[_SHOWN:]:
        findings.append(Finding("connections", _FAULT, f"likewise {len(rest)} other pairs"))
    return findings


def _of_dial(dial: Dial, hosts: dict[int, str]) -> Finding:
    """Returns the finding about hosts that do not connect."""
    if dial.source == dial.target:
        text = f"{hosts[dial.source]} cannot wait for connections at {dial.address}"
    else:
        text = f"{hosts[dial.source]} does not reach {hosts[dial.target]} at {dial.address}"
    remedy = "name the network that connects them in SMDDP_INTERFACE"
    if dial.error in map(os.strerror, (errno.EMFILE, errno.ENFILE)):
        remedy = "raise the limit of open files (ulimit -n), or end programs that have many open"
    elif dial.silent:
        remedy = (
            "ranks connect to one another on any port: open the firewall between the hosts, or "
            + remedy
        )
    return Finding("connections", _FAULT, f"{text}: {dial.error}", remedy)


def _silence(check: str, error: RuntimeError) -> Finding:
    """Returns the finding about a rank that has not told what the others wait for."""
    return Finding(
        check, _FAULT, f"not all ranks have answered: {error}",
        "has one of them ended? Its output says why",
    )  # fmt: skip


def _report_of_rank() -> tuple[list[tuple[str, list[Finding]]], bool]:
    """Examines the job; under a launcher.

    Returns:
        The findings of all hosts, which rank 0 has to print; an empty list on other ranks, unless
        they cannot tell rank 0. And whether there is a fault.
    """
    name, host = identity()
    meeting = join_job()
    if isinstance(meeting, Finding):
        return [(name, [*examine_host(), meeting])], True
    mine: list[Finding] = []
    try:
        everyone = meeting.gather("cores", [host, sorted(os.sched_getaffinity(0))])
        mine = examine_host([frozenset(cores) for where, cores in everyone if where == host])
        rows = meeting.gather("findings", [name, list(map(dataclasses.asdict, mine))])
    except RuntimeError as error:
        return [(name, [*(mine or examine_host()), _silence("rendezvous", error)])], True
    first: dict[str, int] = {}
    for rank, (where, _) in enumerate(everyone):
        first.setdefault(where, rank)
    hosts = {rank: rows[rank][0] for rank in first.values()}
    report = [(rows[rank][0], [Finding(**row) for row in rows[rank][1]]) for rank in hosts]
    together = _connections(meeting, hosts)
    if not _has_fault([("", together)]):
        together += _talk_of_all(meeting)
    if together:
        report.append(("between the ranks", together))
    fault = _has_fault(report)
    return report if meeting.rank == 0 else [], fault


def _talk_of_all(meeting: Meeting) -> list[Finding]:
    """Lets the ranks talk; returns the findings of all on rank 0, of this rank elsewhere."""
    import torch.distributed as dist

    try:
        make_group(meeting)
        findings = list(_talk())
        dist.destroy_process_group()
    except Exception as error:
        findings = [
            Finding("all_reduce", _FAULT, str(error), "see docs/troubleshooting.md for this text")
        ]
    try:
        meeting.tell("talk", list(map(dataclasses.asdict, findings)))
        if meeting.rank > 0:
            return findings
        everyone = meeting.told("talk")
    except RuntimeError as error:
        return [*findings, _silence("all_reduce", error)]
    faults = [Finding(**row) for rows in everyone for row in rows if row["state"] == _FAULT]
    # Ranks may tell the same.
    return list(dict.fromkeys(faults)) or findings


def _report_alone() -> list[tuple[str, list[Finding]]]:
    """Returns the findings of this host, and of two processes of it that play two hosts."""
    report = [(socket.gethostname(), examine_host())]
    try:
        _load.check()
    except ImportError:  # the findings about this host have it
        return report
    try:
        found = _play_two_hosts()
    except OSError as error:
        found = [
            Finding(
                "all_reduce", _FAULT, f"the test processes cannot be started: {error}",
                "raise the limits of open files and processes (ulimit -n, ulimit -u)",
            )
        ]  # fmt: skip
    report.append(("two processes of this host as two hosts", found))
    return report


def _play_two_hosts() -> list[Finding]:
    """Returns the findings of two processes of this host that play two hosts.

    Raises:
        OSError: they cannot be started.
    """
    command = [*python_command("smddp.tools.doctor"), "--json"]
    with leaving_at_signals(), reserved_port() as port:
        ranks = start_ranks([1, 1], command, port, subprocess.PIPE)
        try:
            deadline = time.monotonic() + _LIMIT
            ends = [_end_of(process, deadline) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    everything = [finding for those, _ in ends for finding in those]
    # The findings about this host are known.
    checks = ("rendezvous", "connections", "all_reduce")
    found = [finding for finding in everything if finding.check in checks]
    told = _has_fault([("", everything)])
    for rank, (process, (those, why)) in enumerate(zip(ranks, ends, strict=True)):
        # Rank 0 prints what both have found. If that is a fault, both end with status 1.
        if process.returncode not in ((0, 1) if told else (0,)) or (rank == 0 and not those):
            found.append(Finding("all_reduce", _FAULT, f"a test process failed: {why}"))
    return list(dict.fromkeys(found))  # both ranks may tell the same


def _end_of(process: subprocess.Popen[bytes], deadline: float) -> tuple[list[Finding], str]:
    """Waits for a test process; returns what it has found, and how it has ended."""
    try:
        output, errors = process.communicate(timeout=max(0, deadline - time.monotonic()))
        status = process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        how = f"it did not end within {_LIMIT} s"
        busy = _others()
        if busy.state != _OK:
            return [], f"{how}: {busy.text.partition(', so')[0]}"
    # Not the frames of a stack.
    lines = errors.decode(errors="replace").splitlines()
    last = [line for line in lines if line.strip() and not line.startswith((" ", "Traceback"))]
    last = last[-1:] or ["no error output"]
    try:
        report = _from_json(output.decode(errors="surrogateescape"))
    except ValueError:  # it has ended while it printed
        report = []
    return [finding for _, those in report for finding in those], f"{how}, {last[0]}"


def _has_fault(report: list[tuple[str, list[Finding]]]) -> bool:
    return any(finding.state == _FAULT for _, found in report for finding in found)


def _to_json(report: list[tuple[str, list[Finding]]]) -> str:
    rows = [{"where": where} | dataclasses.asdict(f) for where, found in report for f in found]
    return json.dumps(rows, indent=1, ensure_ascii=False)


def _from_json(text: str) -> list[tuple[str, list[Finding]]]:
    return [(row.pop("where"), [Finding(**row)]) for row in json.loads(text or "[]")]


def main(arguments: list[str] | None = None) -> int:
    """Prints what is wrong, and what to do; returns 1 if anything is."""
    parser = argparse.ArgumentParser(
        prog="smddp doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    if is_job():
        report, fault = _report_of_rank()
    else:
        report = _report_alone()
        fault = _has_fault(report)
    if options.json:
        if report:
            print(_to_json(report))
    else:
        for where, findings in report:
            print("\n".join([where, *map(str, findings)]), flush=True)
    return int(fault)


if __name__ == "__main__":
    run(main)
