"""Programs that tests fork behave as in a new interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import interpreters
import programs
import pytest

# A program that says what it sees, and starts itself once, with other variables and streams.
_SCRIPT = """
import os, signal, subprocess, sys, warnings

def main():
    print(__name__, sys.argv[1:], os.environ["WHERE"], os.getcwd(), sys.path[0])
    print(sorted(int(number) for number in os.listdir("/proc/self/fd"))[:3])
    print([signal.getsignal(each).__name__ if callable(signal.getsignal(each)) else int(
        signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
    print("to the errors", file=sys.stderr)
    if sys.argv[1] == "outer":
        signal.signal(signal.SIGTERM, lambda *_: None)
        with open("/dev/null") as inherited:
            child = subprocess.Popen(
                [sys.executable, __file__, "inner", str(os.getpid())],
                env={**os.environ, "WHERE": "inside"}, cwd="/", start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            print(child.communicate()[0], child.returncode)
        sys.exit("the end")
    assert os.getppid() == int(sys.argv[2]) and os.getsid(0) == os.getpid()
    sys.exit(7)

main()
"""


def _both(
    *command: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    environment = programs.environment(**variables)
    (new,) = interpreters.run_together(command, [environment])
    return programs.run(*command, **variables), new


def test_a_program_and_its_child(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    forked, new = _both(str(script), "outer", WHERE="outside")
    said = [re.sub(r"'\d+'", "the parent", text.stdout) for text in (forked, new)]
    assert said[0] == said[1]
    assert said[0].count("the parent") == 1
    assert (forked.stderr, forked.returncode) == (new.stderr, new.returncode)
    assert forked.returncode == 1
    assert forked.stderr.endswith("the end\n")


@pytest.mark.parametrize("code", ["raise ValueError('x')", "import sys; sys.exit(3)", "1 + 1"])
def test_how_a_program_ends(code: str) -> None:
    forked, new = _both("-c", code)
    assert forked.returncode == new.returncode
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_a_module_with_arguments() -> None:
    forked, new = _both("-u", "-m", "smddp.launch", "--help")
    assert forked.stdout == new.stdout
    assert "usage: smddprun" in forked.stdout
    assert sys.executable not in forked.stderr
