"""Which mistakes do the tests not find? Plants random ones in the C++ sources, and lists the survivors.

    python3 tools/mutate.py [--seed 1] [--count 200] [--jobs 2] [--python] [FOLDER …]

A mutant is a statement that is left out, or a condition or a bool result that is inverted. All of
them are in one build, of a copy of the sources in build/mutants: MUTANT=<number> switches one on.
So a mutant costs only the tests that reach it, the quickest first, until one fails; those that each
test reaches are found in a run without a mutant. First come the C++ tests, then, with --python, for
what survived, the tests of PYTHON_TESTS. What is known is in build/mutants/results.json, so a
second run goes on where the first one stopped; remove the folder to begin anew.

A survivor is not always a hole in the tests: the text of a log, a statistic, or a hint that only
makes something faster may be wrong without a difference that tests can see.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/mutants"
SOURCE, BUILD, RESULTS = WORK / "source", WORK / "build", WORK / "results.json"
FOLDERS = ["csrc/engine", "csrc/bootstrap"]
PYTHON_TESTS = ["collectives", "calls", "failure", "first_cause", "groups", "group_end", "waits"]
MAX_MUTANTS = 4096
# What tests cannot see: texts of logs, and checks that only builds with sanitizers have.
LEFT_OUT = re.compile(r"SMDDP_LOG|.*assertOwned\(\)|static_assert|assert\(")

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
# Notes for pytest which mutants each test reached.
PLUGIN = f"""import json, os, time
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    with open(os.environ["MUTANTS_REACHED"], "r+b") as reached:
        reached.write(bytes({MAX_MUTANTS}))
    start = time.monotonic()
    yield
    numbers = [i for i, byte in enumerate(open(os.environ["MUTANTS_REACHED"], "rb").read()) if byte]
    with open(os.environ["MUTANTS_TABLE"], "a") as table:
        table.write(json.dumps([item.nodeid, time.monotonic() - start, numbers]) + "\\n")
