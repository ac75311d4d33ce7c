"""Proves that the fuzzers work: they reach the parsers, and each finds a bug planted for it.

    setarch -R python3 tests/fuzz/check.py [coverage] [bugs]

Without a name it does both parts. Both start from the seeds and tests/fuzz/found, as in a fresh
clone, and know no corpus. They use a copy of the sources below build/fuzz-check, in which the
fuzzers are built so that they count how often each line is executed.

coverage: Each fuzzer runs some thousand inputs, and must find nothing. The fuzzers together must
reach as much of each parser as PARSERS says. build/fuzz-check/lines has the sources with the
counts, by each fuzzer and by all.

bugs: The copy gets one bug of BUGS at a time. Its fuzzer must fail within the processor time that
it has in `make test`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build/fuzz-check"
COPY = OUTPUT / "source"
PROGRAMS = COPY / "build/fuzz-coverage/tests/fuzz"
SECONDS = 10  # of a fuzzer in `make test`
INPUTS = 20_000  # of a fuzzer in the coverage run
SLOW = {"engine_fuzz": 5_000, "store_fuzz": 5_000}  # other numbers of inputs
SEED = 1  # of libFuzzer, so that each run does the same


class Parser(NamedTuple):
    """Code that reads what peers or the store say."""

    file: str
    least: int  # per cent of its lines that the fuzzers must reach
    functions: str = ""  # the functions that are meant: a pattern for their mangled names


PARSERS = [
    Parser("csrc/bootstrap/blob.h", 95, "BlobReader"),
    Parser("csrc/bootstrap/handle.cc", 85),
    Parser("csrc/bootstrap/note_parts.cc", 85),
    Parser("csrc/engine/agreement/agreement_codec.cc", 85),
    Parser(
        "csrc/bootstrap/introduction.cc",
        95,
        "parse|differences|printDefault|checkPair|checkAgreement|listRanks|serialise",
    ),
    Parser(
        "csrc/bootstrap/lifeline.cc",
        85,
        "accept|serve|[0-9]on[A-Z]|admit|confirm|connect|4drop|4fail",
    ),
    Parser("csrc/bootstrap/lifeline_wire.cc", 90),
    Parser("csrc/bootstrap/locality.cc", 95),
    Parser(
        "csrc/bootstrap/rendezvous.cc",
        95,
        "decodeNote|8readNote|4meet|agreeOnNodes|Epoch|unseal|7collect|toText|raiseForeign",
    ),
    Parser("csrc/common/seal.cc", 95, "4sign|5close|4open"),
    Parser("csrc/engine/calls/call.cc", 85),
    Parser("csrc/engine/groups/group.cc", 95, "membershipOf|entriesOf|onControl"),
    # Not reached: too many early messages are 64 MiB (12 lines); the transport throws (2).
    Parser("csrc/engine/groups/group_registry.cc", 75, "dispatch|3add|Early|4tell"),
    Parser(
        "csrc/engine/health/sentinel.cc",
        90,
        "onControl|onAbort|onInquiry|checked|inWords|takeMates",
    ),
    Parser("csrc/engine/operations/matcher.cc", 90, "onControl|9announced|6accept|8accepted|pump"),
    Parser("csrc/engine/process/peers.cc", 85, "4find|3add|onDisconnected|checkDisconnected|4lose"),
    Parser("csrc/engine/process/process.cc", 95, "slabAddress|4meet|6tryMap|4Link"),
    Parser("csrc/engine/team/blame.cc", 90, "parse|4pack|describe|Inquiries"),
    Parser("csrc/engine/team/membership.cc", 95),
    Parser(
        "csrc/engine/team/team.cc", 90, "checkedRegion|copyShared|5agree|resolve|nextBreak|blameOf"
    ),
    Parser("csrc/process_group/message_front.h", 95),
    Parser("csrc/store/client.cc", 80, "8exchange|3set|3add|containsAll|multiGet"),
    Parser("csrc/store/frames.cc", 95),
    Parser("csrc/store/server.cc", 90, "7receive|6answer"),
    Parser("csrc/transport/channel.cc", 95),
    Parser("csrc/transport/channel_table.cc", 85),
    Parser("csrc/transport/fabric/early_messages.cc", 90),
    Parser("csrc/transport/fabric/memory.cc", 95, "translate"),
    Parser("csrc/transport/fabric/reassembly.cc", 90),
    Parser("csrc/transport/fabric/wire.cc", 95),
    Parser("csrc/transport/shm/comm_memory.cc", 85, "MateMemory"),
    Parser("csrc/transport/shm/liveness.cc", 90, "describeLife|lifeOf"),
    Parser("csrc/transport/shm/ring.h", 95),
    Parser("csrc/transport/shm/segment.cc", 75, "attach|verify|openMemoryOf"),
    Parser(
        "csrc/transport/shm/shm_transport.cc",
        85,
        "ringTable|attach|claimRing|7connect|roomFor|3put|Incoming|pollPeer|5drain|7deliver|gone",
    ),
    Parser(
        "csrc/transport/striped_transport.cc", 95, "split|connect|onAnnouncement|3put|onControl"
    ),
    Parser("csrc/transport/tcp/connection.cc", 90, "4read|receive|takeBuffered|beginFrame"),
    Parser("csrc/transport/tcp/frames.cc", 95),
    Parser("csrc/transport/wire.cc", 95),
]


class Bug(NamedTuple):
    """A replacement in one file, which the fuzzer must find."""

    fuzzer: str
    file: str
    old: str
    new: str


BUGS = [
    Bug(
        "bootstrap_fuzz",
        "csrc/bootstrap/blob.h",
        "if (count > left_.size()) {",
        "if (count > left_.size() + 1) {",
    ),
    Bug(
        "bootstrap_fuzz",
        "csrc/common/seal.cc",
        "sealed.size() > signature.size() && sealed.back() == kSigned;",
        "!sealed.empty() && sealed.back() == kSigned;",
    ),
    Bug(
        "engine_fuzz",
        "csrc/engine/health/sentinel.cc",
        "if (abort.text.size() <= sizeof head) return;",
        "",
    ),
    Bug(
        "engine_fuzz",
        "csrc/engine/team/blame.cc",
        "rank < 0 || rank >= size ||",
        "rank < 0 || rank >= 256 * size ||",
    ),
    Bug(
        "fabric_fuzz",
        "csrc/transport/fabric/reassembly.cc",
        "fragment.offset > total ||\n      bytes.size() > total - fragment.offset)",
        "fragment.offset > total)",
    ),
    Bug(
        "lifeline_fuzz",
        "csrc/bootstrap/lifeline.cc",
        "if (connection.received.size() < kHelloBytes) return;",
        "",
    ),
    Bug(
        "matcher_fuzz",
        "csrc/engine/operations/matcher.cc",
        "if (length > transfer.bytes - transfer.moved) {",
        "if (length > transfer.bytes - transfer.moved + 1) {",
    ),
    Bug(
        "memory_fuzz",
        "csrc/transport/shm/shm_transport.cc",
        "if (header.bytes > kMaxControlBytes || Ring::recordBytes(header.bytes) > available)",
        "if (Ring::recordBytes(header.bytes) > available)",
    ),
    Bug(
        "message_fuzz",
        "csrc/process_group/message_front.h",
        "check(!__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes));",
        "bytes *= std::max<int64_t>(size, 1);",
    ),
    Bug(
        "store_fuzz",
        "csrc/store/frames.cc",
        "return hasOneKey && rest.size() == sizeof(int64_t) ? std::optional(request)",
        "return hasOneKey ? std::optional(request)",
    ),
    Bug(
        "striped_fuzz",
        "csrc/transport/striped_transport.cc",
        "|| keys.size() < peer.at.size()) {",
        "|| keys.empty()) {",
    ),
    Bug(
        "tcp_fuzz",
        "csrc/transport/tcp/frames.cc",
        "frame.length > region.size() - slot.offset)",
        "frame.length > region.size())",
    ),
    Bug(
        "wire_fuzz",
        "csrc/transport/wire.cc",
        "open->window < 1 || open->window > kMaxWindow",
        "open->window < 1",
    ),
]


def fuzz(command: list[str], program: Path, log: Path, counts: Path = Path(os.devnull)) -> int:
    """Runs a fuzzer from its seeds and the inputs of tests/fuzz/found.

    Args:
        command: What starts the program, with its options.
        program: The fuzzer.
        log: Where its output goes; inputs that it finds get names that begin with this.
        counts: Where a build for coverage writes how often each line was executed.

    Returns:
        Its exit status, negative for a signal.
    """
    environment = {
        **os.environ,
        "LLVM_PROFILE_FILE": str(counts),
        "SMDDP_LOG": "error",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    corpora = [OUTPUT / "seeds" / program.name, ROOT / "tests/fuzz/found" / program.name]
    with tempfile.TemporaryDirectory(dir=OUTPUT) as learnt, log.open("wb") as output:
        return subprocess.run(
            [
                *command,
                *(f"-seed={SEED}", "-timeout=60", "-rss_limit_mb=2048", "-max_len=4096"),
                *(f"-artifact_prefix={log}-", learnt),
                *(str(corpus) for corpus in corpora if corpus.is_dir()),
            ],
            env=environment,
            stdout=output,
            stderr=output,
            check=False,
        ).returncode


def llvm_cov(command: list[str], programs: list[Path], counts: Path) -> str:
    """Returns what llvm-cov says about these programs."""
    objects = [argument for program in programs[1:] for argument in ("-object", str(program))]
    return subprocess.run(
        ["llvm-cov", *command, str(programs[0]), *objects, f"-instr-profile={counts}"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def reached(name: str, programs: list[Path]) -> dict[str, dict[int, int]]:
    """Returns how often these fuzzers have executed each line of the parsers, by file."""
    counts = OUTPUT / f"{name}.profdata"
    parts = [OUTPUT / f"{program.name}.profraw" for program in programs]
    subprocess.run(["llvm-profdata", "merge", "-sparse", *parts, "-o", counts], check=True)
    (OUTPUT / "lines").mkdir(exist_ok=True)
    (OUTPUT / "lines" / name).write_text(llvm_cov(["show"], programs, counts))
    lines: dict[str, dict[int, int]] = {}
    # In lcov's format, which has "SF:" and its path for a file, "FN:" with first line and name for
    # a function, "DA:" with number and count for a line.
    begins: dict[int, list[str]] = {}
    for record in llvm_cov(["export", "-format=lcov"], programs, counts).splitlines():
        kind, _, value = record.partition(":")
        if kind == "SF":
            file, begins = os.path.relpath(value, COPY), {}
        elif kind == "FN":
            begins.setdefault(int(value.split(",")[0]), []).append(value.split(",")[1])
        elif kind == "DA":
            number, count = map(int, value.split(",")[:2])
            first = max((line for line in begins if line <= number), default=0)
            for parser in PARSERS:
                names = " ".join(begins.get(first, []))
                if parser.file == file and re.search(parser.functions, names):
                    lines.setdefault(file, {})[number] = count
    return lines


def percent(lines: dict[int, int]) -> float:
    """Returns how much of these lines was executed."""
    return 100 * sum(count > 0 for count in lines.values()) / max(len(lines), 1)


def check_coverage() -> list[str]:
    """Runs the fuzzers, and prints how much of the parsers they reach. Returns what is wrong."""
    programs = sorted(PROGRAMS.glob("*_fuzz"))

    def run(program: Path) -> int:
        counts = OUTPUT / f"{program.name}.profraw"
        log = OUTPUT / f"{program.name}.log"
        return fuzz([str(program), f"-runs={SLOW.get(program.name, INPUTS)}"], program, log, counts)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(run, programs))
    wrong = [
        f"{program.name} fails without a bug: {OUTPUT / program.name}.log"
        for program, status in zip(programs, results, strict=True)
        if status != 0
    ]
    if wrong:
        return wrong
    everything = reached("all", programs)
    each = {program: reached(program.name, [program]) for program in programs}
    print("| parser | lines | reached | by | not reached |\n|---|---|---|---|---|")
    for parser in PARSERS:
        lines = everything.get(parser.file, {})
        shares = [(percent(of.get(parser.file, {})), program.stem) for program, of in each.items()]
        by = ", ".join(f"{name} {share:.0f} %" for share, name in sorted(shares)[::-1] if share)
        rest = " ".join(str(number) for number, count in sorted(lines.items()) if count == 0)
        print(f"| `{parser.file}` | {len(lines)} | {percent(lines):.0f} % | {by} | {rest} |")
        if percent(lines) < max(parser.least, 1):
            wrong.append(
                f"the fuzzers reach {percent(lines):.1f} % of {parser.file}, not {parser.least} %"
            )
    return wrong


def copy_sources() -> None:
    """Makes the copy equal to the sources; writes only what differs, so that little is compiled."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    for name in files:
        source, target = ROOT / name, COPY / name
        if target.is_file() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        target.chmod(source.stat().st_mode)
    for path in COPY.rglob("*"):
        within = path.relative_to(COPY)
        if path.is_file() and within.parts[0] != "build" and str(within) not in files:
            path.unlink()


