"""What `estimate` needs to know of the model, the optimizers and the configuration in force."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.torch.common.example import Example
from smddp.modelparallel.torch.common.structure import tensors_in
from smddp.modelparallel.torch.footprint.estimate import Choices, Facts, Parameter
from smddp.modelparallel.torch.footprint.profile import Profile, profile_model
from smddp.modelparallel.torch.job.state import State
from smddp.modelparallel.torch.model.runtime import ModelRuntime
from smddp.modelparallel.torch.optimizer.half import HALF
from smddp.modelparallel.torch.pipeline.remote_tensor import RemoteTensor
from smddp.modelparallel.torch.sharding.rules import is_divisible

__all__ = ["choices_of", "facts_of", "profile_of"]


def choices_of(state: State, runtime: ModelRuntime) -> Choices:
    """Returns what the script has chosen."""
    cfg, topology = state.cfg, state.topology
    simple = cfg.pipeline == "simple"
    return Choices(
        owners=list(runtime.executor.modules.owners),
        partitions=topology.pp_size,
        replicas=topology.size_of("dp"),
        microbatches=cfg.microbatches,
        active=cfg.active_microbatches,
        simple=simple,
        shard_optimizer_state=cfg.shard_optimizer_state,
        offload=cfg.offload_activations,
        degree=cfg.sharded_data_parallel_degree,
        threshold=cfg.sdp_param_persistence_threshold,
        limit=cfg.sdp_max_live_parameters,
        bucket=cfg.sdp_reduce_bucket_size,
        horizon=cfg.activation_loading_horizon,
        half=runtime.half is not None,
        views=runtime.data_parallel.buckets.views,
        checkpoints=tuple(runtime.checkpoints.regions()) if runtime.divided else (),
        tensor=topology.tp_size,
        prescaled=cfg.prescaled_batch,
    )


def facts_of(
    state: State, runtime: ModelRuntime, profile: Profile | None
) -> tuple[Facts, list[str]]:
    """Returns the facts, and notes about what is not known.

    Args:
        state: of the process.
        runtime: of the model.
        profile: of a microbatch, if there is one.
    """
    notes = []
    modules = runtime.executor.modules.by_number
    numbers: dict[int, int] = {}
    parameters: list[nn.Parameter] = []
    owner: list[int] = []
    own: list[list[int]] = []
    for number, module in enumerate(modules):
        mine = [p for p in module._parameters.values() if p is not None]
        for parameter in mine:
            if id(parameter) not in numbers:
                numbers[id(parameter)] = len(parameters)
                parameters.append(parameter)
                owner.append(number)
        own.append(list(dict.fromkeys(numbers[id(p)] for p in mine)))
    optimizers = state.current_optimizers()
    states: dict[int, tuple[int, int]] = {}
    copies = 0.0
    for optimizer in optimizers:
        known = _states(optimizer, runtime.half is not None)
        if known is None:
            notes.append(
                f"what {type(optimizer).__name__} keeps is not known before its first step"
            )
        states.update(known or _nothing(optimizer))
        copies = max(copies, _copies(optimizer))
    if not optimizers:
        notes.append("there is no smp.DistributedOptimizer yet, so nothing is counted for it")
    found = []
    for parameter, first in zip(parameters, owner, strict=True):
        half = parameter.dtype in HALF and runtime.half is not None
        gradient = torch.float32 if state.cfg._fp32_grad_accumulation and half else parameter.dtype
        found.append(
            Parameter(
                module=first,
                numel=parameter.numel(),
                size=parameter.dtype.itemsize,
                gradient=gradient.itemsize,
                main=4 if half and id(parameter) in states else 0,
                state=states.get(id(parameter), (0, 0))[0],
                scalars=states.get(id(parameter), (0, 0))[1],
                trains=parameter.requires_grad,
                stepped=id(parameter) in states,
                divisible=is_divisible(parameter),
                split=runtime.data_parallel.holders.is_divided(parameter),
            )
        )
    return Facts(found, own, _buffers(modules), copies, profile), notes


def _buffers(modules: list[nn.Module]) -> list[int]:
    seen: set[int] = set()
    sizes = []
    for module in modules:
        size = 0
        for buffer in dict.values(module._buffers):
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                size += buffer.numel() * buffer.dtype.itemsize
        sizes.append(size)
    return sizes


def _nothing(optimizer: Any) -> dict[int, tuple[int, int]]:
    """Returns no bytes for each parameter that an optimizer steps."""
    original = optimizer._smp_state.original
    return {id(original(p)): (0, 0) for group in optimizer.param_groups for p in group["params"]}


def _states(optimizer: Any, half: bool) -> dict[int, tuple[int, int]] | None:
    """Returns the bytes that an optimizer keeps for each whole parameter, by id.

    The first number is that of tensors of the parameter's shape, the second that of all others.

    A copy of the optimizer makes a step on tensors without memory. If it cannot, what it keeps
    already counts.

    Returns:
        None if that is not known.
    """
    original = optimizer._smp_state.original
    kind = type(optimizer)
    if not kind.__module__.startswith(("torch.optim", "smddp.")):
        return _present(optimizer)
    copied = object.__new__(kind)
    copied.__dict__.update(vars(optimizer))
    # Leaves out what smp and schedules have put in the place of methods, and hooks of the script.
    for name in [name for name in copied.__dict__ if hasattr(kind, name) or name == "_smp_state"]:
        del copied.__dict__[name]
    for name in [name for name in copied.__dict__ if name.endswith("_hooks")]:
        copied.__dict__[name] = collections.OrderedDict()
    copied.state = collections.defaultdict(dict)
    copied.param_groups, shapes = [], {}
    for group in optimizer.param_groups:
        with_shapes = []
        for parameter in group["params"]:
            whole = original(parameter)
            dtype = torch.float32 if half and whole.dtype in HALF else whole.dtype
            shape = nn.Parameter(
                torch.empty(whole.shape, dtype=dtype, device="meta"),
                requires_grad=whole.requires_grad,
            )
            if whole.requires_grad:
                shape.grad = torch.empty_like(shape)
            shapes[id(whole)] = shape
            with_shapes.append(shape)
        off = {name: False for name in ("fused", "foreach", "capturable") if name in group}
        copied.param_groups.append({**group, **off, "params": with_shapes})
    try:
        copied.step()
    except Exception:
        return _present(optimizer)
    return {key: _sizes(copied.state.get(shape, {}), shape) for key, shape in shapes.items()}


def _sizes(own: Any, parameter: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes of the tensors of a parameter's size, and of all others."""
    tensors = tensors_in(own)
    alike = [tensor for tensor in tensors if tensor.numel() == parameter.numel()]
    large = sum(tensor.nbytes for tensor in alike)
    return large, sum(tensor.nbytes for tensor in tensors) - large


