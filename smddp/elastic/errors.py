"""How a step and a job are lost."""

from __future__ import annotations

import logging

from smddp.launch.spare import JOB_LOST

__all__ = ["JobLostError", "StepLost", "lost"]

_log = logging.getLogger("smddp.elastic")


class StepLost(Exception):  # noqa: N818 - no error: the step is done again
    """A member was lost in this step, which nobody has applied. `with step:` swallows it."""


class JobLostError(SystemExit):
    """This process has lost the job: the others may go on without it, or nobody can.

    A script that does not catch it ends with status 75, and its launcher starts it again, as a
    newcomer.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = JOB_LOST

    def __str__(self) -> str:
        return str(self.args[0])


def lost(text: str) -> JobLostError:
    """Returns the error, and logs it: Python prints nothing when it ends a process."""
    _log.error("smddp.elastic: %s", text)
    return JobLostError(text)
