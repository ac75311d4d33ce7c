"""A job whose members come and go: init(), Job and Step."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from smddp._registration import BACKEND_NAME
from smddp._torch_internals import default_group, world
from smddp.elastic.errors import StepLost, lost
from smddp.elastic.kept import Kept
from smddp.elastic.meeting import Meeting, connect, sum_of
from smddp.elastic.sampler import Batches
from smddp.launch.environment import complete_from_launcher
from smddp.launch.spare import SPARE, await_place
from smddp.torch import _load
from smddp.torch.backend import backend_of
from smddp.torch.errors import CollectiveTimeoutError

__all__ = ["Job", "Step", "init"]

_log = logging.getLogger("smddp.elastic")
_PAUSE = 0.05  # seconds between two looks for newcomers, while there are too few members

_LAST_WORDS = 10.0  # seconds for an agreement at the end, when others may be gone
_torch: Any = dist  # whose names mypy does not see

# What a process knows of the training.
_NOTHING, _PART, _ALL = 0, 1, 2


def init(
    min_ranks: int = 1,
    *,
    timeout: float = 600,
    wait: float = 600,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
) -> Job:
    """Makes the default group of a job whose members may come and go.

    It reads the variables of `smddprun` or torchrun; a spare waits here. Until `job.keep()` the
    process is alone in the group, so that it can make its models whether the job runs or not.

    Args:
        min_ranks: with fewer members the job waits for newcomers.
        timeout: seconds that a collective, or an agreement on the members, may take.
        wait: seconds that the job waits for others: at its beginning, and below `min_ranks`.
        checkpoint: a file for the case that all die. Rank 0 writes it, and a job that begins again
            reads the newest one that a rank finds under this name. None: no file.
        every: steps between two such files.

    Raises:
        RuntimeError: torch cannot change the members of a group, there is a default group already,
            or a variable of the launcher is missing.
        ValueError: an argument is wrong, or there are GPUs.
    """
    if not hasattr(dist.ProcessGroup, "reconfigure"):
        raise RuntimeError(
            "smddp.elastic needs torch 2.15 or newer, whose groups can change their members; this "
            f"is torch {torch.__version__}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            f'smddp.elastic.init() makes the default group, and there is one of "'
            f'{dist.get_backend()}" already: leave init_process_group() out'
        )
    if _torch.get_debug_level() == _torch.DebugLevel.DETAIL:
        raise RuntimeError(
            "smddp.elastic: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch makes a second group, which "
            "keeps its members: use INFO"
        )
    if torch.cuda.device_count():
        raise ValueError(
            "smddp.elastic trains on the CPU: hide the GPUs (CUDA_VISIBLE_DEVICES=), whose groups "
            "cannot change their members yet"
        )
    complete_from_launcher()
    own = () if SPARE in os.environ else ("RANK",)
    for name in (*own, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise RuntimeError(
                f"smddp.elastic.init(): {name} is not set: start the script with smddprun --elastic"
            )
    size = int(os.environ["WORLD_SIZE"])
    if not 1 <= min_ranks <= size:
        raise ValueError(f"min_ranks={min_ranks}: the job has {size} ranks (WORLD_SIZE)")
    if every < 1:
        raise ValueError(f"every={every}: a number of steps")
    of_torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ  # plain smddprun starts it, too
    if of_torchrun and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        warnings.warn(
            "smddp.elastic: torchrun ends all ranks of this host when one dies: start the script "
            "with smddprun --elastic, or one torchrun for each rank",
            stacklevel=2,
        )
    store = connect(wait)
    await_place(store)
    # No member may depend on a host, so the group has a store that leads nowhere.
    dist.init_process_group(
        BACKEND_NAME,
        store=_torch.HashStore(),
        rank=int(os.environ["RANK"]),
        world_size=size,
        timeout=timedelta(seconds=timeout),
        enable_reconfigure=True,
    )
    core = _load.load().ElasticMembers(backend_of(default_group(), "cpu"))
    alone = _torch.distributed_c10d.ReconfigureOptions()
    alone.uuid, alone.handles = random.SystemRandom().getrandbits(62) | 1 << 61, [core.card()]
    default_group().reconfigure(alone).wait()
    return Job(core, store, min_ranks, timeout, wait, os.fspath(checkpoint or ""), every)


class Step:
    """One step: a context that is entered once. A lost step is left, and comes again.

    Attributes:
        index: its number, from 0; a lost step has it again.
        committed: whether it counts. True from the first optimizer step of the block on.
    """

    def __init__(self, job: Job, index: int) -> None:
        self.index = index
        self.committed = False
        self.is_lost = False
        self.has_voted = False
        self._job = job

    def __enter__(self) -> Step:
        self._job._begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._job._end(self, error)


class Job:
    """The job of this process; init() makes it.

    Attributes:
        committed: number of steps that count.
    """

    def __init__(
        self,
        core: Any,
        store: Any,
        min_ranks: int,
        timeout: float,
        wait: float,
        file: str,
        every: int,
    ) -> None:
        self.committed = 0
        self._core, self._store, self._min_ranks = core, store, min_ranks
        self._timeout, self._wait, self._file, self._every = timeout, wait, file, every
        self._kept: Kept | None = None
        self._members: Any = None
        self._knows = _NOTHING
        self._is_settled = False  # all members know everything, and DDP knows the members
        self._step: Step | None = None
        self._voted = 0
        self._total = 0
        self._restarts = 0  # how often what loaders have read ahead became wrong
        self._repeats = 0  # how often in a row a step was lost, and no member
        self._somebody_waits = False
        self._error: BaseException | None = None  # of the script, in a step

    @property
    def rank(self) -> int:
        """This rank among the members; before keep() RANK, that of the launcher."""
        return dist.get_rank() if self._kept else int(os.environ["RANK"])

    @property
    def size(self) -> int:
        """The number of members; before keep() WORLD_SIZE, that of the launcher."""
        return dist.get_world_size() if self._kept else int(os.environ["WORLD_SIZE"])

    def keep(self, *things: Any) -> None:
        """Says what the training consists of, and becomes a member of the job.

        All processes call this once, with the same objects in the same order: models, optimizers,
        schedulers, a scaler, a Sampler, torch.Generators, and others with state_dict() and
        load_state_dict(). A newcomer gets their state from a member, but not random states. A step
        that is lost restores the buffers of modules, random states, and what is no module and no
        optimizer.

        Raises:
            TypeError: something has no state.
            ValueError: something cannot go on with other members.
            JobLostError: the others did not come, or did not let this process in.
        """
        if self._kept is not None:
            raise RuntimeError("job.keep() was called before: pass everything in one call")
        kept = Kept(things)
        places = int(os.environ["WORLD_SIZE"])
        for sampler in kept.samplers:
            sampler.bind(lambda: (dist.get_rank(), dist.get_world_size()))
            if not sampler.per_rank and sampler.batch < places:
                raise ValueError(f"Sampler: a batch of {sampler.batch} is less than one per rank")
        self._refuse_groups()
        step = self._step_of_file()
        meeting = Meeting(self._core, self._store, step)
        members = _still_in(meeting.meet(self._wait))
        self._kept, self._meeting = kept, meeting
        is_first = members.generation == 1
        # Those that begin have what the newest file has.
        self._knows = _PART if is_first and step == members.step else _NOTHING
        if is_first and step and step == members.step:
            kept.read(self._file)
        self.committed = self._voted = members.step
        for optimizer in kept.optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)
        for model in kept.models:
            model.register_forward_pre_hook(self._before_forward)
        self._install(members)
        self._settle()

    def steps(self, total: int) -> Iterator[Step]:
        """Yields steps until `total` count, in the whole life of the job; a lost one again.

        Raises:
            RuntimeError: keep() was not called, or a step has ended with an error of the script.
        """
        if self._kept is None:
            raise RuntimeError("call job.keep() before job.steps()")
        self._total = total
        if self.committed < total and dist.get_rank() == 0:
            self._meeting.end(False)
        while self.committed < total:
            if self._error is not None:
                raise RuntimeError(
                    "a step has ended with an error, and the other ranks wait for this one in it: "
                    "end the process, or catch the error within the step"
                ) from self._error
            before = self._restarts, self.committed
            yield (step := Step(self, self.committed))
            if before == (self._restarts, self.committed) and not step.is_lost:
                raise RuntimeError("job.steps(): write `with step:` around the body of the loop")
        self._finish()

    def batches(self, loader: Any) -> Batches:
        """Returns an iterator over a loader with a Sampler, for use in steps: `next(batches)`.

        It begins at the sample where the training is, and again when a step was lost or the
        members have changed. All ranks take as many batches in a step.
        """
        return Batches(loader, lambda: self._restarts)

    def _finish(self) -> None:
        """Waits until all members know that the last step counts, since they may need one another.

        Not for ever: nobody needs this rank if all others have gone on.
        """
        is_over = False
        while not is_over:
            self._settle()
            try:
                sum_of(0)
                is_over = True
            except RuntimeError as error:
                if not self._has_failed():
                    raise
                with contextlib.suppress(CollectiveTimeoutError):
                    self._agree(error, _LAST_WORDS)
                    continue
                is_over = True
        if dist.get_rank() == 0:
            self._meeting.end(True)

    # --- a step -----------------------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        if self._step is not None or step.has_voted or step.index != self.committed:
            raise RuntimeError("`with step:` is entered once, in the loop over job.steps()")
        assert self._kept is not None
        self._refuse_groups()
        self._settle()
        self._kept.save()
        self._step = step

    def _end(self, step: Step, error: BaseException | None) -> bool:
        """Ends a step; returns whether the error of its body was that of a loss."""
        assert self._kept is not None
        self._step = None
        is_finished = error is None
        try:
            if error is None and not step.has_voted:
                self._vote(step)  # no optimizer has
            elif error is not None and not isinstance(error, StepLost):
                if not isinstance(error, Exception) or not self._has_failed():
                    self._error = error
                    return False
                if not step.is_lost:
                    self._agree(error)
        except StepLost:
            pass
        if not step.committed:
            step.is_lost = True
            self._restarts += 1
            self._kept.restore()
            return True
        for sampler in self._kept.samplers:
            sampler.commit()
        if not is_finished:
            # The script has not done what follows the optimizer's step; others may have.
            self._knows = _PART
        elif self._somebody_waits and self.committed < self._total:
            self._agree(None)
        self._somebody_waits = False
        self._repeats = 0
        if self._file and is_finished and self.committed % self._every == 0 and self.rank == 0:
            self._kept.write(self._file, self.committed)
        return True

    def _before_optimizer(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """The first optimizer step of a block is the vote on it."""
        if (arguments[1] if len(arguments) > 1 else options.get("closure")) is not None:
            raise RuntimeError(
                "smddp.elastic: optimizer.step(closure) computes gradients after the ranks have "
                "agreed that they have them: use an optimizer without a closure"
            )
        if self._step is None:
            raise RuntimeError("smddp.elastic: call optimizer.step() within `with step:`")
        if self._step.is_lost:
            raise StepLost
        if not self._step.has_voted:
            self._vote(self._step)

    def _before_forward(self, model: Any, _: Any) -> None:
        if self._step and self._step.has_voted and model.training and torch.is_grad_enabled():
            raise RuntimeError(
                "smddp.elastic: DDP's forward after optimizer.step() in the same block, where a "
                "loss would leave ranks with different weights: use a step for each, or let all "
                "backward passes come before the first optimizer.step()"
            )

    def _vote(self, step: Step) -> None:
        """Commits the step if all members have its gradients.

        Raises:
            StepLost: not all had them.
        """
        step.has_voted = True
        if self._has_failed():
            # If the script has caught the error, this rank may lack gradients.
            self._agree(RuntimeError("a call in this step has failed"))
            step.is_lost = True
            raise StepLost
        self._voted = step.index + 1
        try:
            (waiting,) = sum_of(self._meeting.newcomers())
            self._somebody_waits = waiting > 0
        except RuntimeError as error:
            if not self._has_failed():
                raise
            self._agree(error)
            if self._members.step < step.index + 1:
                step.is_lost = True
                raise StepLost from error
        self.committed = step.index + 1
        step.committed = True

    # --- the members ------------------------------------------------------------------------------

    def _has_failed(self) -> bool:
        """Asks the group: DDP's errors do not have the class that says so."""
        return bool(backend_of(default_group(), "cpu").get_error().name != "SUCCESS")

    def _agree(self, error: BaseException | None, timeout: float = 0) -> None:
        """Agrees with the others on the members, and on the step that counts.

        Raises:
            JobLostError: this process is out.
            BaseException: `error`, if nobody has left, twice in a row: it would come for ever.
        """
        members = _still_in(self._core.agree(self.committed, self._voted, timeout or self._timeout))
        self._voted = members.step
        self._install(members)
        if error is not None and not members.left and not members.came:
            self._repeats += 1
            if self._repeats > 1:
                raise error

    def _install(self, members: Any) -> None:
        self._members = members
        self._is_settled = False
        self._restarts += 1
        # Torch does not know of the change.
        ranks = {rank: rank for rank in range(dist.get_world_size())}
        world(dist.distributed_c10d).pg_group_ranks[default_group()] = ranks
        if dist.get_rank() == 0:
            self._meeting.publish(members.cards)
            changes = {"left": members.left, "came": members.came}
            said = [f"{word}: {', '.join(who)}" for word, who in changes.items() if who]
            if members.generation > 1:
                _log.warning(
                    "smddp.elastic: %s; %d ranks go on at step %d",
                    "; ".join(said) or "nobody left",
                    len(members.cards),
                    members.step,
                )

    def _settle(self) -> None:
        """Brings all members to the same state, after a change."""
        while not self._is_settled:
            try:
                if self._have_enough():
                    self._equalise()
                    self._is_settled = True
            except RuntimeError as error:
                if not self._has_failed():
                    raise
                self._agree(error)

    def _have_enough(self) -> bool:
        """Waits until there are `min_ranks` members; returns whether they are those of before."""
        deadline = time.monotonic() + self._wait
        # Not at the end of the last step.
        while dist.get_world_size() < self._min_ranks and not 0 < self._total <= self.committed:
            is_late = time.monotonic() > deadline
            newcomers, late = sum_of(self._meeting.newcomers(), is_late)
            if newcomers:
                self._agree(None)
                return False
            if late:
                raise lost(f"fewer than min_ranks={self._min_ranks} ranks for {self._wait:.0f} s")
            time.sleep(_PAUSE)
        return True

    def _equalise(self) -> None:
        assert self._kept is not None
        rank, size = dist.get_rank(), dist.get_world_size()
        known = sum_of(*(self._knows if each == rank else _NOTHING for each in range(size)))
        most = max(known)
        if most == _NOTHING:
            raise lost("nobody is left who has the state of the training")
        if min(known) < _ALL:
            source = known.index(most)
            self._kept.broadcast(source, loads=self._knows < _ALL and rank != source)
        self._kept.change_members()
        # Nobody goes on before all have everything: else those who know might be gone.
        sum_of(0)
        self._knows = _ALL

    def _refuse_groups(self) -> None:
        if len(world(dist.distributed_c10d).pg_map) > 1:
            raise ValueError(
                "smddp.elastic: other groups than the default one (new_group(), DeviceMesh) keep "
                "their members, so they would fail with the first loss: make none"
            )

    def _step_of_file(self) -> int:
        if not self._file or not os.path.exists(self._file):
            return 0
        return int(torch.load(self._file, mmap=True, weights_only=False)["step"])


def _still_in(members: Any) -> Any:
    """Returns members of whom this process is one."""
    if members.out:
        raise lost(f"this process is no member of the job any more: {members.out}")
    return members
