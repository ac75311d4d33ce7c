"""What the package `smddp` has, what of it loads torch, and that it never breaks `import torch`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from interpreters import ROOT, install, run, succeed

import smddp

# Scripts import these; docs name them.
NAMES = {
    *("AbortedError", "CollectiveMismatchError", "CollectiveTimeoutError", "InternalError"),
    *("PeerLostError", "ResourceError", "TransportError"),
    *("GroupOptions", "__version__", "describe", "empty", "statistics"),
}
MODULES = (
    *("smddp.bench", "smddp.errors", "smddp.launch", "smddp.lightning", "smddp.numpy"),
    *("smddp.tensorflow", "smddp.modelparallel.torch", "smddp.modelparallel.tensorflow"),
)
COMMANDS = ("doctor", "env", "merge", "plan", "status", "topo")


def test_the_names_that_scripts_use() -> None:
    assert set(smddp.__all__) == NAMES
    assert set(dir(smddp)) >= NAMES
    for name in NAMES:
        assert getattr(smddp, name) is not None
    assert smddp.errors.PeerLostError is smddp.PeerLostError
    for module in MODULES:
        assert importlib.util.find_spec(module) is not None, module
    assert not hasattr(smddp, "absent")
    with pytest.raises(AttributeError, match="module 'smddp' has no attribute 'absent'"):
        smddp.absent  # noqa: B018


def test_the_root_has_no_other_module() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == {"smddp", "smdistributed"}
    assert [path.name for path in ROOT.glob("*.py")] == ["setup.py"]


def test_what_loads_no_torch() -> None:
    """Only smddp.torch, smp for torch, and the benchmark do; `import smddp` loads nothing else."""
    succeed(
        f"""
        import importlib, pathlib, sys

        before = set(sys.modules)
        import smddp

        new = set(sys.modules) - before
        assert {{name for name in new if name.startswith("smddp")}} == {{"smddp"}}, new
        assert {{name.partition(".")[0] for name in new}} <= {{"smddp", *sys.stdlib_module_names}}
        smddp.__version__
        root = pathlib.Path({str(ROOT)!r})
        for room in ("launch", "tools", "modelparallel/core"):
            for file in (root / "smddp" / room).glob("*.py"):
                if file.stem != "__main__":
                    name = file.relative_to(root).with_suffix("").as_posix().replace("/", ".")
                    importlib.import_module(name.removesuffix(".__init__"))
        import smddp.numpy, smddp._autoload, smddp._registration

        assert "torch" not in sys.modules
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    )


