"""Which samples a step takes: none is lost or taken twice, whoever the members are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch

__all__ = ["Batches", "Sampler"]


class Sampler:
    """The batches of this rank, for `DataLoader(dataset, batch_sampler=sampler)`.

    The samples are one endless sequence: each epoch has all of them once, shuffled in another way.
    A step takes the next `batch` of it, also across the end of an epoch, and the members share
    them. Its position is the number of samples that committed steps have taken. Pass it to
    `job.keep()`, and read the loader with `job.batches(loader)`.

    Args:
        data: the dataset, or its number of samples.
        batch: samples of all ranks together, whatever their number; with `per_rank`, of each rank.
        shuffle: whether each epoch has another order; the same on all ranks.
        seed: of these orders.
        per_rank: whether the batch of a rank is constant, so that the batch of a step changes with
            the number of ranks. Otherwise ranks may have shares of different sizes, and DDP's mean
            of their gradients is weighted, so that it is that of the whole batch.
    """

    def __init__(
        self,
        data: Sized | int,
        batch: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        per_rank: bool = False,
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        if self.length < 1 or batch < 1:
            raise ValueError(f"Sampler: {self.length} samples in batches of {batch}")
        self.batch, self.per_rank = batch, per_rank
        self.position = 0
        self.drawn = 0  # samples of the current step, of all ranks
        self._shuffle, self._seed = shuffle, seed
        self._layout: Callable[[], tuple[int, int]] | None = None
        self._order: tuple[int, list[int]] | None = None  # that of one epoch

    @property
    def epoch(self) -> int:
        """The number of epochs that are complete."""
        return self.position // self.length

    def bind(self, layout: Callable[[], tuple[int, int]]) -> None:
        """Says how to find this rank and the number of ranks; the job calls this."""
        self._layout = layout

    def share(self) -> tuple[int, int, int]:
        """Returns where this rank's part of a step's batch begins and ends, and the whole."""
        if self._layout is None:
            raise RuntimeError("Sampler: pass it to job.keep() first: it says who the members are")
        rank, size = self._layout()
        if self.per_rank:
            return rank * self.batch, (rank + 1) * self.batch, size * self.batch
        least, more = divmod(self.batch, size)
        begin = rank * least + min(rank, more)
        return begin, begin + least + (rank < more), self.batch

    def weight(self) -> float:
        """Returns what this rank's gradients count, if the mean over all ranks is to be exact."""
        begin, end, whole = self.share()
        assert self._layout is not None
        return (end - begin) * self._layout()[1] / whole

    def __iter__(self) -> Iterator[list[int]]:
        position = self.position
        begin, end, whole = self.share()
        while True:
            yield [self._sample(number) for number in range(position + begin, position + end)]
            position += whole

    def _sample(self, number: int) -> int:
        epoch, index = divmod(number, self.length)
        if not self._shuffle:
            return index
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = epoch, torch.randperm(self.length, generator=generator).tolist()
        return self._order[1][index]

    def commit(self) -> None:
        """What was drawn counts."""
        self.position += self.drawn
        self.drawn = 0

    def state_dict(self) -> dict[str, int]:
        """Returns the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Sets the position."""
        self.position, self.drawn = state["position"], 0


class Batches:
    """Reads a loader, from the place of the next step on: `job.batches(loader)` makes it."""

    def __init__(self, loader: Any, restarts: Callable[[], int]) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, Sampler):
            raise TypeError(
                "job.batches() needs a DataLoader(…, batch_sampler=smddp.elastic.Sampler(…))"
            )
        self._sampler, self._loader, self._restarts = sampler, loader, restarts
        self._restart = -1
        self._whole = 0
        self._iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        # Workers have read ahead for a step that is done again, or for other members.
        if self._restart != self._restarts():
            self._restart = self._restarts()
            self._iterator, self._whole = iter(self._loader), self._sampler.share()[2]
        batch = next(self._iterator)
        self._sampler.drawn += self._whole
        return batch
