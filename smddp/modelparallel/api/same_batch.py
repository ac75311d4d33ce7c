"""With `prescaled_batch`, the ranks of a tensor-parallel group have the same batch and random seed.

If they had different ones, gradients would be wrong without an error: each rank computes a part of
every layer, and they add up the parts. So the ranks compare a sum of what they have in every step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from smddp.modelparallel.common import device
from smddp.modelparallel.job.state import state
from smddp_smp.errors import SMPUsageError

__all__ = ["seed_of_batch"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def seed_of_batch(seed: int, batch: Callable[[], Sequence[torch.Tensor]]) -> int:
    """Returns the seed of a step: ranks that have the same batch leave out the same in dropout.

    Args:
        seed: that this rank has drawn.
        batch: returns the tensors of the batch.

    Raises:
        SMPUsageError: `prescaled_batch` is set, and the ranks have different batches.
        SMPPeerError: the step has failed on another rank of the group.
    """
    size, exchange = state.topology.tp_size, state.groups.exchange
    if size == 1 or not state.cfg.prescaled_batch:
        return seed
    here = device.current()
    own = torch.stack([torch.tensor(seed, device=here), _digest(batch(), here)])
    everybody = own.new_empty(size, 2)
    exchange.make("all_gather", everybody.view(-1), own)
    seeds, digests = everybody.T.tolist()
    for rank, digest in zip(exchange.ranks, digests, strict=True):
        if digest != digests[0]:
            raise SMPUsageError(
                "with prescaled_batch, all ranks of a tensor-parallel group need the same batch, "
                f"and rank {rank} of the job has another one than rank {exchange.ranks[0]}: choose "
                "it by smp.rdp_rank() of smp.rdp_size()"
            )
    return int(seeds[0])


def _digest(tensors: Sequence[torch.Tensor], here: torch.device) -> torch.Tensor:
    """Returns a number that is another one, most likely, for other tensors.

    The arithmetic is that of integers modulo 2^64, so the order of additions does not matter.
    """
    total = torch.zeros((), dtype=torch.int64, device=here)
    for tensor in tensors:
        form = zlib.crc32(f"{tensor.shape} {tensor.dtype}".encode())
        total = total * 1_000_003 + form
        if tensor.layout == torch.strided and tensor.numel():
            kind = _INTEGERS.get(tensor.dtype.itemsize, torch.int64)
            bits = tensor.detach().contiguous().view(kind)
            rows = bits.reshape(len(bits), -1).sum(1, dtype=torch.int64)
            weights = torch.arange(1, len(rows) + 1, device=rows.device)
            total = total + (rows * weights).sum().to(here)
    return total
