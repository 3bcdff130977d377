"""The base class of callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import nn

    from paceline.config.schema import Config
    from paceline.core.events import StepFigures
    from paceline.train.evaluation import EvalResult
    from paceline.train.state import StepResult, TrainState


@dataclass(frozen=True)
class TrainingInfo:
    """What a callback may know about the run.

    Args:
        rank: number of this rank, from 0 to ``world_size`` - 1. Rank 0 writes files and logs.
        steps: number of steps of the run, if nothing ends it earlier.
        model: the model as the strategy has set it up. A rank may hold only a part of its
            parameters.
    """

    rank: int
    world_size: int
    output_dir: Path
    steps: int
    model: nn.Module


@dataclass(frozen=True)
class Requests:
    """What callbacks have requested of the trainer. ``stop`` is the reason to end the training."""

    stop: str | None = None
    evaluate: bool = False
    save: bool = False

    def __or__(self, other: Requests) -> Requests:
        return Requests(
            self.stop or other.stop, self.evaluate or other.evaluate, self.save or other.save
        )


class Callback:
    """Base class of callbacks, whose methods the trainer calls at fixed points of the training.

    All methods run on every rank, in the order of the list of callbacks, except
    :meth:`on_checkpoint_saved`. They read the state of the training but never change it.

    Example::

        class StopAtLoss(paceline.Callback):
            def on_evaluation_end(self, result, state):
                if result.loss < 0.5:
                    self.request_stop("the evaluation loss is below 0.5")

    Args:
        config: the config of the run, with free-form settings in ``config.task_args``.
    """

    #: Set by the methods below, and cleared by the trainer.
    requests = Requests()

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_train_begin(self, info: TrainingInfo, state: TrainState) -> None:
        """Called before the first step of each attempt of the run. ``state.step`` is the step that
        it resumes from, or 0."""

    def on_step_begin(self, state: TrainState) -> None:
        """Called before each step. ``state.step`` is the number of completed steps."""

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        """Called after each step, including steps that skipped their batch or rolled back. If the
        step is logged, ``result.figures`` has its figures, such as ``loss``. On an accelerator,
        they are read a step later, so they belong to the step before, if that step was logged;
        see :meth:`on_step_logged`."""

    def on_step_logged(self, step: int, figures: StepFigures) -> None:
        """Called once for each logged step, in order, with its figures, such as ``loss``. On an
        accelerator, that is after the next step, but before an evaluation, a checkpoint, a rollback
        or the end."""

    def on_evaluation_end(self, result: EvalResult, state: TrainState) -> None:
        """Called after each evaluation, while the model has the weights that were evaluated."""

    def before_pause(self, state: TrainState) -> None:
        """Called before an evaluation, a checkpoint, a rollback and the end of the training, to do
        what the callback has put off."""

    def before_checkpoint(self, state: TrainState) -> None:
        """Called before the state is collected for a checkpoint."""

    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        """Called on rank 0 after the checkpoint of ``step`` was written: if it is written in the
        background, after a later step."""

    def on_train_end(self, state: TrainState) -> None:
        """Called when the training is complete, before the model is written. Not called if a signal
        stops the run."""

    def after_error(self) -> None:
        """Called on a rank whose training ends with an error, before it is reported. Other ranks
        may be lost, so it must not communicate with them."""

    def request_stop(self, reason: str) -> None:
        """Ask the trainer to end the training after this step as if it were the last one: it saves
        a checkpoint, evaluates, and writes the model and the report."""
        self.requests |= Requests(stop=reason)

    def request_evaluation(self) -> None:
        """Ask the trainer to evaluate after this step, if there is validation data."""
        self.requests |= Requests(evaluate=True)

    def request_save(self) -> None:
        """Ask the trainer to save a checkpoint after this step."""
        self.requests |= Requests(save=True)

    def state_dict(self) -> Mapping[str, JsonValue]:
        """Return the state to store in each checkpoint, as JSON. The state of rank 0 is stored."""
        return {}

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        """Restore the state of a checkpoint, on every rank, or the initial one if ``state`` is
        empty."""
