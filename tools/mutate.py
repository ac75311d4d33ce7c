"""Which mistakes do the tests not find? Plants random ones in the C++ sources; lists the survivors.

    python3 tools/mutate.py [--seed 1] [--count 200] [--jobs 2] [--budget 120] [FOLDER …]

A mutant is a statement that is left out, or a condition or a bool result that is inverted. All of
them are in one build, of a copy of the sources in build/mutants: MUTANT=<number> switches one on.
So a mutant costs only the C++ tests that reach it, the quickest first, until one fails. Which ones
those are is found in a run without a mutant. A test that takes several times as long as there has
failed, so the machine should not be busy with other things.

A survivor is not always a hole in the tests: the text of a log, a statistic, or what only makes
something faster may be wrong without a difference that tests can see.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from statements import Mutant, Scanner

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/mutants"
SOURCE, BUILD = WORK / "source", WORK / "build"
FOLDERS = ["csrc/engine", "csrc/bootstrap"]
MAX_MUTANTS = 4096
FOUND = "found by"

DECLARATION = "namespace smddp { bool mutant(int number); } "
SWITCH = f"""#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
namespace smddp {{
namespace {{
constinit int active = -1;
constinit unsigned char nowhere[{MAX_MUTANTS}] = {{}};
constinit unsigned char* reached = nowhere;
__attribute__((constructor(101))) void readVariables() {{
  if (const char* number = std::getenv("MUTANT")) active = std::atoi(number);
  const char* path = std::getenv("MUTANTS_REACHED");
  const int file = path ? open(path, O_RDWR) : -1;
  if (file < 0) return;
  void* mapped = mmap(nullptr, {MAX_MUTANTS}, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) reached = static_cast<unsigned char*>(mapped);
}}
}}
bool mutant(int number) {{
  if (reached[number] == 0) reached[number] = 1;
  return number == active;
}}
}}
"""


def choose(folders: list[str], seed: int, count: int) -> list[Mutant]:
    """Draws mutants from all that the files of the folders allow."""
    found = []
    for path in sorted(p for folder in folders for p in (ROOT / folder).rglob("*.[hc]*")):
        if path.suffix in (".h", ".cc"):
            found += Scanner(str(path.relative_to(ROOT)), path.read_text()).found
    print(f"{len(found)} statements, of which {min(count, len(found))} become mutants")
    chosen = sorted(random.Random(seed).sample(range(len(found)), min(count, len(found))))
    return [found[i] for i in chosen]


def write(path: Path, content: bytes) -> None:
    """Leaves a file as it is that has the content, so it is not compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def plant(mutants: list[Mutant], dropped: set[int]) -> None:
    """Copies the sources, with the mutants in them. Lines keep their numbers."""
    edits: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        if number in dropped:
            continue
        if mutant.kind == "invert":
            before, behind = "static_cast<bool>(", f") != ::smddp::mutant({number})"
        else:
            before, behind = f"{{ if (!::smddp::mutant({number})) ", " }"
        edits[mutant.file] += [(mutant.start, 1, before), (mutant.end, 0, behind)]
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in names.stdout.splitlines():
        content = (ROOT / name).read_bytes()
        if name in edits:
            text = content.decode()
            for at, _, inserted in sorted(edits[name], reverse=True):
                text = text[:at] + inserted + text[at:]
            text = re.sub("^namespace", DECLARATION + "namespace", text, count=1, flags=re.M)
            content = text.encode()
        write(SOURCE / name, content)
    write(SOURCE / "csrc/common/mutant.cc", SWITCH.encode())