"""


@dataclass
class Mutant:
    """One change: text that is inserted before and behind a range of a file."""

    file: str
    line: int
    start: int
    end: int
    kind: str
    text: str


class Scanner:
    """Finds what can be changed in a file that clang-format has formatted."""

    TOKENS = re.compile(
        r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*"  # left out
        r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|[A-Za-z_]\w*|\d[\w.\']*'
        r"|::|->|\+\+|--|<<=|>>=|[-+*/%&|^=!<>]=|&&|\|\||[^\s]",
        re.S | re.M,
    )
    ASSIGN = frozenset(["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="])
    JUMPS = frozenset(["break", "continue", "throw", "goto", "using", "delete", "enum", "template"])
    BEFORE_BODY = frozenset([")", "const", "noexcept", "override", "final", "mutable", "]", "try"])

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.found = file, text, list[Mutant]()
        matches = [m for m in self.TOKENS.finditer(text) if not re.match(r"\s*(//|/\*|#)", m[0])]
        self.at = [m.start() for m in matches]
        self.token = [m[0] for m in matches]
        self.partner: dict[int, int] = {}
        stack = []
        for i, token in enumerate(self.token):
            if token in "([{":
                stack.append(i)
            elif token in ")]}":
                self.partner[stack.pop()] = i
        self.declarations(0, len(self.token))

    def add(self, kind: str, first: int, last: int) -> None:
        """Notes the tokens from first to last, without last."""
        start, end = self.at[first], self.at[last - 1] + len(self.token[last - 1])
        text = " ".join(self.text[start:end].split())
        if not LEFT_OUT.match(text):
            line = self.text.count("\n", 0, start) + 1
            self.found.append(Mutant(self.file, line, start, end, kind, text))

    def declarations(self, i: int, end: int) -> None:
        start = i
        while i < end:
            token = self.token[i]
            if token == "{":
                head, close = self.token[start:i], self.partner[i]
                if self.is_body(i):
                    self.body(i, head)
                    start = close + 1
                elif head[:1] == ["namespace"] or (
                    {"class", "struct", "union"} & {*head} and "enum" not in head
                ):
                    self.declarations(i + 1, close)
                i = close
            elif token == ";":
                start = i + 1
            elif token in "([":
                i = self.partner[i]
            i += 1

    def is_body(self, brace: int) -> bool:
        i = brace - 1
        if self.token[i] in self.BEFORE_BODY or (self.token[i] == "}" and ":" in self.token[i - 9 : i]):
            return True
        while i > 0 and re.match(r"\w|::|[<>*&,]", self.token[i]):
            i -= 1
        return self.token[i] == "->"  # the type of a result

    def body(self, brace: int, head: list[str]) -> None:
        if "constexpr" in head or "consteval" in head:
            return
        before = head[: head.index("(")] if "(" in head else head
        self.block(brace, "bool" if "bool" in before else "other")

    def block(self, brace: int, result: str) -> int:
        i, end = brace + 1, self.partner[brace]
        while i < end:
            i = self.statement(i, result)
        return end + 1

    def inside(self, i: int, end: int) -> None:
        """Looks for the bodies of lambdas in an expression."""
        while i < end:
            if self.token[i] == "{" and self.is_body(i):
                i = self.block(i, "lambda")
            else:
                i += 1

    def until_semicolon(self, i: int) -> int:
        while self.token[i] != ";":
            i = self.partner.get(i, i) + 1
        return i

    def statement(self, i: int, result: str) -> int:
        """Returns the token behind the statement that begins with token i."""
        token = self.token[i]
        if token == "{":
            return self.block(i, result)
        if token in ("case", "default"):
            while self.token[i] != ":":
                i += 1
            return i + 1
        if token in ("else", "do", "try"):
            return self.statement(i + 1, result)
        if token in ("if", "for", "while", "switch", "catch"):
            fixed = self.token[i + 1] == "constexpr"
            first = i + 1 + fixed
            last = self.partner[first]
            if token == "if" and not fixed and not {"=", ";"} & {*self.flat(first + 1, last)}:
                self.add("invert", first + 1, last)
            self.inside(first, last)
            return self.statement(last + 1, result)
        if token in ("struct", "class"):
            end = self.until_semicolon(i)
            self.declarations(i, end)
            return end + 1
        end = self.until_semicolon(i)
        if token == "return":
            flat = {*self.flat(i + 1, end)}
            compares = {"==", "!=", "<", ">", "<=", ">=", "&&", "||"} & flat and "?" not in flat
            if end > i + 1 and (result == "bool" or (result == "lambda" and compares)):
                self.add("invert", i + 1, end)
        elif token not in self.JUMPS and self.is_expression(i, end):
            self.add("leave out", i, end + 1)
        self.inside(i, end)
        return end + 1

    def flat(self, i: int, end: int) -> list[str]:
        """Returns the tokens that are in no brackets."""
        tokens = []
        while i < end:
            tokens.append(self.token[i])
            i = self.partner.get(i, i) + 1
        return tokens

    def is_expression(self, i: int, end: int) -> bool:
        """Tells a call, an assignment or an increment from a declaration."""
        if self.token[i] in ("++", "--", "*"):
            return True
        while i < end:
            token = self.token[i]
            if token in self.ASSIGN or token in ("++", "--"):
                return True
            if token in "([":
                i = self.partner[i] + 1
            elif token in ("::", ".", "->"):
                i += 1
            elif re.match(r"[A-Za-z_]", token):
                if re.match(r"\w", self.token[i + 1]):
                    return False
                i += 1
            else:
                return False
        return self.token[end - 1] == ")"


def choose(folders: list[str], seed: int, count: int) -> list[Mutant]:
    found = []
    for path in sorted(p for folder in folders for p in (ROOT / folder).rglob("*.[hc]*")):
        if path.suffix in (".h", ".cc"):
            found += Scanner(str(path.relative_to(ROOT)), path.read_text()).found
    print(f"{len(found)} statements, of which {min(count, len(found))} become mutants")
    chosen = sorted(random.Random(seed).sample(range(len(found)), min(count, len(found))))
    return [found[i] for i in chosen]


def write(path: Path, text: str) -> None:
    """Leaves a file as it is that has the text, so it is not compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != text.encode():
        path.write_bytes(text.encode())


