"""The layers of csrc, smddp and smdistributed: tables that each include and import keeps.

A folder of csrc, or a part of the Python packages, may use those of its row, and itself. What a
feature costs (a torch header half a minute of compile time, a thread a reader's certainty) is paid
in one folder only.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"

# Folder -> what it may include, or name by its namespace, besides itself and common.
# transport/shm, fabric, tcp and sim are siblings that never meet; "transport" is the interface in
# csrc/transport, and transport/network chooses between fabric and tcp. Only tests know sim.
# process_group has the calls on CPU tensors, and an interface to calls on a device, which
# process_group/device implements. It includes nothing of collectives itself: it names types that
# the headers of engine bring; so does process_group/device with plan and transport.
MAY_INCLUDE: dict[str, set[str]] = {
    "common": set(),
    "plan": set(),
    "reduction": set(),
    "transport": set(),
    "transport/shm": {"transport"},
    "transport/fabric": {"transport"},
    "transport/tcp": {"transport"},
    "transport/sim": {"transport"},
    "transport/network": {"transport", "transport/fabric", "transport/tcp"},
    "bootstrap": set(),
    "collectives": {"plan"},
    # The rooms of the engine, lowest first.
    "engine/memory": {"plan", "transport", "transport/shm"},
    "engine/observe": {"transport/shm"},
    "engine/agreement": {"bootstrap"},
    "engine/process": {
        "reduction",
        "transport",
        "transport/shm",
        "transport/fabric",
        "transport/network",
        "bootstrap",
        "engine/memory",
        "engine/observe",
    },
    "engine/calls": {"transport", "collectives"},
    "engine/team": {
        "plan",
        "transport",
        "transport/shm",
        "bootstrap",
        "engine/memory",
        "engine/observe",
        "engine/process",
        "engine/calls",
    },
    "engine/plans": {
        "plan",
        "reduction",
        "transport",
        "transport/shm",
        "collectives",
        "engine/memory",
        "engine/observe",
        "engine/process",
        "engine/calls",
        "engine/team",
    },
    "engine/health": {
        "transport",
        "engine/observe",
        "engine/process",
        "engine/calls",
        "engine/team",
        "engine/plans",
    },
    "engine/operations": {
        "plan",
        "transport",
        "transport/shm",
        "collectives",
        "engine/memory",
        "engine/observe",
        "engine/process",
        "engine/calls",
        "engine/team",
        "engine/plans",
        "engine/health",
    },
    "engine/groups": {
        "plan",
        "reduction",
        "transport",
        "bootstrap",
        "collectives",
        "engine/memory",
        "engine/observe",
        "engine/process",
        "engine/calls",
        "engine/team",
        "engine/plans",
        "engine/health",
        "engine/operations",
    },
    "engine/progress": {"transport/shm", "engine/process", "engine/calls", "engine/groups"},
    "engine": {
        "transport/shm",
        "bootstrap",
        "collectives",
        "engine/observe",
        "engine/process",
        "engine/calls",
        "engine/team",
        "engine/groups",
        "engine/progress",
        "engine/agreement",
    },
    "store": {"bootstrap"},
    "c_interface": {
        "bootstrap",
        "collectives",
        "engine/process",
        "engine/calls",
        "engine/groups",
        "engine",
        "store",
    },
    "cuda": set(),
    "cuda/kernels": {"cuda"},
    "process_group": {
        "bootstrap",
        "collectives",
        "engine/process",
        "engine/calls",
        "engine/plans",
        "engine/operations",
        "engine/groups",
        "engine/progress",
        "engine/agreement",
        "engine",
    },
    "process_group/device": {
        "plan",
        "transport",
        "collectives",
        "engine/calls",
        "engine/groups",
        "engine",
        "cuda",
        "process_group",
    },
    "bindings": {
        "plan",
        "collectives",
        "engine/process",
        "engine/plans",
        "engine",
        "process_group",
        "process_group/device",
    },
}

# What -> (pattern of a code line, the folders or files that may have it).
ONLY_IN: dict[str, tuple[str, set[str]]] = {
    "the environment": (r"\b(secure_)?getenv\s*\(|\benviron\b", {"common/config.cc"}),
    "settings that are not passed in": (
        r"(?<![\w.>])settings\(\)",
        {
            *("common", "process_group", "process_group/device", "c_interface", "bindings"),
            "reduction/reduce.cc",  # SMDDP_SIMD, for all engines of the process
        },
    ),
    "the name service": (r"\bget(addr|name)info\s*\(|\bgethostby", {"common/host_address.cc"}),
    "libfabric": (r"#include <rdma/", {"transport/fabric"}),
    "memory mappings": (r"#include <sys/mman\.h>", {"transport/shm"}),
    "threads": (
        r"\bstd::j?thread\b(?!::id)|\bpthread_create\b",
        {"engine/observe", "engine/progress", "store", "process_group"},
    ),
    "CUDA": (r"#include <(cuda|nccl)", {"cuda/kernels"}),
    "torch": (
        r"#include <(torch|c10|ATen)/",
        {"process_group", "process_group/device", "bindings"},
    ),
    "Python": (r"#include <(pybind11/|Python\.h)", {"bindings"}),
    "SIMD": (r"#include <(\w*mmintrin\.h|arm_neon\.h)", {"common/stream_copy.cc", "reduction"}),
}

# The part of a module -> what it may import besides itself. A module belongs to the longest name in
# this table that it begins with. Nothing but scripts' modules and commands imports "smddp", whose
# names are those of "smddp.torch": what `import torch` loads must not come back to it.
CORE, SMP = "smddp.modelparallel.core", "smddp.modelparallel.torch"
COMMON, JOB = f"{SMP}.common", f"{SMP}.job"
DELAYED = f"{SMP}.delayed"
PIPELINE, PARTITION = f"{SMP}.pipeline", f"{SMP}.partition"
DATA_PARALLEL, MODEL = f"{SMP}.data_parallel", f"{SMP}.model"
OPTIMIZER, CHECKPOINT = f"{SMP}.optimizer", f"{SMP}.checkpoint"
SHARDING = f"{SMP}.sharding"
ACTIVATIONS, API = f"{SMP}.activations", f"{SMP}.api"
COMPATIBILITY = f"{SMP}.compatibility"
TENSOR = f"{SMP}.tensor"
FOOTPRINT = f"{SMP}.footprint"
TRANSFORMER = f"{SMP}.tensor.transformer"
HUGGING_FACE = f"{SMP}.tensor.huggingface"
INTERNALS = "smddp._torch_internals"
MAY_IMPORT: dict[str, set[str]] = {
    "smddp._version": set(),
    INTERNALS: set(),
    "smddp.launch": {CORE},
    "smddp._registration": {INTERNALS, "smddp.launch"},
    "smddp.torch": {INTERNALS, "smddp.launch", "smddp._registration"},
    "smddp._autoload": {"smddp._registration", "smddp.torch"},
    "smddp": {"smddp._version", "smddp._registration", "smddp._autoload", "smddp.torch"},
    "smddp.elastic": {INTERNALS, "smddp.launch", "smddp._registration", "smddp.torch"},
    "smddp.numpy": {"smddp.launch"},
    "smddp.tensorflow": {"smddp.numpy"},
    "smddp.tools": {"smddp", "smddp.launch", "smddp.tools._spans", "smddp.torch"},
    "smddp.tools._spans": set(),
    "smddp.bench": {
        INTERNALS,
        "smddp",
        "smddp.launch",
        "smddp.tools",
        "smddp.tools._spans",
        "smddp.torch",
    },
    "smddp.tools.merge": {CORE, CHECKPOINT},
    "smddp.tools.cli": {"smddp._version", "smddp.bench", "smddp.tools", "smddp.tools.merge"},
    "smddp.__main__": {"smddp.tools.cli"},
    "smddp.modelparallel": set(),
    CORE: set(),
    "smddp.modelparallel.tensorflow": {"smddp.numpy", CORE, "smddp.tensorflow"},
    COMMON: {INTERNALS, CORE, "smddp.torch"},
    JOB: {INTERNALS, CORE, "smddp.launch", "smddp.tools._spans", "smddp.torch"},
    PIPELINE: {INTERNALS, CORE, "smddp.torch", COMMON, ACTIVATIONS},
    DELAYED: {INTERNALS, CORE, COMMON},
    PARTITION: {INTERNALS, CORE, COMMON, JOB, ACTIVATIONS, PIPELINE, DELAYED, TENSOR},
    DATA_PARALLEL: {INTERNALS, CORE, COMMON, PIPELINE},
    SHARDING: {INTERNALS, CORE, COMMON, JOB, PIPELINE, DATA_PARALLEL, DELAYED, TENSOR},
    TENSOR: {INTERNALS, CORE, COMMON, JOB, PIPELINE, DELAYED},
    TRANSFORMER: {INTERNALS, CORE, TENSOR},
    HUGGING_FACE: {CORE, JOB, TENSOR, TRANSFORMER},
    OPTIMIZER: {INTERNALS, CORE, COMMON, JOB, PARTITION, SHARDING, DELAYED, TENSOR},
    COMPATIBILITY: {JOB, TENSOR},
    MODEL: {
        INTERNALS,
        CORE,
        *(COMMON, JOB, ACTIVATIONS, PIPELINE, PARTITION, DATA_PARALLEL, OPTIMIZER),
        *(DELAYED, SHARDING, TENSOR),
    },
    CHECKPOINT: {CORE, COMMON, JOB, PARTITION, SHARDING, OPTIMIZER, DELAYED, TENSOR},
    ACTIVATIONS: {INTERNALS, CORE, COMMON},
    FOOTPRINT: {
        INTERNALS,
        *(CORE, COMMON, JOB, ACTIVATIONS, PIPELINE, PARTITION, OPTIMIZER, SHARDING, MODEL),
    },
    API: {
        INTERNALS,
        *(CORE, COMMON, JOB, ACTIVATIONS, PIPELINE, PARTITION, OPTIMIZER, MODEL, FOOTPRINT),
        *(TENSOR, TRANSFORMER),
    },
    SMP: {
        *(HUGGING_FACE, CORE),
        *(JOB, PARTITION, OPTIMIZER, MODEL, CHECKPOINT, API, DELAYED, TENSOR),
    },
    "smdistributed": set(),
    "smdistributed.dataparallel": {"smddp.launch", "smddp.tensorflow", "smddp.torch"},
    "smdistributed.modelparallel": {CORE},
    "smdistributed.modelparallel.tensorflow": {"smddp.modelparallel.tensorflow"},
    "smdistributed.modelparallel.torch": {
        *(SMP, JOB, OPTIMIZER, MODEL, CHECKPOINT, API, CORE),
        *(COMPATIBILITY, HUGGING_FACE, TENSOR, TRANSFORMER),
    },
    "smdistributed.modelparallel.test": {COMPATIBILITY},
}

SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"})
# Namespace -> folder; the last part of the folder's name is the namespace.
NAMESPACES = {folder.split("/")[-1]: folder for folder in MAY_INCLUDE}
_NAMES = "|".join(NAMESPACES)
_OUTER = "(?:transport|engine|process_group)"
NAMESPACE = re.compile(
    rf"(?<![\w:])(?:smddp::(?:{_OUTER}::)?({_NAMES})\b|(?:{_OUTER}::)?({_NAMES})::)"
)
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


def uses(name: str, lines: list[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Yields line number, folder ("" if unknown) and text of what a file includes and names."""
    for number, line in lines:
        include = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if include is not None:
            yield number, folder_of(include[1]), include[1]
            continue
        for namespace in NAMESPACE.finditer(line):
            yield number, NAMESPACES[namespace[1] or namespace[2]], namespace[0]


