"""Imports in new interpreters: with and without torch's autoload, and with another torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import RELEASE, install, run, succeed


def test_import_by_the_original_name_registers_the_backend() -> None:
    succeed(
        """
        import os

        from smdistributed.dataparallel import exceptions

        # Launchers import this in a process that is no rank, and pass on its environment.
        assert "SMDATAPARALLEL_LOCAL_RANK" not in os.environ

        import torch.distributed as dist
        import smdistributed.dataparallel.torch.torch_smddp
        import smdistributed.dataparallel.torch.torch_smddp as again
        import smddp
        from smddp._autoload import autoload, register

        autoload()
        register()  # any number of times
        assert dist.Backend.SMDDP == "smddp"
        assert dist.is_backend_available("smddp")
        assert os.environ["SMDATAPARALLEL_LOCAL_RANK"] == "3"

        for name in exceptions.__all__:
            assert name.startswith("SMDDP"), name
            error = getattr(exceptions, name)
            assert issubclass(error, dist.DistBackendError), name
            assert error is getattr(smddp, name.removeprefix("SMDDP")), name
            assert error.__qualname__ == name, "what a stack trace says"
        assert {name for name in dir(exceptions) if not name.startswith("__")} == (
            set(exceptions.__all__)
        )
        """,
        LOCAL_RANK="3",
    )


def test_import_smddp_is_enough_for_a_job_of_one() -> None:
    succeed(
        """
        import os
        import tempfile

        import torch
        import torch.distributed as dist

        before = dict(os.environ)
        import smddp

        assert os.environ == before
        # Importing starts no thread and loads nothing compiled: fork is still safe.
        assert len(os.listdir("/proc/self/task")) == 1
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "smddp", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
            assert dist.get_backend() == "smddp"
            assert os.environ["SMDATAPARALLEL_LOCAL_RANK"] == "0"
            assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.sum() == 3
            dist.destroy_process_group()
        """,
        OMP_NUM_THREADS="1",
    )


def test_settings_of_the_user_stay() -> None:
    succeed(
        """
        import os
        import torch.distributed as dist
        import smdistributed.dataparallel.torch.torch_smddp

        dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        assert os.environ["DDP_DISABLE_COMM_MEM"] == "1"
        assert os.environ["SMDATAPARALLEL_LOCAL_RANK"] == "5"
        """,
        DDP_DISABLE_COMM_MEM="1",
        SMDATAPARALLEL_LOCAL_RANK="5",
        LOCAL_RANK="3",
    )


def test_another_torch_is_refused_in_one_sentence() -> None:
    ended = run(
        """
        import torch

        torch.__version__ = "9.8.7+cpu"
        import smddp

        print(smddp.__version__, len(dir(smddp)), getattr(smddp, "absent", 0))
        smddp.describe
        """
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: smddp was built for torch ")
    assert (
        "cannot be used with torch 9.8: install such a torch, or build smddp for torch 9.8" in last
    )


def test_autoload_never_breaks_import_torch() -> None:
    ended = run(
        """
        import warnings

        import torch.distributed as dist

        def broken(*arguments, **options):
            raise RuntimeError("no such thing")

        dist.Backend.register_backend = broken
        import smddp._autoload

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            smddp._autoload.autoload()
        assert "could not be registered: no such thing" in str(caught[0].message)
        """
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("built_for", "text"),
    [
        ("1.0", "smddp was built for torch 1.0 and cannot"),
        (None, "has no compiled part, as in sources"),
    ],
)
def test_import_torch_survives_an_smddp_that_does_not_fit(
    built_for: str | None, text: str, tmp_path: Path
) -> None:
    script = f"""
        import sys

        # A development install would complete what is missing.
        sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in repr(each)]
        import torch.distributed as dist  # silently

        store = dist.HashStore()
        for wanted in (
            lambda: dist.init_process_group("smddp", store=store, rank=0, world_size=1),
            lambda: __import__("smddp").describe,
        ):
            try:
                wanted()
            except ImportError as error:
                assert {text!r} in str(error)
            else:
                raise AssertionError("nothing was raised")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    """
    succeed(script, TORCH_DEVICE_BACKEND_AUTOLOAD="1", PYTHONPATH=install(tmp_path, built_for))


def test_import_torch_makes_the_backend_known(tmp_path: Path) -> None:
    path = install(tmp_path)
    script = f"""
        import torch.distributed as dist

        assert dist.Backend.SMDDP == "smddp"
        for name in ("smddp", "cpu:smddp,cuda:gloo"):
            dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
        import smddp, smddp.torch._load
        facts = smddp.torch._load.load().build_info()
        assert facts["torch"].startswith({RELEASE!r} + ".")
        assert smddp.__version__ == facts["version"]
    """
    # torch 2.11 warns when a group with two backends ends, with gloo as well.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    succeed(script, TORCH_DEVICE_BACKEND_AUTOLOAD="1", PYTHONPATH=path, **quiet)


def test_a_single_node_never_loads_libfabric() -> None:
    succeed(
        """
        import smddp, torch
        import torch.distributed as dist

        dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        with open("/proc/self/maps") as maps:
            text = maps.read()
        assert "_C_torch" in text  # the compiled module is there, what it may need later is not
        assert "libfabric" not in text
        dist.destroy_process_group()
        """
    )


def test_a_libfabric_that_cannot_be_loaded_is_named(tmp_path) -> None:
    (tmp_path / "libfabric.so.1").write_text("no library")
    succeed(
        """
        import smddp
        from smddp.torch import _load

        why = _load.load().build_info()["no_libfabric"]
        if "built without libfabric" not in why:
            assert "libfabric cannot be loaded: " in why
            assert "libfabric.so.1" in why
            assert "SMDDP_PROVIDER=sockets" in why
        """,
        LD_LIBRARY_PATH=str(tmp_path),
    )


def test_what_is_asked_for_is_what_torch_answers() -> None:
    """Frameworks train alone, or raise, where a backend has a name that they do not know."""
    ended = run(
        """
        import smddp
        import torch
        import torch.distributed as dist

        def serves(group):
            return group._get_backend(torch.device("cpu")).name()

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        part, other = dist.new_group([0]), dist.new_group([0], backend="gloo")
        for group in (dist.group.WORLD, part, other):
            assert dist.get_backend(group) == "gloo"
            assert "cpu:gloo" in dist.get_backend_config(group)
            assert serves(group) == "smddp"
        assert serves(dist.split_group(split_ranks=[[0]])) == "smddp"
        dist.monitored_barrier()
        dist.destroy_process_group()
        """,
        SMDDP_INSTEAD_OF="gloo",
    )
    assert ended.returncode == 0, ended.stderr


def test_a_setting_that_comes_too_late_is_not_passed_over_in_silence() -> None:
    ended = run(
        """
        import os
        import torch
        import smddp

        os.environ["SMDDP_INSTEAD_OF"] = "gloo"
        """
    )
    assert ended.returncode == 0
    assert "SMDDP_INSTEAD_OF=gloo was set after `import torch`, and had no effect" in ended.stderr


def test_the_backend_is_not_for_gpus_where_there_are_none() -> None:
    ended = run(
        """
        import os
        import torch
        import torch.distributed as dist

        torch.version.cuda, torch.version.hip = "13.0", None
        from smddp._registration import _may_have_gpu
        exists = os.path.exists
        os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
        assert _may_have_gpu()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        assert not _may_have_gpu()
        del os.environ["CUDA_VISIBLE_DEVICES"]
        torch.version.cuda = None
        assert not _may_have_gpu()
        if not torch.cuda.is_available():
            dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
            assert dist.group.WORLD._device_types == [torch.device("cpu")]
        """
    )
    assert ended.returncode == 0, ended.stderr


def test_a_framework_that_would_train_alone_is_named() -> None:
    ended = run(
        """
        import sys
        import types
        import torch.distributed as dist

        sys.modules["ignite"] = types.ModuleType("ignite")
        dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
        """
    )
    assert "with ignite, idist.auto_model() does not make a model data-parallel" in ended.stderr
    assert "set SMDDP_INSTEAD_OF=gloo" in ended.stderr


def test_the_version() -> None:
    import torch

    import smddp

    for module in ("smddp", "smddp.tools.cli"):
        ended = run(
            f"""
            import runpy
            import sys

            sys.argv[1:] = ["--version"]
            runpy.run_module({module!r}, run_name="__main__")
            """
        )
        release = torch.__version__.partition("+")[0]
        assert ended.stdout == f"smddp {smddp.__version__}, torch {release}\n", ended.stderr


def test_a_clone_beside_a_script_does_not_hide_the_package(tmp_path: Path) -> None:
    """A folder without __init__.py is a package, too, unless sys.path has a better one."""
    (tmp_path / "smddp" / "docs").mkdir(parents=True)
    script = tmp_path / "train.py"
    script.write_text("import smddp\nprint(smddp.__version__)\n")
    variables = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