def plant(mutants: list[Mutant], dropped: set[int]) -> None:
    """Copies the sources, with the mutants in them. Lines keep their numbers."""
    edits = defaultdict(list)
    for number, mutant in enumerate(mutants):
        if number in dropped:
            continue
        if mutant.kind == "invert":
            before, behind = "static_cast<bool>(", f") != ::smddp::mutant({number})"
        else:
            before, behind = f"{{ if (!::smddp::mutant({number})) ", " }"
        edits[mutant.file] += [(mutant.start, 1, before), (mutant.end, 0, behind)]
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in names.stdout.split("\n"):
        if not (ROOT / name).is_file():
            continue
        if name not in edits:
            target = SOURCE / name
            if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((ROOT / name).read_bytes())
                target.chmod((ROOT / name).stat().st_mode)
            continue
        text = (ROOT / name).read_text()
        for at, _, inserted in sorted(edits[name], reverse=True):
            text = text[:at] + inserted + text[at:]
        text = re.sub("^namespace", DECLARATION + "namespace", text, count=1, flags=re.M)
        write(SOURCE / name, text)
    write(SOURCE / "csrc/common/mutant.cc", SWITCH)


def build(mutants: list[Mutant], dropped: set[int], with_python: bool) -> None:
    """Builds the copy; mutants that do not compile are dropped."""
    options = [f"-DPYTHON_EXECUTABLE={ROOT}/.venv/bin/python"] if with_python else []
    configure = ["cmake", "-S", SOURCE, "-B", BUILD, "-G", "Ninja", *options]
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
            ["ninja", "-C", BUILD, "-j2", "-k0"],
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
    """A test of a program, with all its parameters; or one of pytest."""

    name: str
    command: list[str]
    variables: dict[str, str]
    seconds: float = 0.0
    reached: frozenset[int] = frozenset()


