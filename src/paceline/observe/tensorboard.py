"""TensorBoard logging (``report_to: [tensorboard]``)."""

import importlib.util
from pathlib import Path
from typing import Any

from paceline.core import formatting
from paceline.core.errors import ConfigError
from paceline.core.events import EvalEvent, Event, StepEvent


def check_tensorboard() -> None:
    """Raise ConfigError if the tensorboard package is not installed. Does not import the package,
    because that would delay the start of a run."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "`report_to: [tensorboard]` requires the tensorboard package, which is not installed",
            fix="`pip install 'paceline[tensorboard]'`, or remove tensorboard from `report_to`",
        )


class TensorBoardListener:
    """Writes the figures of a run to ``<output_dir>/tensorboard``. Like every listener, it never
    raises: a full disk ends the TensorBoard files, not the training.

    Attributes:
        error: the exception that ended logging, or None.
    """

    def __init__(self, output_dir: Path) -> None:
        check_tensorboard()
        self.folder = output_dir / "tensorboard"
        self.error: Exception | None = None
        self._writer: Any = None
        self._resumed_from: int | None = None
        self._batch: Any = None

    def __call__(self, event: Event) -> None:
        if self.error is not None:
            return
        try:
            self._handle(event)
        except Exception as error:
            self.error = error

    def close(self) -> None:
        """Write pending data. May be called twice."""
        writer, self._writer = self._writer, None
        if writer is not None and self.error is None:
            try:
                writer.close()
            except Exception as error:
                self.error = error

    def _handle(self, event: Event) -> None:
        if event["type"] == "run_start":
            self._resumed_from = event.get("resumed_from_step")
            self._batch = (event.get("derived") or {}).get("global_batch_size")
        elif event["type"] == "resume":
            self._resumed_from = event["step"]
        elif event["type"] == "step":
            self._write(event, _step_scalars(event, self._batch))
        elif event["type"] == "eval":
            metrics = {
                f"eval/{name}": value for name, value in (event.get("metrics") or {}).items()
            }
            self._write(event, {"eval/loss": event.get("loss"), **metrics})
        elif event["type"] == "run_end":
            self.close()

    def _write(self, event: StepEvent | EvalEvent, scalars: dict[str, float | None]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # After a resume, purge_step hides the values that an earlier attempt wrote for later
            # steps.
            purge = None if self._resumed_from is None else int(self._resumed_from) + 1
            self._writer = SummaryWriter(str(self.folder), purge_step=purge)
        for name, value in scalars.items():
            figure = formatting.number(value)
            if figure is not None:
                self._writer.add_scalar(
                    name, figure, global_step=event["step"], walltime=event.get("time")
                )


def _step_scalars(step: StepEvent, global_batch_size: Any) -> dict[str, float | None]:
    per_second, unit = formatting.throughput(step, global_batch_size)
    scalars = {
        "train/loss": step.get("loss"),
        "train/learning_rate": step.get("learning_rate"),
        "train/grad_norm": step.get("grad_norm"),
        f"train/{unit.replace('/s', '_per_second')}": per_second,
        "time/step_s": step.get("step_time_s"),
        "time/data_wait_s": step.get("data_wait_s"),
        "time/comm_wait_s": step.get("comm_wait_s"),
    }
    memory = step.get("memory_bytes")
    if isinstance(memory, list | tuple):
        scalars |= {f"memory/rank_{rank}_bytes": value for rank, value in enumerate(memory)}
    else:
        scalars["memory/bytes"] = memory
    return scalars
