"""The layers of csrc, as a table that is checked against every #include.

A folder may include the folders of its row and itself. What a feature costs (a torch header half a
minute of compile time, a thread a reader's certainty) is paid in one folder only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"

# Folder -> what it may include besides itself and common. transport/shm, fabric and sim are
# siblings that never meet; "transport" is the interface in csrc/transport itself. Only tests know
# sim.
MAY_INCLUDE: dict[str, set[str]] = {
    "common": set(),
    "plan": set(),
    "reduction": set(),
    "transport": set(),
    "transport/shm": {"transport"},
    "transport/fabric": {"transport"},
    "transport/sim": {"transport"},
    "bootstrap": {"transport", "transport/shm", "transport/fabric"},
    "collectives": {"plan"},
    "engine": {
        "bootstrap",
        "transport",
        "transport/shm",
        "transport/fabric",
        "reduction",
        "plan",
        "collectives",
    },
    "cuda": set(),
    "cuda/kernels": {"cuda"},
    "process_group": {"engine", "bootstrap", "cuda"},
    "bindings": {"process_group", "engine", "plan", "collectives"},
}

# What -> (pattern of a code line, the folders or files that may have it).
ONLY_IN: dict[str, tuple[str, set[str]]] = {
    "the environment": (r"\b(secure_)?getenv\s*\(|\benviron\b", {"common/config.cc"}),
    "libfabric": (r"#include <rdma/", {"transport/fabric"}),
    "memory mappings": (r"#include <sys/mman\.h>", {"transport/shm"}),
    "threads": (r"\bstd::j?thread\b(?!::id)|\bpthread_create\b", {"engine", "bootstrap"}),
    "CUDA": (r"#include <(cuda|nccl)", {"cuda/kernels"}),
    "torch": (r"#include <(torch|c10|ATen)/", {"process_group", "bindings"}),
    "Python": (r"#include <(pybind11/|Python\.h)", {"process_group", "bindings"}),
    "SIMD": (r"#include <(\w*mmintrin\.h|arm_neon\.h)", {"common/stream_copy.cc", "reduction"}),
}

SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"})
TORCH_FREE_HEADERS = [
    path
    for path in SOURCES
    if path.suffix == ".h"
    and not path.name.endswith(".inl.h")
    and path.relative_to(CSRC).parts[0] not in {"process_group", "bindings"}
]


def folder_of(path: str) -> str:
    """Returns the row of MAY_INCLUDE that a path below csrc belongs to."""
    parts = path.split("/")[:-1]
    while parts and "/".join(parts) not in MAY_INCLUDE:
        parts.pop()
    return "/".join(parts)


def code_lines(path: Path) -> list[tuple[int, str]]:
    """Returns the numbered lines of a file without their // comments."""
    lines = path.read_text().splitlines()
    return [(number, line.split("//")[0]) for number, line in enumerate(lines, 1)]


def broken_includes(name: str, lines: list[tuple[int, str]]) -> list[str]:
    """Returns one sentence for each #include that the table does not allow."""
    folder = folder_of(name)
    found = []
    for number, line in lines:
        include = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if include is None:
            continue
        target = folder_of(include[1])
        if not target:
            found.append(f"{name}:{number}: {include[1]} is not a path from csrc/ to a known layer")
        elif target not in {folder, "common"} | MAY_INCLUDE[folder]:
            found.append(f"{name}:{number}: {folder} must not include {target} ({include[1]})")
    return found


def misplaced_features(name: str, lines: list[tuple[int, str]]) -> list[str]:
    """Returns one sentence for each line that uses a feature outside its folder."""
    found = []
    for what, (pattern, allowed) in ONLY_IN.items():
        if name in allowed or folder_of(name) in allowed:
            continue
        found += [
            f"{name}:{number}: {what} belongs to {', '.join(sorted(allowed))}"
            for number, line in lines
            if re.search(pattern, line)
        ]
    return found


def test_every_folder_has_a_row() -> None:
    folders = {path.parent.relative_to(CSRC).as_posix() for path in SOURCES}
    assert folders <= set(MAY_INCLUDE)


def test_table_has_no_cycle() -> None:
    levels: dict[str, int] = {}
    remaining = dict(MAY_INCLUDE)
    while remaining:
        ready = [folder for folder, below in remaining.items() if below <= set(levels)]
        assert ready, f"these rows depend on each other: {sorted(remaining)}"
        for folder in ready:
            levels[folder] = len(levels)
            del remaining[folder]


@pytest.mark.parametrize("check", [broken_includes, misplaced_features])
def test_sources_keep_the_rule(check) -> None:
    assert SOURCES
    found = []
    for path in SOURCES:
        found += check(path.relative_to(CSRC).as_posix(), code_lines(path))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "line", "check"),
    [
        ("plan/plan.cc", '#include "engine/engine.h"', broken_includes),
        ("transport/shm/shm.cc", '#include "transport/fabric/fabric.h"', broken_includes),
        ("engine/engine.cc", '#include "completion.h"', broken_includes),
        ("engine/engine.cc", 'std::getenv("HOME")', misplaced_features),
        ("engine/engine.h", "#include <torch/torch.h>", misplaced_features),
        ("plan/plan.cc", "std::thread worker;", misplaced_features),
    ],
)
def test_checks_can_fail(name, line, check) -> None:
    assert len(check(name, [(1, line)])) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_headers_compile_on_their_own() -> None:
    # In the build folder and by relative paths: there the compiler cache knows them the next time.
    folder = ROOT / "build" / "headers"
    folder.mkdir(parents=True, exist_ok=True)
    command = ["ccache"] if shutil.which("ccache") else []
    command += [os.environ.get("CXX", "g++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Icsrc"]
    command += ["-DFMT_HEADER_ONLY", "-DSMDDP_HAVE_LIBFABRIC=1", '-DSMDDP_VERSION="0"']

    def compile_alone(header: Path) -> str:
        # Through a file that includes it: g++ warns about #pragma once in a main file.
        name = header.relative_to(CSRC).as_posix()
        source = folder / (name.replace("/", "_") + ".cc")
        source.write_text(f'#include "{name}"\n')
        arguments = ["-c", str(source.relative_to(ROOT)), "-o", str(source.with_suffix(".o"))]
        result = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return result.stderr if result.returncode else ""

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        errors = [text for text in pool.map(compile_alone, TORCH_FREE_HEADERS) if text]
    assert TORCH_FREE_HEADERS
    assert not errors, "\n".join(errors)