def run(test: Test, limit: float, **variables: str) -> str:
    """Returns how the test failed, or an empty text."""
    environment = {**os.environ, "TEST_TURN": "0", **test.variables, **variables}
    process = subprocess.Popen(
        test.command,
        cwd=SOURCE,
        env=environment,
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
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def cpp_tests() -> list[Test]:
    listed = subprocess.run(
        ["ctest", "--test-dir", BUILD, "--show-only=json-v1"],
        check=True,
        capture_output=True,
        text=True,
    )
    tests = []
    for entry in json.loads(listed.stdout)["tests"]:
        if "command" not in entry:  # not built
            continue
        properties = {p["name"]: p["value"] for p in entry["properties"]}
        variables = dict(v.split("=", 1) for v in properties.get("ENVIRONMENT", []))
        command = [c for c in entry["command"] if not c.startswith("--gtest_filter")]
        chosen = [c.split("=", 1)[1] for c in entry["command"] if c not in command]
        chosen += [variables.pop("GTEST_FILTER")] if "GTEST_FILTER" in variables else []
        if entry["name"].startswith("collectives") or "plan" in entry["command"][0].split("/"):
            continue
        found = subprocess.run(
            [*command, "--gtest_list_tests", f"--gtest_filter={(chosen or ['*'])[0]}"],
            capture_output=True,
            text=True,
        )
        names, suite = dict[str, list[str]](), ""
        for line in found.stdout.splitlines():
            name = line.split("#")[0].strip()
            if not line.startswith(" "):
                suite = name
            else:
                names.setdefault(suite + name.split("/")[0], []).append(suite + name)
        for name, cases in names.items():
            tests.append(
                Test(
                    f"{entry['name']} {name}",
                    [*command, "--gtest_fail_fast", "--gtest_filter=" + ":".join(cases)],
                    variables,
                )
            )
    return tests


def python_tests() -> list[Test]:
    """The tests of PYTHON_TESTS, with the mutants that each reaches."""
    table, reached = WORK / "python_reached", WORK / "reached_python"
    if not table.exists():
        reached.write_bytes(bytes(MAX_MUTANTS))
        partial = WORK / "python_reached.partial"
        partial.unlink(missing_ok=True)
        files = [f"tests/python/test_{name}.py" for name in PYTHON_TESTS]
        every = Test("", [*pytest_command(), *files], {"MUTANTS_TABLE": str(partial)})
        if failure := run(every, 1800, MUTANTS_REACHED=str(reached)):
            sys.exit(f"the Python tests fail without a mutant: {failure}")
        partial.rename(table)
    tests = []
    for line in table.read_text().splitlines():
        name, seconds, numbers = json.loads(line)
        tests.append(
            Test(name, [*pytest_command(), "-x", name], {}, seconds + 5, frozenset(numbers))
        )
    return tests


def pytest_command() -> list[str]:
    write(SOURCE / "notes_mutants.py", PLUGIN)
    lib = SOURCE / "smddp/lib"
    if not lib.exists():
        lib.symlink_to(BUILD / "lib")
    python = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-q", "-m", "not exhaustive"]
    # -P would hide the copy of the sources, which the current folder brings.
    return ["env", f"PYTHONPATH={SOURCE}", *python, "-p", "notes_mutants"]


def find_reached(tests: list[Test], jobs: int) -> list[Test]:
    """Runs each test without a mutant, and notes how long it takes and which mutants it reaches."""
    known = WORK / "cpp_reached"
    if known.exists():
        notes = json.loads(known.read_text())
    else:

        def note(test: Test) -> tuple[str, float, list[int]] | None:
            path = WORK / f"reached_{abs(hash(test.name))}"
            path.write_bytes(bytes(MAX_MUTANTS))
            start = time.monotonic()
            failure = run(test, 300, MUTANTS_REACHED=str(path))
            numbers = [i for i, byte in enumerate(path.read_bytes()) if byte]
            path.unlink()
            if failure:
                print(f"fails without a mutant, so it is left out: {test.name}: {failure}")
                return None
            return test.name, time.monotonic() - start, numbers

        with ThreadPoolExecutor(jobs) as pool:
            notes = [n for n in pool.map(note, tests) if n]
        known.write_text(json.dumps(notes))
    by_name = {name: (seconds, frozenset(numbers)) for name, seconds, numbers in notes}
    known_tests = [test for test in tests if test.name in by_name]
    for test in known_tests:
        test.seconds, test.reached = by_name[test.name]
    return known_tests


def hunt(number: int, tests: list[Test], budget: float) -> dict[str, object]:
    """Runs the tests that reach a mutant until one fails."""
    reaching = sorted((t for t in tests if number in t.reached), key=lambda t: t.seconds)
    spent, done = 0.0, 0
    for test in reaching:
        if spent + test.seconds > budget:
            break
        start = time.monotonic()
        failure = run(test, 15 + 5 * test.seconds, MUTANT=str(number))
        if failure:
            return {"found by": test.name, "how": failure}
        spent += time.monotonic() - start
        done += 1
    return {"found by": None, "ran": done, "reached by": len(reaching)}


def main() -> None:
    """Runs what the first lines of this file say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--budget", type=float, default=100, help="seconds for a mutant")
    parser.add_argument("--python", action="store_true", help="the Python tests, too")
    options = parser.parse_args()
    mutants = choose(options.folders, options.seed, options.count)
    dropped: set[int] = set()
    build(mutants, dropped, options.python)
    results = {str(i): asdict(m) for i, m in enumerate(mutants) if i not in dropped}
    results |= json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def judge(kind: str, tests: list[Test]) -> None:
        def one(number: int) -> None:
            known = results[str(number)]
            if kind in known or any(known.get(k, {}).get("found by") for k in ("C++", "Python")):
                return
            known[kind] = hunt(number, tests, options.budget)
            print(number, mutants[number].file, mutants[number].line, known[kind], flush=True)
            RESULTS.write_text(json.dumps(results, indent=1))

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, [i for i in range(len(mutants)) if i not in dropped]))

    judge("C++", find_reached(cpp_tests(), options.jobs))
    if options.python:
        judge("Python", python_tests())
    survivors = [r for r in results.values() if not any(r.get(k, {}).get("found by") for k in ("C++", "Python"))]
    print(f"{len(survivors)} of {len(mutants) - len(dropped)} mutants survive:")
    for r in survivors:
        print(f"{r['file']}:{r['line']}: {r['kind']}: {r['text'][:120]}")


if __name__ == "__main__":
    main()