def build(mutants: list[Mutant], dropped: set[int]) -> None:
    """Builds the copy; mutants that do not compile are dropped."""
    configure = ["cmake", "-S", str(SOURCE), "-B", str(BUILD), "-G", "Ninja"]
    configure += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    configure += ["-DSMDDP_QUICK_BUILD=ON", "-DSMDDP_WARNINGS_AS_ERRORS=OFF"]
    # Without the last statement of a function, its end would count as unreachable.
    configure += ["-DCMAKE_CXX_FLAGS=-Werror=return-type"]
    variables = {"CCACHE_BASEDIR": str(SOURCE), "CCACHE_NOHASHDIR": "1"}
    variables["CCACHE_SLOPPINESS"] = "pch_defines,time_macros"
    while True:
        plant(mutants, dropped)
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        result = subprocess.run(
            ["ninja", "-C", str(BUILD), "-j2", "-k0"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        if result.returncode == 0:
            return
        bad = set()
        for file, line in re.findall(r"/source/(\S+?):(\d+):\d+: error:", result.stdout):
            before = [i for i, m in enumerate(mutants) if m.file == file and m.line <= int(line)]
            bad |= {*before[-1:]} - dropped
        if not bad:
            sys.exit(result.stdout[-5000:])
        print("do not compile:", *(f"{mutants[i].file}:{mutants[i].line}" for i in bad))
        dropped |= bad


@dataclass
class Test:
    """A test of a program, with all its parameters."""

    name: str
    command: list[str]
    variables: dict[str, str]
    seconds: float = 0.0
    reached: frozenset[int] = frozenset()

    def run(self, limit: float, **variables: str) -> str:
        """Returns how the test failed, or an empty text."""
        process = subprocess.Popen(
            self.command,
            cwd=SOURCE,
            env={**os.environ, "TEST_TURN": "0", **self.variables, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return f"status {code}" if (code := process.wait(limit)) else ""
        except subprocess.TimeoutExpired:
            return "time-out"
        finally:
            # With what the test started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def look(self) -> None:
        """Runs without a mutant, and notes how long that takes and which mutants it reaches."""
        with tempfile.NamedTemporaryFile(dir=WORK) as file:
            file.write(bytes(MAX_MUTANTS))
            file.flush()
            start = time.monotonic()
            if failure := self.run(600, MUTANTS_REACHED=file.name):
                print(f"fails without a mutant, so it is left out: {self.name}: {failure}")
                return
            self.seconds = time.monotonic() - start
            file.seek(0)
            self.reached = frozenset(i for i, byte in enumerate(file.read()) if byte)


def all_tests() -> list[Test]:
    """Lists the tests that ctest would run, those of one name as one."""
    ctest = ["ctest", "--test-dir", str(BUILD), "--show-only=json-v1"]
    listed = json.loads(subprocess.run(ctest, check=True, capture_output=True).stdout)
    tests = []
    for entry in listed["tests"]:
        properties = {p["name"]: p["value"] for p in entry["properties"]}
        variables = dict(v.split("=", 1) for v in properties.get("ENVIRONMENT", []))
        program, *options = entry["command"]
        chosen = [option.split("=", 1)[1] for option in options]
        pattern = variables.pop("GTEST_FILTER", chosen[0] if chosen else "*")
        command = [program, "--gtest_list_tests", f"--gtest_filter={pattern}"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        cases, suite = defaultdict(list), ""
        for line in found.splitlines():
            name = line.split("#")[0].strip()
            if line.startswith(" "):
                cases[suite + name.split("/")[0]].append(suite + name)
            else:
                suite = name
        for name, its_cases in cases.items():
            pattern = "--gtest_filter=" + ":".join(its_cases)
            command = [program, "--gtest_fail_fast", pattern]
            tests.append(Test(f"{entry['name']} {name}", command, variables))
    return tests


def hunt(number: int, tests: list[Test], budget: float) -> str:
    """Runs the tests that reach a mutant until one fails; returns which, or why there is none."""
    reaching = sorted((t for t in tests if number in t.reached), key=lambda t: t.seconds)
    spent = 0.0
    for done, test in enumerate(reaching):
        if spent > budget:
            return f"survives {done} of {len(reaching)} tests"
        start = time.monotonic()
        failure = test.run(10 + 5 * test.seconds, MUTANT=str(number))
        # If the machine was busy, the test passes now.
        if failure == "time-out":
            failure = test.run(60 + 20 * test.seconds, MUTANT=str(number))
        if failure:
            return f"{FOUND} {test.name}: {failure}"
        spent += time.monotonic() - start
    return f"survives all {len(reaching)} tests" if reaching else "is reached by no test"


def main() -> None:
    """Does what the first lines of this file say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help=f"mutants, at most {MAX_MUTANTS}")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--budget", type=float, default=120, help="seconds for a mutant")
    options = parser.parse_args()
    mutants = choose(options.folders, options.seed, min(options.count, MAX_MUTANTS))
    dropped: set[int] = set()
    build(mutants, dropped)
    tests = all_tests()
    numbers = [number for number in range(len(mutants)) if number not in dropped]

    def judge(number: int) -> str:
        verdict = hunt(number, tests, options.budget)
        mutant = mutants[number]
        where = f"{number}: {mutant.file}:{mutant.line}: {mutant.kind}: {mutant.text[:90]}"
        print(where, verdict, sep="\n  ", flush=True)
        return f"{where}\n  {verdict}" if not verdict.startswith(FOUND) else ""

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(Test.look, tests))
        survivors = [text for text in pool.map(judge, numbers) if text]
    print(f"\n{len(survivors)} of {len(numbers)} mutants survive:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
