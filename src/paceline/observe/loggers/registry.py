"""The loggers that ``report_to`` names."""

from collections.abc import Callable

from paceline.config.schema import Config
from paceline.core.run_dir import RunDir
from paceline.observe.loggers.base import TrackedRun, Tracker
from paceline.observe.loggers.clients import (
    CometTracker,
    MlflowTracker,
    SwanlabTracker,
    TrackioTracker,
    WandbTracker,
)
from paceline.observe.loggers.metric_logger import MetricLogger
from paceline.observe.loggers.tensorboard import TensorBoardTracker

_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "swanlab": SwanlabTracker,
    "comet_ml": CometTracker,
}


def open_loggers(config: Config, run_dir: RunDir) -> list[MetricLogger]:
    """Return the loggers of a run. They start with its ``run_start`` event."""
    return [MetricLogger(name, _TRACKERS[name], run_dir) for name in config.report_to]