def test_commands_that_start_without_torch() -> None:
    succeed(
        f"""
        import contextlib, io, os, sys
        from smddp.tools.cli import main

        sys.modules["torch"] = None  # importing it raises an ImportError
        with contextlib.redirect_stdout(io.StringIO()) as said:
            with contextlib.redirect_stderr(io.StringIO()):  # this process has no ranks
                main(["status", str(os.getpid())])
            for command in {COMMANDS}:
                with contextlib.suppress(SystemExit):
                    main([command, "--help"])
        assert said.getvalue().count("usage: smddp ") == {len(COMMANDS)}
        assert "numpy" not in sys.modules
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    )


def test_without_torch_the_doctor_examines_the_host_and_others_say_why() -> None:
    ended = run(
        """
        import sys
        from smddp.tools import doctor
        from smddp.tools._command import run
        from smddp.tools.cli import main

        sys.modules["torch"] = None
        found = {finding.check: finding for finding in doctor.examine_host()}
        assert found["versions"].state == "fault"
        assert "torch" in found["versions"].text
        assert len([finding for finding in found.values() if finding.state == "ok"]) > 3, found
        run(lambda: main(["env"]))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith("import of torch halted")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.costly
@pytest.mark.parametrize(
    ("release", "variables", "loads"),
    [
        ("2.11.0", {}, True),
        ("2.13.1+cpu", {}, True),
        ("2.14.0", {}, False),
        ("2.15.0", {"SMDDP_INSTEAD_OF": "gloo"}, True),
        ("2.15.0", {"PMI_RANK": "0"}, True),
    ],
)
def test_import_smddp_loads_torch_where_nothing_else_would_register_the_backend(
    release: str, variables: dict[str, str], loads: bool
) -> None:
    succeed(
        f"""
        import importlib.metadata, sys

        importlib.metadata.version = lambda name: {release!r}
        import smddp

        assert ("torch" in sys.modules) is {loads}
        if {loads}:
            import torch.distributed as dist

            assert dist.Backend.SMDDP == "smddp"
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        **variables,
    )


@pytest.mark.costly
def test_in_a_clone_that_is_not_installed_import_smddp_registers(tmp_path: Path) -> None:
    path = install(tmp_path, entry_points=False)
    (tmp_path / "setup.py").touch()
    script = """
        import smddp
        import torch.distributed as dist

        dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
    """
    succeed(script, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="1")


# Runs each line of smddp that `import torch` runs, except for definitions, as one that fails.
_FAIL = """
    import linecache, os, sys, warnings
    import torch
    import torch.distributed as dist

    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    package = {package!r} + os.sep
    # Nothing there can fail but the import of a standard module.
    definitions = [package + "__init__.py", package + "_autoload.py"]
    helper = dist.distributed_c10d._new_process_group_helper
    kept = dist.init_process_group, sys.excepthook
    files = []  # that of each step


    def load(failing, action):
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            file, line = frame.f_code.co_filename, frame.f_lineno
            if not file.startswith(package):
                return None
            is_definition = frame.f_code.co_name == "<module>" and file in definitions
            is_try = linecache.getline(file, line).strip() == "try:"
            if event == "line" and not is_definition and not is_try:
                count += 1
                if failing is None:
                    files.append(os.path.basename(file))
                if count == failing:
                    raise RuntimeError("seeded")
            return trace

        for name in [name for name in sys.modules if name.partition(".")[0] == "smddp"]:
            del sys.modules[name]
        dist.Backend._plugins.pop("SMDDP", None)
        dist.init_process_group, sys.excepthook = kept
        dist.distributed_c10d._new_process_group_helper = helper
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            sys.settrace(trace)
            try:
                torch._import_device_backends()
            finally:
                sys.settrace(None)
        is_known = "SMDDP" in dist.Backend._plugins
        if action == "always":
            said = [str(one.message) for one in caught]
            text = "smddp: the backend could not be registered: seeded"
            assert is_known or said == [text], (failing, said)
        return count


    load(None, "error")  # the first time runs a few lines more
    files.clear()
    steps = load(None, "error")
    names = "_torch_internals.py"
    assert set(files) == {{"__init__.py", "_autoload.py", "_registration.py", "environment.py",
                           "slurm.py", names}}, set(files)
    assert steps > 100, steps
    for failing in range(1, steps + 1):
        if files[failing - 1] == names and failing % 50:
            continue  # there are hundreds of names, each found in the same way
        load(failing, "always")
        load(failing, "error")
    del os.environ["SMDDP_INSTEAD_OF"]
"""


@pytest.mark.costly
def test_no_step_that_fails_breaks_import_torch(tmp_path: Path) -> None:
    path = install(tmp_path)
    ended = run(
        _FAIL.format(package=f"{path}/smddp"),
        PYTHONPATH=path,
        SMDDP_INSTEAD_OF="gloo",
        SMDDPRUN="1",
        TORCHELASTIC_ERROR_FILE=str(tmp_path / "error"),
        PMI_RANK="0",
    )
    assert ended.returncode == 0, ended.stderr
    # Where the user has made warnings errors, it is a line.
    assert set(ended.stderr.splitlines()) == {"smddp: the backend could not be registered: seeded"}


@pytest.mark.costly
@pytest.mark.parametrize("lost", ["_version.py", "_registration.py", "launch", "torch"])
def test_import_torch_survives_a_part_that_is_missing(lost: str, tmp_path: Path) -> None:
    path = install(tmp_path)
    (tmp_path / "smddp" / lost).unlink()
    ended = run(
        """
        import sys

        # A development install would complete what is missing.
        sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in repr(each)]
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import torch
        print(*(one.message for one in caught))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
        PYTHONPATH=path,
    )
    assert ended.returncode == 0, ended.stderr
    needed = lost in ("_registration.py", "launch")
    assert ("smddp: the backend could not be registered: No module named" in ended.stdout) is needed
