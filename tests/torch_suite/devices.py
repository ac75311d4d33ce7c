"""Runs GPU tests with CPU tensors: replaces functions of torch.cuda by ones for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Number of devices that torch.cuda reports; 0: nothing is replaced.
count = 0

_STREAMS = [
    (torch, "Stream"),
    (torch, "Event"),
    (torch.cuda, "Stream"),
    (torch.cuda, "stream"),
    (torch.cuda, "Event"),
    (torch.cuda, "current_stream"),
    (torch.accelerator, "current_stream"),
]


def map_to_cpu() -> None:
    """Replaces the functions by which tests choose a device, until the process ends."""
    torch.Tensor.cuda = _tensor_on_cpu
    torch.nn.Module.cuda = _module_on_cpu
    for name in ("set_device", "synchronize", "manual_seed", "empty_cache"):
        # A separate function for each, because torch.compile distinguishes them.
        setattr(torch.cuda, name, lambda *_args, **_options: None)
    torch.cuda.device_count = torch.accelerator.device_count = lambda: count
    torch.cuda.current_device = lambda: 0
    for module, name in _STREAMS:
        # A separate class for each, too.
        setattr(module, name, type(name, (_Idle,), {}))
    _wrap_ddp()
    _wrap_new_group()
    _Mapped().__enter__()


def _tensor_on_cpu(tensor: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
    # Return a copy, because tests compare it with the original tensor.
    return tensor.clone()


def _module_on_cpu(module: torch.nn.Module, *_args: Any) -> torch.nn.Module:
    return module


class _Idle:
    """A stream or an event on the CPU, which has always finished."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_options: None


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class _Mapped(TorchFunctionMode):
    """Makes every `device="cuda:1"` and `.to("cuda")` mean the CPU."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), options: Any = None
    ) -> Any:
        options = dict(options or {})
        if _is_device(options.get("device")) or isinstance(options.get("device"), int):
            options["device"] = "cpu"
        if function is torch.Tensor.to and len(args) > 1:
            moves = _is_device(args[1]) or isinstance(args[1], int)
            args = (args[0], "cpu" if moves else args[1], *args[2:])
        return function(*args, **options)


def _wrap_ddp() -> None:
    """Drops DDP's device ids, which a model on the CPU cannot have."""
    original = torch.nn.parallel.DistributedDataParallel.__init__

    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kw: Any
    ) -> None:
        original(self, module, **kw)

    torch.nn.parallel.DistributedDataParallel.__init__ = init


def _wrap_new_group() -> None:
    """Creates groups with smddp where tests ask for NCCL."""
    original = torch.distributed.new_group

    def new_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return original(*args, backend="smddp" if backend == "nccl" else backend, **options)

    torch.distributed.new_group = new_group
