"""What a rank must know to run a training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.config.derive import ResolvedValues
from paceline.config.schema import Config
from paceline.core.events import Fault
from paceline.core.log import Notice

if TYPE_CHECKING:
    from paceline.parallel.registry import ParallelLayout
    from paceline.tasks.base import Prepared


@dataclass(frozen=True)
class RunSpec:
    """A training run as the launcher planned it, before any rank exists. It is pickled and sent to
    every rank.

    Args:
        data: what the task prepared.
        started_at: when the command began, in seconds since the epoch.
        resume_from: the checkpoint to resume from.
        notices: what the launcher has logged, for the event log.
        launcher_pid: the process that outlives the ranks and writes the end of a log that they
            could not end.
        failure: the fields of the ``fault`` event if a failure ended the attempt before this one.
        reports_everywhere: no launcher collects rank 0's report, and the caller of each rank needs
            it.
        sees_run_folder: whether this rank's host sees the run's folder of global rank 0's host.
    """

    config: Config
    derived: ResolvedValues
    data: Prepared
    layout: ParallelLayout
    device_type: str
    started_at: float
    resume_from: str | None = None
    notices: list[Notice] = field(default_factory=list)
    launcher_pid: int | None = None
    failure: Fault | None = None
    reports_everywhere: bool = False
    sees_run_folder: bool = True

    def is_log_step(self, step: int, first_step: int) -> bool:
        """Return whether the figures of this step are logged: the first, the last, and each
        ``logging_steps``. ``first_step``: updates made before this attempt."""
        is_first_or_last = step in (first_step + 1, self.derived.steps)
        return is_first_or_last or step % self.derived.log_every_steps == 0
