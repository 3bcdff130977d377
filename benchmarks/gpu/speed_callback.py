"""The clock of the speed runs as a callback of Paceline."""

from typing import ClassVar

import torch
from speed_work import StepClock

from paceline import Callback
from paceline.config.schema import Config
from paceline.train.state import StepResult, TrainState


class ClockCallback(Callback):
    """Measures the steps of the latest run in this process."""

    latest: ClassVar[StepClock]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        ClockCallback.latest = StepClock(_synchronize)

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        ClockCallback.latest.after_step(state.step)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
