"""The one place where backend "smddp" is registered with torch.distributed.

`import torch` runs it wherever smddp is installed, so it imports little.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from smddp.launch.environment import instead_of, is_bare_rank, print_lines_at_once

__all__ = ["BACKEND_NAME", "can_wait", "leave_groups", "names_smddp", "register_backend"]

BACKEND_NAME = "smddp"


def register_backend(create: Callable[[Any, Any], Any]) -> None:
    """Registers "smddp" for CPU tensors, and for those on GPUs where there are any.

    It does nothing if the backend is registered.

    With SMDDP_INSTEAD_OF, groups of other backends become groups of this one, too.

    Args:
        create: creates one rank of a group, from its options and those of the script.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    # `_torch_internals` would take a while to import; see what it says about this name.
    if BACKEND_NAME.upper() in getattr(dist.Backend, "_plugins", ()):
        return
    # Code that asks for the devices of a group would choose cuda for its tensors.
    devices = ["cpu", "cuda"] if _may_have_gpu() else ["cpu"]
    dist.Backend.register_backend(BACKEND_NAME, create, extended_api=True, devices=devices)
    # Here, so that functions which the script registers run before it, and may still communicate.
    atexit.register(leave_groups)
    print_lines_at_once()
    if "SMDDPRUN" in os.environ and "TORCHELASTIC_ERROR_FILE" in os.environ:
        # The programs that a rank starts inherit both. Their errors are not those of the rank.
        first = os.environ.setdefault("SMDDPRUN_RANK", str(os.getpid()))
        if first == str(os.getpid()):
            _record_errors()
    global _replaced
    _replaced = replaced = os.environ.get("SMDDP_INSTEAD_OF", "")
    if is_bare_rank() or replaced:
        _change_init_process_group(dist, replaced)


def can_wait() -> bool:
    """Returns whether the backend need not be registered before a script names it.

    From 2.14 on torch calls the entry point `register` then, also where it loads no backend when it
    is imported. But a rank of mpirun, srun or smddprun, and SMDDP_INSTEAD_OF, need more than that.
    """
    from importlib.metadata import PackageNotFoundError, version

    if is_bare_rank() or any(map(os.environ.get, ("SMDDPRUN", "SMDDP_INSTEAD_OF"))):
        return False
    try:
        release = version("torch").split(".")
    except PackageNotFoundError:
        return True
    return [int(number) for number in release[:2]] >= [2, 14]


# SMDDP_INSTEAD_OF when torch was imported.
_replaced = ""


def _may_have_gpu() -> bool:
    """Returns whether torch may find a GPU. To ask torch would load the driver's libraries.

    A container without GPUs has none of the device files; a torch for CPUs is built without CUDA.
    """
    import torch

    if torch.version.hip is not None:
        return os.path.exists("/dev/kfd")
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    # /dev/dxg: in the Linux of Windows.
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")))


def leave_groups() -> None:
    """Leaves what groups this process has; when the interpreter ends, `import torch` sees to it."""
    late = os.environ.get("SMDDP_INSTEAD_OF", "")
    if late and late != _replaced and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"smddp: SMDDP_INSTEAD_OF={late} was set after `import torch`, and had no effect: set "
            "it before, for instance where the job is started\n"
        )
    backend = sys.modules.get("smddp.torch.backend")
    if backend is not None:
        backend.leave_at_exit()