def _present(optimizer: Any) -> dict[int, tuple[int, int]] | None:
    """Returns what an optimizer keeps, from what it has for the parameters of this rank."""
    original = optimizer._smp_state.original
    bytes_of, elements = 0, 0
    for parameter, own in optimizer.state.items():
        bytes_of += sum(tensor.nbytes for tensor in tensors_in(own))
        elements += parameter.numel()
    if not elements:
        return None
    return {
        id(original(p)): (original(p).numel() * bytes_of // elements, 0)
        for group in optimizer.param_groups
        for p in group["params"]
    }


def _copies(optimizer: Any) -> float:
    """Returns how many copies of all that it steps an optimizer makes at once."""
    groups = optimizer.param_groups
    if not any("foreach" in group for group in groups):
        return 0.0
    on_device = any(
        p.device.type not in ("cpu", "meta") for group in groups for p in group["params"]
    )
    many = [
        group.get("foreach") or (group.get("foreach") is None and on_device)
        for group in groups
        if not group.get("fused")
    ]
    return 1.0 if any(many) else 0.0


# By model: an example and the modes of the modules, and what `profile_of` has returned for them.
_known: weakref.WeakKeyDictionary[ModelRuntime, tuple[Example, bytes, tuple[Profile | None, str]]]
_known = weakref.WeakKeyDictionary()


def profile_of(runtime: ModelRuntime, example: Example) -> tuple[Profile | None, str]:
    """Returns the profile of a microbatch; and why there is none, if the model cannot run.

    The last one is kept, because it may take seconds.
    """
    modes = bytes(module.training for module in runtime.executor.modules.by_number)
    known = _known.get(runtime)
    if known is not None and known[0] is example and known[1] == modes:
        return known[2]
    found = _profile(runtime, example)
    _known[runtime] = example, modes, found
    return found


def _profile(runtime: ModelRuntime, example: Example) -> tuple[Profile | None, str]:
    if not example.complete:
        return None, (
            "activations are not predicted: the model's arguments have objects that are neither "
            "tensors, numbers nor texts"
        )
    sharding = runtime.sharding

    def by_shape(tensor: torch.Tensor) -> bool:
        sharded = sharding is not None and sharding.entry(tensor) is not None
        return sharded or isinstance(tensor, RemoteTensor)

    try:
        root = runtime.executor.modules.by_number[0]
        return profile_model(root, by_shape, example, runtime.half), ""
    except Exception as error:
        return None, (
            "activations are not predicted: a call of the model with such arguments fails on "
            f"tensors without values ({type(error).__name__}: {error}). Are the arguments right?"
        )
