"""A rank dies in a job with many groups: each survivor's error names it, by its rank in the job.

Most survivors share no group with it. They wait for ranks that have left because of its death.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.multiprocess

SEEDS = list(range(24))


def _mesh(shape: tuple[int, ...], chance: random.Random) -> list[list[int]]:
    """Returns the groups of each dimension of a mesh."""
    size = 1
    for length in shape:
        size *= length
    mesh = torch.arange(size).reshape(shape)
    groups: list[list[int]] = []
    for dimension in range(len(shape)):
        groups += mesh.movedim(dimension, -1).reshape(-1, shape[dimension]).tolist()
    chance.shuffle(groups)
    return groups


def _subsets(size: int, chance: random.Random) -> list[list[int]]:
    """Returns random groups; together they connect all ranks."""
    order = chance.sample(range(size), size)
    groups = [sorted(pair) for pair in itertools.pairwise(order)]
    groups += [sorted(chance.sample(range(size), chance.randint(2, size))) for _ in range(2)]
    chance.shuffle(groups)
    return groups


def _made(kind: str, chance: random.Random) -> list[tuple[list[int], dist.ProcessGroup | None]]:
    size = dist.get_world_size()
    if kind == "mesh":
        shape = (2,) * (size.bit_length() - 1)
        names = tuple("abc"[: len(shape)])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mine = {tuple(dist.get_process_group_ranks(g)): g for g in mesh.get_all_groups()}
        return [(members, mine.get(tuple(members))) for members in _mesh(shape, chance)]
    made: list[tuple[list[int], dist.ProcessGroup | None]] = []
    for members in _subsets(size, chance):
        if kind == "split":
            rest = sorted(set(range(size)) - set(members))
            parts = [members, rest] if rest else [members]
            group = dist.split_group(split_ranks=parts)
            made += [(part, group if dist.get_rank() in part else None) for part in parts]
        else:
            group = dist.new_group(members)
            made.append((members, group if dist.get_rank() in members else None))
    return [one for one in made if len(one[0]) > 1]


def _die_somewhere(kind: str, seed: int) -> str:
    chance = random.Random(seed)  # of all ranks alike
    dist.init_process_group("smddp", timeout=timedelta(seconds=40))
    groups = _made(kind, chance)
    culprit, moment = chance.randrange(dist.get_world_size()), chance.randrange(5, 40)
    calls = 0
    try:
        for _ in range(100_000):
            members, group = chance.choice(groups)
            how, elements = chance.choice(["sum", "gather", "pair"]), chance.choice([1, 5000])
            if group is None:
                continue
            calls += 1
            if dist.get_rank() == culprit and calls >= moment:
                if chance.random() < 0.5:
                    time.sleep(0.02)  # the others wait
                os.kill(os.getpid(), signal.SIGKILL)
            tensor = torch.ones(elements)
            if how == "sum":
                dist.all_reduce(tensor, group=group)
            elif how == "gather":
                dist.all_gather([torch.empty(elements) for _ in members], tensor, group=group)
            elif dist.get_rank() == members[0]:
                dist.send(tensor, members[1], group=group)
            elif dist.get_rank() == members[1]:
                dist.recv(tensor, members[0], group=group)
    except dist.DistBackendError as error:
        return f"{culprit} {type(error).__name__} {error}"
    return "no error"


def _named(text: str) -> int:
    """Returns the first rank in the cause of an error."""
    cause = re.split(r" failed on rank [^:]*: ", text, maxsplit=1)[1]
    found = re.search(r"rank (\d+)", cause)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize("kind", ["mesh", "subsets", "split"])
@pytest.mark.parametrize("layout", ["4", "2x2", pytest.param("2x4", marks=pytest.mark.costly)])
def test_all_survivors_name_the_rank_that_died(layout: str, kind: str) -> None:
    for seed in ranks.rotating_or_all(SEEDS, 2):
        outcomes = ranks.run_ranks(_die_somewhere, layout, kind, seed, timeout=90)
        killed = [one for one in outcomes if one.status == -signal.SIGKILL]
        assert len(killed) == 1, "\n".join(map(str, outcomes))
        for outcome in outcomes:
            if outcome.rank == killed[0].rank:
                continue
            assert outcome.returned, str(outcome)
            assert outcome.value != "no error", str(outcome)
            assert _named(outcome.value) == killed[0].rank, f"seed {seed}\n" + "\n".join(
                map(str, outcomes)
            )