def _record_errors() -> None:
    """Lets the report of torchrun, which `smddprun` runs, have the error that ends this rank.

    torchrun reads it from a file. Only scripts that decorate a function with torch's `record` write
    it themselves.
    """
    original = sys.excepthook
    rank = os.getpid()

    def record(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        original(kind, error, trace)
        if os.getpid() != rank:  # a child that was forked
            return
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error.with_traceback(trace)  # `record_exception` reads the current exception
        except BaseException as raised:
            try:
                get_error_handler().record_exception(raised)
            except OSError:
                # A full disk. torchrun would fail at the half of a file.
                with contextlib.suppress(OSError):
                    os.unlink(os.environ["TORCHELASTIC_ERROR_FILE"])

    sys.excepthook = record


def _change_init_process_group(dist: Any, replaced: str) -> None:
    """Makes `init_process_group` find ranks of mpirun or srun, and replace other backends.

    The function reads torch's variables before it creates the group, and has no hook before that:
    so it is replaced, in processes where it would miss a variable. With another backend it does
    what it did.

    Args:
        dist: torch.distributed.
        replaced: SMDDP_INSTEAD_OF.
    """
    from smddp._torch_internals import INIT_PROCESS_GROUP

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            asked = None
            if replaced:
                _change_groups(dist, replaced)
            with contextlib.suppress(TypeError):  # of wrong arguments; torch says so itself
                bound = inspect.signature(original).bind(*args, **kwargs)
                given = bound.arguments
                backend = _replacement(dist, given.get("backend"), replaced)
                if backend is not None:
                    _announce(given.get("backend"), given.get("rank", -1))
                    asked = "undefined" if given.get("backend") is None else str(given["backend"])
                    given |= {"backend": backend, "pg_options": None}
                    args, kwargs = bound.args, bound.kwargs
                if names_smddp(given.get("backend")) and _reads_environment(given):
                    from smddp.launch.rendezvous import prepare_rendezvous

                    prepare_rendezvous(given.get("rank", -1), given.get("world_size", -1))
            result = original(*args, **kwargs)
            if asked is not None:
                _answer_as_asked(dist, dist.group.WORLD, asked)
            return result

        return init_process_group

    INIT_PROCESS_GROUP.install(make)


def _change_groups(dist: Any, replaced: str) -> None:
    """Makes the function through which torch creates every group replace other backends."""
    from smddp._torch_internals import NEW_GROUP

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **kwargs)
            asked = bound.arguments["backend"]
            backend = _replacement(dist, asked, replaced)
            if backend is None:
                return original(*args, **kwargs)
            if not _announced:  # beside a group with another backend, such as nccl
                _announce(asked, -1)
            bound.arguments |= {"backend": dist.Backend(backend), "backend_options": None}
            group, store = original(*bound.args, **bound.kwargs)
            _answer_as_asked(dist, group, "undefined" if asked is None else str(asked))
            return group, store

        return create

    NEW_GROUP.install(make)


def _answer_as_asked(dist: Any, group: Any, asked: str) -> None:
    """Makes `get_backend` and `get_backend_config` answer what the script has asked for.

    Frameworks do not train in parallel with backends whose names they do not know.

    Args:
        dist: torch.distributed.
        group: that has smddp instead.
        asked: the backend that the script has named, or "undefined".
    """
    from smddp._torch_internals import world

    c10d = dist.distributed_c10d
    known = world(c10d)
    if group not in known.pg_map:  # this rank is not in the group
        return
    name = dist.Backend(asked)
    known.pg_map[group] = (name, known.pg_map[group][1])
    known.pg_backend_config[group] = str(c10d.BackendConfig(name))


def _replacement(dist: Any, backend: Any, replaced: str) -> str | None:
    """Returns what a group gets for a backend, if that is replaced on the CPU.

    On a machine with an accelerator its tensors keep the backend that they have without smddp.

    Raises:
        ValueError: the setting is wrong.
    """
    names = instead_of(replaced)
    asked = "undefined" if backend is None else str(backend).lower()
    # Without a name, torch takes the default of each device.
    devices = {"cpu": "gloo"} | dist.Backend.default_device_backend_map
    if asked == "undefined":
        on_devices = devices
    elif ":" in asked:
        pairs = (part.partition(":") for part in asked.split(","))
        on_devices = {device.strip(): name.strip() for device, _, name in pairs}
    else:
        on_devices = dict.fromkeys(devices, asked)
    if on_devices.get("cpu") not in names:
        return None
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name = None if accelerator is None else on_devices.get(accelerator.type)
    if accelerator is None or name in (None, "mpi"):  # hardly any torch has mpi
        return BACKEND_NAME
    return f"cpu:{BACKEND_NAME},{accelerator.type}:{name}"


# Whether the script has been told that it gets another backend.
_announced = False


def _announce(backend: Any, rank: int) -> None:
    global _announced
    _announced = True
    if (str(rank) if rank >= 0 else os.environ.get("RANK", "0")) == "0":
        asked = "the default backend" if backend is None else f"backend {backend}"
        sys.stderr.write(f"smddp: this job asks for {asked}, and gets smddp on the CPU\n")


def _reads_environment(given: Mapping[str, Any]) -> bool:
    """Returns whether `init_process_group` reads the place of rank 0 in the environment."""
    return given.get("store") is None and given.get("init_method") in (None, "env://")


def names_smddp(backend: Any) -> bool:
    """Returns whether a text such as "smddp" or "cpu:smddp,cuda:nccl" names this backend."""
    parts = str(backend).lower().split(",")
    return any(part.rpartition(":")[2].strip() == BACKEND_NAME for part in parts)