def broken_includes(name: str, lines: list[tuple[int, str]]) -> list[str]:
    """Returns one sentence for each #include and namespace that the table does not allow."""
    folder = folder_of(name)
    found = []
    for number, target, text in uses(name, lines):
        if not target:
            found.append(f"{name}:{number}: {text} is not a path from csrc/ to a known layer")
        elif target not in {folder, "common"} | MAY_INCLUDE[folder]:
            found.append(f"{name}:{number}: {folder} must not use {target} ({text})")
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


def part_of(module: str) -> str:
    """Returns the row of MAY_IMPORT that a module belongs to; "" if there is none."""
    parts = module.split(".")
    while parts and ".".join(parts) not in MAY_IMPORT:
        parts.pop()
    return ".".join(parts)


def python_modules() -> dict[str, Path]:
    """Returns the Python modules of the project by name, those with only a stub included."""
    found = {}
    for top in ("smddp", "smdistributed"):
        for path in sorted((ROOT / top).rglob("*.py*")):
            if path.suffix in {".py", ".pyi"}:
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = python_modules()


def imports(module: str, text: str) -> list[tuple[int, str]]:
    """Returns line and name of each module of the project that a module imports anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append((node.lineno, name if name in MODULES else str(node.module)))
    return [(number, name) for number, name in found if part_of(name)]


def broken_imports(module: str, text: str) -> list[str]:
    """Returns one sentence for each import that the table does not allow."""
    part = part_of(module)
    return [
        f"{module}:{number}: {part} must not import {part_of(name)} ({name})"
        for number, name in imports(module, text)
        if part_of(name) not in {part} | MAY_IMPORT[part]
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the nodes that lie on circles of a graph, or between two of them."""
    remaining = dict(graph)
    while True:
        ready = [name for name, below in remaining.items() if not below & set(remaining)]
        if not ready:
            break
        for name in ready:
            del remaining[name]
    # What only leads to a circle is not on one.
    while True:
        reached = {name for below in remaining.values() for name in below}
        if not (outside := set(remaining) - reached):
            return sorted(remaining)
        for name in outside:
            del remaining[name]