def build(target: str) -> None:
    """Builds one target of the copy."""
    log = OUTPUT / "build.log"
    with log.open("wb") as output:
        command = ["tools/setup.sh", "fuzz-coverage", target]
        if subprocess.run(command, cwd=COPY, stdout=output, stderr=output, check=False).returncode:
            sys.exit(f"fuzz-check: {target} cannot be built; see {log}\n{log.read_text()[-3000:]}")


def find(bug: Bug, number: int) -> str:
    """Plants one bug and runs its fuzzer. Prints a line of the table, or returns what is wrong."""
    file = COPY / bug.file
    right = file.read_text()
    if right.count(bug.old) != 1:
        return f"{bug.file} has {right.count(bug.old)} times what is to be replaced: {bug.old!r}"
    try:
        file.write_text(right.replace(bug.old, bug.new))
        log = OUTPUT / f"bug{number}.log"
        build(bug.fuzzer)
        program = PROGRAMS / bug.fuzzer
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        status = fuzz(["prlimit", f"--cpu={SECONDS}", str(program)], program, log)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    finally:
        file.write_text(right)
    report = log.read_text(errors="replace")
    said = [line for line in report.splitlines() if line.startswith("SUMMARY: ")]
    # A signal ends a fuzzer whose time is over.
    if status <= 0 or not said:
        return f"{bug.fuzzer} misses a bug in {bug.file}: {bug.old!r} -> {bug.new!r}; {log}"
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    kind = said[-1].removeprefix("SUMMARY: ").split(" (")[0].split(" /")[0]
    old, new = (" ".join(text.split()).replace("|", "\\|") for text in (bug.old, bug.new))
    print(f"| {bug.fuzzer} | `{bug.file}` | `{old}` | `{new}` | {seconds:.1f} | {kind} |")
    return ""


def check_bugs() -> list[str]:
    """Plants the bugs, and prints how soon they are found. Returns what is wrong."""
    missing = {path.stem for path in ROOT.glob("tests/fuzz/*_fuzz.cc")} - {b.fuzzer for b in BUGS}
    wrong = [f"there is no bug for {name}" for name in sorted(missing)]
    print("\n| fuzzer | parser | instead of | planted | seconds | found as |")
    print("|---|---|---|---|---|---|")
    return wrong + [text for number, bug in enumerate(BUGS) if (text := find(bug, number))]


def main() -> int:
    """Does both parts, or the one that is named; returns the exit status."""
    parts = {"coverage": check_coverage, "bugs": check_bugs}
    OUTPUT.mkdir(parents=True, exist_ok=True)
    copy_sources()
    build("fuzzers")
    # None of an earlier version. The program leaves its counts where it runs.
    shutil.rmtree(OUTPUT / "seeds", ignore_errors=True)
    subprocess.run([PROGRAMS / "fuzz_seeds", OUTPUT / "seeds"], cwd=OUTPUT, check=True)
    wrong = []
    for name in sys.argv[1:] or parts:
        wrong += parts[name]()
    for text in wrong:
        print(f"fuzz-check: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
