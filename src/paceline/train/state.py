"""What a rank's training consists of: its services, its components and its mutable state."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from paceline.core.events import EventLog
from paceline.core.run_dir import RunDir
from paceline.core.stop import StopFlag
from paceline.distributed.communicator import Communicator
from paceline.distributed.progress import PROGRESS, ProgressTracker
from paceline.models.shape.record import ModelShape
from paceline.parallel.base import Strategy
from paceline.tasks.base import Task
from paceline.train.optimizer import Schedule
from paceline.train.precision import Precision


@dataclass(frozen=True)
class RankContext:
    """The services of one rank: its communicator, the run's folder and event log, the progress that
    the watchdog reads, and the stop request."""

    comm: Communicator
    run_dir: RunDir
    events: EventLog
    stop: StopFlag
    progress: ProgressTracker = PROGRESS

    @property
    def device(self) -> torch.device:
        return self.comm.device


@dataclass(frozen=True)
class TrainComponents:
    """What is trained, and with what. Weights and optimizer state change through ``strategy``.

    Args:
        model: as the strategy placed it.
        shape: of the model as the task built it.
        frozen_digest: of the weights that are not trained; None if all are trained.
    """

    task: Task
    model: nn.Module
    shape: ModelShape
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    lr_schedule: Schedule
    precision: Precision
    frozen_digest: str | None


@dataclass
class TrainState:
    """The mutable state of a training; only the trainer assigns to it.

    Args:
        step: updates made so far, skipped batches included.
        first_step: the step that this attempt of the run started from.
        skipped_batches: steps whose batch is skipped after a loss spike, counted from 0.
        recent_losses: mean losses of the last steps, for the detection of loss spikes.
        eval_losses: evaluation loss by step.
    """

    step: int = 0
    first_step: int = 0
    skipped_batches: set[int] = field(default_factory=set)
    recent_losses: deque[float] = field(default_factory=deque)
    eval_losses: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """What a step did. ``grad_norm`` (a float32 scalar on the device) and ``learning_rate`` are
    None unless ``outcome`` is ``updated``.

    Args:
        stop: some rank was asked to stop.
        is_logged: the step is one of those whose figures are logged.
    """

    outcome: Literal["updated", "batch_skipped", "rolled_back"]
    stop: bool = False
    grad_norm: torch.Tensor | None = None
    learning_rate: float | None = None
    is_logged: bool = False
