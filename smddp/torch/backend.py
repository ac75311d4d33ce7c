"""Creates groups of backend "smddp" for torch.distributed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smddp._registration import BACKEND_NAME
from smddp._torch_internals import (
    BackendOptions,
    backend_of_group,
    call_when_cuda_starts,
    set_timeout,
)
from smddp.launch.environment import complete_environment
from smddp.torch._callbacks import keep_order_of_callbacks
from smddp.torch._split import check_lists_of_split_group

if TYPE_CHECKING:
    from smddp.torch._C import ProcessGroup

__all__ = ["GroupOptions", "backend_of", "create_process_group"]


def backend_of(group: dist.ProcessGroup, kind: str) -> Any:
    """Returns the backend of a group for a kind of device, such as "cpu".

    With `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch wraps each backend; this is the one inside.

    Raises:
        RuntimeError: the group has none for that kind.
    """
    backend = backend_of_group(group)(torch.device(kind))
    return getattr(backend, "wrapped_pg", backend)


@dataclasses.dataclass(frozen=True)
class GroupOptions:
    """Options of one group: `new_group(pg_options=GroupOptions(...))`.

    All ranks of the group have to pass the same options.

    Raises:
        TypeError: `algorithm` or `wire` is not text.

    Example:
        >>> group = dist.new_group(pg_options=smddp.GroupOptions(algorithm="allreduce=ring"))
        >>> print(smddp.describe(group))
        group ...; algorithms by the group's allreduce=ring, then the built-in table
    """

    algorithm: str = ""
    """Replaces the setting SMDDP_ALGORITHM for this group, for example "allreduce=ring".

    The empty text leaves the setting in force.
    """

    wire: str = ""
    """Replaces the setting SMDDP_WIRE for this group; one of "fp32", "bf16", "int8" and "auto".

    With "+feedback" behind ("int8+feedback"): with error feedback.
    """

    def __post_init__(self) -> None:
        for name, example in (("algorithm", "allreduce=ring"), ("wire", "int8")):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(
                    f'smddp.GroupOptions: {name} is text such as "{example}", or "", but got '
                    f"{value!r}"
                )


def _shown_name(name: str) -> str:
    """Returns the name of a group for messages, logs and metrics.

    Where ranks make a group alone, torch's name is a hash of 40 digits. The first ten of them tell
    groups apart as well: what ranks exchange does not depend on the name.
    """
    return name[:10] if re.fullmatch("[0-9a-f]{40}", name) else name


def create_process_group(options: Any, group_options: Any) -> ProcessGroup:
    """Creates one rank of a group; c10d calls it in init_process_group() and new_group()."""
    global _user
    from smddp.torch import _load

    module = _load.load()
    store, rank, size = options.store, options.group_rank, options.group_size
    name = _shown_name(str(options.group_id))
    members = [int(member) for member in options.global_ranks_in_group or []]
    try:
        complete_environment(rank, size)
        _let_ddp_share_memory()
        _check_settings(module)
        _user = (os.getpid(), module)
        check_lists_of_split_group()
        keep_order_of_callbacks(module)
        _warn_of_frameworks()
        timeout = options.timeout
        if not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=float(timeout))
        own = _options_of(group_options)
        gpus = _gpu_support()
        waits_for_members = bool(getattr(options, "enable_reconfigure", False))
        if waits_for_members and gpus is not None:
            raise ValueError(
                f'enable_reconfigure=True: backend "{BACKEND_NAME}" changes the members of groups '
                "on the CPU only; hide the GPUs (CUDA_VISIBLE_DEVICES=)"
            )
        _pin_device()
    except BaseException as error:
        # The other ranks would wait for this one. They hear of what is raised further below.
        is_usage = isinstance(error, (ValueError, TypeError))
        is_signal = not isinstance(error, Exception)
        text = "it was interrupted by a signal" if is_signal else str(error)
        job_rank = members[rank] if rank < len(members) else rank
        module.report_trouble(store, name, rank, job_rank, is_usage, is_signal, text)
        raise
    arguments = (store, rank, size, timeout, name, own.algorithm, own.wire, members)
    if gpus is None:
        group: ProcessGroup = module.ProcessGroup(*arguments, waits_for_members)
        return group
    return module.GpuProcessGroup(*arguments, *gpus)  # type: ignore[no-any-return]


# By module: frameworks that train alone with a backend whose name they do not know.
_KNOW_NAMES_ONLY = {
    "ignite": "idist.auto_model() does not make a model data-parallel",
}


@functools.cache
def _warn_of_frameworks() -> None:
    """Warns of frameworks that would train each rank alone, without an error."""
    if os.environ.get("SMDDP_INSTEAD_OF") or os.environ.get("RANK", "0") != "0":
        return
    for module, what in _KNOW_NAMES_ONLY.items():
        if module in sys.modules:
            warnings.warn(
                f"smddp: with {module}, {what} if the backend is none that it knows by name: set "
                'SMDDP_INSTEAD_OF=gloo, and let the script name the backend "gloo"',
                stacklevel=2,
            )


def _let_ddp_share_memory() -> None:
    """Lets DDP allocate its gradient buckets in the process group's memory.

    DDP does so if this variable is 0, which it reads when a model is wrapped. A value that the user
    has set stays.
    """
    if os.environ.get("SMDDP_COMM_MEMORY", "1") not in ("0", "false", "off"):
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")


def _options_of(group_options: Any) -> GroupOptions:
    """Returns the pg_options of a group; the default if there are none.

    Raises:
        TypeError: pg_options are neither GroupOptions nor options of another backend.
    """
    if isinstance(group_options, GroupOptions):
        return group_options
    # A group may have another backend for other devices. Torch passes the same options to all of
    # them.
    if group_options is None or isinstance(group_options, BackendOptions):
        return GroupOptions()
    raise TypeError(
        f'pg_options of backend "{BACKEND_NAME}" are smddp.GroupOptions, for example '
        f'smddp.GroupOptions(wire="int8"), but got {group_options!r}'
    )


def _gpu_support() -> tuple[str, Any, Any, str] | None:
    """Returns what the compiled module needs to use GPUs and NCCL; None on machines without a GPU.

    The tuple holds the device type, a function that names a GPU, a function that makes a group of
    NCCL (None without NCCL) and the path of the CUDA part. This asks the driver's management
    library, so it does not initialise CUDA.
    """
    from smddp.torch import _load

    if torch.cuda.device_count() == 0:
        return None
    make_nccl = _nccl_group if dist.is_nccl_available() else None
    return "cuda", _gpu_name, make_nccl, _load.cuda_part()


@functools.cache
def _pin_device() -> None:
    """Makes the GPU with this rank's local number the current device, unless the script chose one.

    Scripts for SageMaker's library need not call torch.cuda.set_device(); if they do, that call
    comes later and wins. If the script has used CUDA before, its current device stays. This runs
    once per process, and takes effect when CUDA is first used.
    """
    local, count = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if not local.isdigit() or count < 2:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    index = int(local) % count
    # torch.manual_seed() defers its CUDA part in the same way.
    call_when_cuda_starts(lambda: torch.cuda.set_device(index))


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Creates this rank's part of an NCCL group; NCCL connects in the first call."""
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


@functools.cache
def _check_settings(module: Any) -> None:
    """Warns of SMDDP_ variables that are not settings.

    Only local rank 0 warns, because all ranks of a node usually have the same environment.

    Raises:
        ValueError: a value is wrong; the text has all that are.
    """
    names = [name for name in os.environ if name.startswith("SMDDP_")]
    if names and os.environ.get("LOCAL_RANK", "0") == "0":
        # Imported only here: difflib, which suggests a name, takes long to import.
        from smddp.torch._misspelt import misspelt

        for sentence in misspelt(os.environ, module.setting_names()):
            warnings.warn(f"smddp: {sentence}", stacklevel=2)
    module.settings()


_user: tuple[int, Any] | None = None  # the process that has made groups, and the module with them


def leave_at_exit() -> None:
    """Leaves all groups when the interpreter ends; smddp._registration calls it.

    So other ranks see that this rank left, even if the script did not call destroy_process_group().
    """
    # A forked child has this, too, but the groups belong to its parent.
    if _user is None or _user[0] != os.getpid():
        return
    module = _user[1]
    module.shutdown()
    have_ended = False
    try:
        with contextlib.suppress(KeyboardInterrupt):  # it ends the wait
            have_ended = module.finish_hooks()
    finally:
        if not have_ended:
            _end_hooks(module)


def _end_hooks(module: Any) -> None:
    """Ends what torch's tools still do after a failure.

    Threads that run Python code when the interpreter ends would take the process down with SIGABRT.
    """
    sys.stderr.write(
        "smddp: the process ends before torch has written its Flight Recorder's file with the "
        "stacks of the calls (SMDDP_DUMP_SECONDS)\n"
    )
    deadline = time.monotonic() + 2
    while not module.finish_hooks() and time.monotonic() < deadline:
        module.end_hooks()
        time.sleep(0.02)
