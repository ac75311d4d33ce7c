"""Every parser of bytes from peers or the store is fuzzed, and each fuzzer has a planted bug."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]

# What a file does that makes values of bytes which it has received.
READS = re.compile(r"\bBlobReader\b|\bFrontReader\b|\breadStruct\b|\bmemcpy\(&|(?<![\w:])::recv\(")
# Files that do so, and why no fuzzer reaches them.
NOT_FUZZED = {
    "csrc/bootstrap/host_watch.cc": "the kernel answers",
    "csrc/engine/split.cc": "a block of a length that the receiver chose, without lengths in it",
    "csrc/process_group/message_codec.cc": "makes tensors of what message_front.h has read",
    "csrc/transport/fabric/fabric_transport.cc": "needs an open endpoint; hands all but heads on",
    "csrc/transport/fabric/wire.h": "readStruct() itself, which its callers' fuzzers run",
    "csrc/transport/sim/network.cc": "only tests run it",
    "csrc/transport/sim/sim_transport.cc": "only tests run it",
    "csrc/transport/tcp/tcp_transport.cc": "the name service's address of this process",
}


def _check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_check", ROOT / "tests/fuzz/check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _reading_files() -> set[str]:
    found = set()
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix not in {".h", ".cc"}:
            continue
        code = "\n".join(line.split("//")[0] for line in path.read_text().splitlines())
        if READS.search(code):
            found.add(path.relative_to(ROOT).as_posix())
    return found


def test_every_parser_is_fuzzed() -> None:
    parsers, reading = {parser.file for parser in _check().PARSERS}, _reading_files()
    missing = sorted(reading - parsers - NOT_FUZZED.keys())
    assert not missing, f"{missing} read what others sent: add them to PARSERS in check.py"
    assert not NOT_FUZZED.keys() - (reading - parsers), "take those out of NOT_FUZZED"
    assert all((ROOT / file).is_file() for file in parsers)


def test_every_fuzzer_has_a_bug_to_find() -> None:
    fuzzers = {path.stem for path in (ROOT / "tests/fuzz").glob("*_fuzz.cc")}
    built = re.findall(r"smddp_add_fuzzer\((\w+)", (ROOT / "tests/fuzz/CMakeLists.txt").read_text())
    assert set(built) == fuzzers
    bugs = _check().BUGS
    assert {bug.fuzzer for bug in bugs} == fuzzers
    for bug in bugs:
        assert (ROOT / bug.file).read_text().count(bug.old) == 1, bug
