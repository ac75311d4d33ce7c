"""Jobs that go on when ranks die, and that others join: the page docs/elastic.md.

Example::

    import smddp.elastic as elastic

    job = elastic.init(min_ranks=2)
    model = DDP(net)
    job.keep(model, optimizer, scheduler)
    for step in job.steps(10_000):
        with step:  # a step that is lost is left, and done again by those who are there
            loss = ...
            loss.backward()
            optimizer.step()
        if step.committed and job.rank == 0:
            log(loss)
"""

from smddp.elastic.errors import JobLostError, StepLost
from smddp.elastic.job import Job, Step, init
from smddp.elastic.sampler import Batches, Sampler

__all__ = ["Batches", "Job", "JobLostError", "Sampler", "Step", "StepLost", "init"]