def unused(table: dict[str, set[str]], used: dict[str, set[str]]) -> list[str]:
    """Returns one sentence for each entry of a table that nothing needs."""
    return [
        f"{row} uses nothing of {entry}: take it out of the table"
        for row, entries in table.items()
        for entry in sorted(entries - used.get(row, set()))
    ]


def test_every_folder_has_a_row() -> None:
    folders = {path.parent.relative_to(CSRC).as_posix() for path in SOURCES}
    assert folders == set(MAY_INCLUDE)
    assert {part_of(module) for module in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("table", [MAY_INCLUDE, MAY_IMPORT])
def test_table_has_no_cycle(table: dict[str, set[str]]) -> None:
    assert not circle(table), f"these rows depend on each other: {circle(table)}"


def test_table_of_csrc_has_no_unused_entry() -> None:
    used: dict[str, set[str]] = {}
    for path in SOURCES:
        name = path.relative_to(CSRC).as_posix()
        targets = {target for _, target, _ in uses(name, code_lines(path))}
        used.setdefault(folder_of(name), set()).update(targets)
    found = unused(MAY_INCLUDE, used)
    for what, (pattern, allowed) in ONLY_IN.items():
        files = [
            path.relative_to(CSRC)
            for path in SOURCES
            if any(re.search(pattern, line) for _, line in code_lines(path))
        ]
        users = {place.as_posix() for file in files for place in (file, file.parent)}
        found += [f"{place} does not use {what}" for place in sorted(allowed - users)]
    assert not found, "\n".join(found)


def test_modules_keep_the_rule() -> None:
    found: list[str] = []
    used: dict[str, set[str]] = {}
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        text = path.read_text()
        found += broken_imports(module, text)
        graph[module] = {name for _, name in imports(module, text)}
        used.setdefault(part_of(module), set()).update(map(part_of, graph[module]))
    found += unused(MAY_IMPORT, used)
    if on_circle := circle(graph):
        found.append(f"these modules import each other in a circle: {', '.join(on_circle)}")
    assert not found, "\n".join(found)


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
        ("plan/plan.cc", "engine::Request request;", broken_includes),
        (
            "engine/groups/group.h",
            "namespace smddp::process_group { class Work; }",
            broken_includes,
        ),
        ("collectives/ring.cc", "const smddp::transport::shm::Slab& slab", broken_includes),
        ("engine/engine.cc", 'std::getenv("HOME")', misplaced_features),
        ("engine/engine.h", "#include <torch/torch.h>", misplaced_features),
        ("plan/plan.cc", "std::thread worker;", misplaced_features),
    ],
)
def test_checks_can_fail(name, line, check) -> None:
    assert len(check(name, [(1, line)])) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("smddp.tools.env", "from smddp.bench import measure"),
        ("smddp._registration", "import smddp"),
        (f"{PIPELINE}.calls", f"import {JOB}.state"),
        (f"{PARTITION}.decide", f"from {DATA_PARALLEL} import reducer"),
        (f"{JOB}.state", f"def late():\n    from {PIPELINE}.executor import Executor"),
    ],
)
def test_check_of_imports_can_fail(module: str, line: str) -> None:
    assert len(broken_imports(module, line)) == 1


def test_circles_and_unused_entries_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert len(unused({"a": {"b", "c"}}, {"a": {"b"}})) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_headers_compile_on_their_own() -> None:
    # One of 28, others with each TEST_TURN. With ALL_SEEDS=1 all.
    share = 1 if os.environ.get("ALL_SEEDS") else 28
    headers = TORCH_FREE_HEADERS[int(os.environ.get("TEST_TURN", "0")) % share :: share]
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
        errors = [text for text in pool.map(compile_alone, headers) if text]
    assert headers
    assert not errors, "\n".join(errors)
