"""The specification of a training run, which the launcher sends to every rank, and the result that
the command gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from paceline.config.derive import ResolvedValues
from paceline.config.schema import Config
from paceline.core.events import Fault, MemoryFallbackEvent
from paceline.core.log import Notice
from paceline.core.report import PeakRate

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import nn

    from paceline.core.report import Report
    from paceline.models.shape.record import ModelShape
    from paceline.parallel.cost import Cost, Workload
    from paceline.parallel.registry import ParallelLayout
    from paceline.tasks.base import Prepared


class StepPrediction(Protocol):
    """The predicted time of a step: in seconds, the range that 80 % of published results are
    within, and its parts."""

    @property
    def seconds(self) -> float: ...
    @property
    def range_s(self) -> list[float] | None: ...
    @property
    def parts_s(self) -> dict[str, float] | None: ...


class PredictStep(Protocol):
    """Predicts the time of a step of a language model from its workload and its cost; None if it is
    not known."""

    def __call__(
        self,
        spec: RunSpec,
        model: nn.Module,
        shape: ModelShape,
        dataset: Any,
        work: Workload,
        cost: Cost,
    ) -> StepPrediction | None: ...


@dataclass(frozen=True)
class RunSpec:
    """A training run as the launcher planned it, before any rank exists. It is pickled and sent to
    every rank.

    Args:
        data: the data that the task prepared.
        peak: peak rate of this host's devices in the run's precision; None if unknown.
        started_at: start time of the command, in seconds since the epoch.
        resume_from: path of the checkpoint to resume from, or None.
        notices: notices that the launcher has logged, for the event log.
        launcher_pid: process ID of the launcher, which outlives the ranks and ends the event log
            if they could not; None without one.
        failure: fields of the ``fault`` event if a failure ended the previous attempt, else None.
        memory_fallback: the event about the smaller memory settings of this attempt if the previous
            one ran out of memory, else None.
        reports_everywhere: whether every rank returns the report, because no launcher collects it
            from rank 0 and the caller on each rank needs it.
        sees_run_folder: whether this rank's host can access the run's folder on rank 0's host.
        saves_state: whether the run writes checkpoints and the trained model. Benchmarks only need
            the figures of its steps.
        predict: predicts the time of a step for the report.
    """

    config: Config
    derived: ResolvedValues
    data: Prepared
    layout: ParallelLayout
    device_type: str
    started_at: float
    resume_from: str | None = None
    peak: PeakRate | None = None
    notices: list[Notice] = field(default_factory=list)
    launcher_pid: int | None = None
    failure: Fault | None = None
    memory_fallback: MemoryFallbackEvent | None = None
    reports_everywhere: bool = False
    sees_run_folder: bool = True
    saves_state: bool = True
    predict: PredictStep | None = None

    def is_log_step(self, step: int, first_step: int) -> bool:
        """Return whether the metrics of this step are logged. The first step, the last one and
        every ``logging_steps``-th one are logged. ``first_step`` is the step that this attempt
        started from."""
        is_first_or_last = step in (first_step + 1, self.derived.steps)
        return is_first_or_last or step % self.derived.log_every_steps == 0


class ResolvedRun(TypedDict):
    """The plan of a dry run. ``metrics``: the names of the results of an evaluation, or None."""

    config: dict[str, JsonValue]
    derived: dict[str, float | None]
    strategy: str
    axes: dict[str, int]
    device: str
    metrics: list[str] | None


@dataclass(frozen=True)
class TrainResult:
    """The exit code of a run and its report. Under an outer launcher such as torchrun, every rank
    receives them.

    Args:
        report: report of the complete run that a dry run found in the folder, or None.
        resolved: the config of a dry run and what follows from it.
    """

    exit_code: int
    report: Report | None = None
    resolved: ResolvedRun | None = None
