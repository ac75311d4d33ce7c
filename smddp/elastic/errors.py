"""How a step and a job are lost."""

from __future__ import annotations

__all__ = ["JobLostError", "StepLost"]


class StepLost(Exception):  # noqa: N818 - no error: the step is done again
    """A member was lost in this step, which nobody has applied. `with step:` swallows it."""


class JobLostError(SystemExit):
    """This process has lost the job: the others may go on without it, or nobody can.

    A script that does not catch it ends with status 75, and its launcher starts it again, as a
    newcomer.
    """

    STATUS = 75  # EX_TEMPFAIL

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = self.STATUS

    def __str__(self) -> str:
        return str(self.args[0])
