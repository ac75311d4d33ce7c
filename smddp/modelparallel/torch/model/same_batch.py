"""What the ranks of a tensor-parallel group compare before each step, and each call outside steps.

Their divided modules exchange activations. So the batches have to be of one form; with
`prescaled_batch` they have to be the same one, and so has the random seed: each rank computes a
part of every layer, and they add up the parts. Otherwise results would be wrong without an error:
a batch of two texts of eight tokens has the size of one of four texts of four.

They also compare what decides which exchanges there are, and in which dtype: autocast, whether
gradients are on, and which parameters and arguments need them; and which modules train: a rank that
evaluates has no dropout.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from smddp.modelparallel.core.errors import SMPUsageError
from smddp.modelparallel.torch.common import device
from smddp.modelparallel.torch.common.structure import Structure, constants
from smddp.modelparallel.torch.job.collectives import Collectives
from smddp.modelparallel.torch.job.meeting import first_difference
from smddp.modelparallel.torch.job.state import state
from smddp.modelparallel.torch.pipeline.protocol import ambient

__all__ = ["compare_settings", "seed_of_batch"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# Sums of tensors are made of so many elements at a time.
_PIECE = 1 << 20

_Argument = tuple[str, Structure, list[Tensor]]


def seed_of_batch(seed: int, batch: Callable[[], Iterable[_Argument]]) -> int:
    """Returns the seed of a step: ranks that have the same batch leave out the same in dropout.

    Args:
        seed: that this rank has drawn.
        batch: returns name, structure and tensors of each argument.

    Raises:
        SMPUsageError: the batches of the ranks have different forms, or `prescaled_batch` is set,
            and they are different; or autocast is, or other parameters are frozen, or other modules
            train.
        SMPPeerError: the step has failed on another rank of the group.
    """
    size, exchange = state.topology.tp_size, state.groups.exchange
    if size == 1:
        return seed
    prescaled, here = state.cfg.prescaled_batch, device.current()
    arguments = list(batch())
    forms = json.dumps([(name, _form(value, found)) for name, value, found in arguments]).encode()
    own = torch.tensor([seed, zlib.crc32(forms), len(forms), 0, _settings()], device=here)
    if prescaled:
        own[3] = _digest((tensor for *_, tensors in arguments for tensor in tensors), here)
    everybody = own.new_empty(size, len(own))
    exchange.make("all_gather", everybody.view(-1), own)
    seeds, _, lengths, *_ = columns = everybody.T.tolist()
    if len(set(columns[4])) > 1:
        raise _other_settings(exchange, here)
    why = ""
    if len(set(columns[1])) > 1:
        why = _difference(_texts(exchange, forms, max(lengths), here), exchange.ranks)
    if prescaled:
        for rank, *found in zip(exchange.ranks, columns[1], columns[3], strict=True):
            if found != [columns[1][0], columns[3][0]]:
                raise SMPUsageError(
                    "with prescaled_batch, all ranks of a tensor-parallel group need the same "
                    f"batch, and rank {rank} of the job has another one than rank "
                    f"{exchange.ranks[0]}: choose it by smp.rdp_rank() of smp.rdp_size(){why}"
                )
        return int(seeds[0])
    if why:
        raise SMPUsageError(
            "all ranks of a tensor-parallel group need batches of one form, because they exchange "
            f"activations: pad them to one shape, or leave the last one out{why}"
        )
    return seed


def compare_settings() -> None:
    """Compares what `seed_of_batch` compares without a batch, on ranks that have none.

    Raises:
        SMPUsageError, SMPPeerError: see `seed_of_batch`.
    """
    size, exchange = state.topology.tp_size, state.groups.exchange
    if size == 1:
        return
    own = torch.tensor([_settings()], device=device.current())
    everybody = own.new_empty(size)
    exchange.make("all_gather", everybody, own)
    if len(set(everybody.tolist())) > 1:
        raise _other_settings(exchange, own.device)


def _settings() -> int:
    """Returns a checksum of the settings."""
    model, around = state.current_model(), ambient()
    flags = bytes(parameter.requires_grad for parameter in model.parameters())
    flags += bytes(module.training for module in model.modules())
    return zlib.crc32(flags, zlib.crc32(repr((around.grad, around.autocast)).encode()))


def _other_settings(exchange: Collectives, here: torch.device) -> SMPUsageError:
    """Returns an error that names a setting that is not the same on all ranks of the group."""
    autocast = ", ".join(
        f"{str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in ambient().autocast
    )
    module = state.current_model().get_module()
    own = {"torch.autocast": autocast or "off", "torch.is_grad_enabled()": str(ambient().grad)}
    for name, parameter in module.named_parameters():
        own[f"{name}.requires_grad"] = repr(parameter.requires_grad)
    for name, part in module.named_modules():
        own[f"{name}.training".removeprefix(".")] = repr(part.training)
    text = json.dumps(own).encode()
    lengths = torch.tensor([len(text)], device=here)
    exchange.make("maximum", lengths, lengths)
    found = first_difference(_texts(exchange, text, int(lengths), here), exchange.ranks)
    return SMPUsageError(
        "all ranks of a tensor-parallel group need the same settings, because they exchange "
        f"activations and gradients: {found or 'their parameters have different names'}"
    )


def _texts(exchange: Collectives, text: bytes, length: int, here: torch.device) -> list[Any]:
    """Returns what each rank gives, as JSON of at most `length` bytes."""
    own = torch.tensor(list(text.ljust(length)), dtype=torch.uint8, device=here)
    everybody = own.new_empty(len(exchange.ranks), length)
    exchange.make("all_gather", everybody.view(-1), own)
    return [json.loads(bytes(row)) for row in everybody.tolist()]


def _difference(of_ranks: list[list[tuple[str, str]]], ranks: list[int]) -> str:
    """Names an argument whose form is not the same on all ranks."""
    found = first_difference([dict(forms) for forms in of_ranks], ranks)
    if found is None:
        return ". They have them in another order"
    return (
        f". Argument {found.name!r} is {found.first} on rank {found.ranks[0]}, and {found.other} "
        f"on rank {found.ranks[1]}"
    )


def _form(structure: Structure, tensors: list[Tensor]) -> str:
    """Describes tensors, and where there is None; other values may differ."""
    if structure[0] == "t":
        tensor = tensors[structure[1]]
        text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return f"{text} that needs a gradient" if tensor.requires_grad else text
    if structure[:2] == ("c", None):
        return "None"
    if structure[0] in "co" or (not tensors and None not in constants(structure)):
        return "a value"
    parts = [_form(child, tensors) for child in structure[-1]]
    if structure[0] in "da":
        parts = [f"{key!r}: {part}" for key, part in zip(structure[2], parts, strict=True)]
    return f"[{', '.join(parts)}]"


def _digest(tensors: Iterable[Tensor], here: torch.device) -> Tensor:
    """Returns a number that is another one, most likely, for other values.

    The arithmetic is that of integers modulo 2^64, so the order of additions does not matter. Each
    element counts with its place.
    """
    total = torch.zeros((), dtype=torch.int64, device=here)
    for tensor in tensors:
        total = total * 1_000_003
        if tensor.layout == torch.strided and tensor.numel():
            kind = _INTEGERS.get(tensor.dtype.itemsize, torch.int64)
            place = 1
            elements = tensor.detach().contiguous().view(-1).view(kind)
            for bits in torch.split(elements, _PIECE):
                places = torch.arange(place, place + len(bits), device=bits.device)
                total = total + (bits * places).sum().to(here)
                place += len(bits)
    return total
