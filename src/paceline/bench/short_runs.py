"""Short training runs for which only the figures of the steps matter: no checkpoint, model or
evaluation is written.

All runs of a command are started from one process, so their ranks are forked from the same fork
server, which imports torch once.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.config.schema.evaluation import Evaluation
from paceline.core.errors import EXIT_DONE, ConfigError, RunError, StoppedError
from paceline.core.event_log import effective_steps, read_events
from paceline.core.events import Event, RankStep, RunStartEvent, StepEvent
from paceline.core.log import console_limited_to
from paceline.core.run_dir import RunDir
from paceline.distributed.devices import cpu_cores

if TYPE_CHECKING:
    from paceline.train.run_spec import TrainResult

logger = logging.getLogger(__name__)

#: Share of the cores that other processes may use without a warning.
_BUSY_SHARE = 0.25
#: Trains a config as `paceline sft` does, but writes no checkpoint and no model.
Train = Callable[[Loaded], "TrainResult"]


@dataclass(frozen=True)
class RunLength:
    """Number of steps that are measured, and of steps before them that are not: the first steps
    allocate memory, fill caches and compile."""

    steps: int
    warm_up: int

    @property
    def total(self) -> int:
        return self.steps + self.warm_up


@dataclass(frozen=True)
class StepParts:
    """Mean seconds per step and rank.

    Attributes:
        computation_s: forward, backward and optimizer.
        communication_s: what the rank that waits least spends in collectives, outside of the parts
            that overlap with computation.
        waiting_s: what the ranks spend in collectives beyond that, because others arrive later,
            and the time without a batch.
        other_s: the rest.
    """

    computation_s: float
    communication_s: float
    waiting_s: float
    other_s: float


@dataclass(frozen=True)
class ShortRun:
    """Figures of the measured steps of a run.

    Attributes:
        step_s: seconds of each step.
        work: tokens per step, or samples if they have no tokens.
        unit: ``tokens`` or ``samples``.
        parts: None on accelerators, where the phases of a step are the times of the host.
        peak_memory_bytes: maximum over the ranks of the whole run; on a CPU, of the process.
        traffic_bytes: bytes per step of the rank that sends most.
        first_step_s: seconds of the first step, which includes compilation.
        losses: training loss of each step, the warm-up included.
        steps_per_epoch: None if it is unknown, because the data is streamed.
    """

    step_s: tuple[float, ...]
    work: float
    unit: str
    parts: StepParts | None
    peak_memory_bytes: int | None
    traffic_bytes: int | None
    first_step_s: float
    losses: tuple[float, ...]
    strategy: str
    device: str
    precision: str
    world_size: int
    global_batch_size: int
    steps_per_epoch: int | None

    @property
    def mean_step_s(self) -> float:
        return sum(self.step_s) / len(self.step_s)


def warn_if_busy() -> None:
    """Warn if other processes use the cores, because they change the times of some runs."""
    busy, cores = os.getloadavg()[0], cpu_cores()
    if busy > _BUSY_SHARE * cores:
        logger.warning(
            "other processes are running (load %.1f on %d cores): the times vary more, and may be"
            " too long",
            busy,
            cores,
        )


def run_short(loaded: Loaded, train: Train, length: RunLength) -> ShortRun:
    """Train ``length.total`` steps in a temporary folder and return their figures.

    Raises:
        ConfigError: the config cannot run on this machine.
        RunError: the run failed, or was stopped by a signal (StoppedError).
    """
    folder = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    try:
        config = short_config(loaded.config, folder / "run", length)
        with console_limited_to("error"):
            result = train(replace(loaded, config=config, notices=[]))
        if result.exit_code != EXIT_DONE or result.report is None:
            raise StoppedError(
                "the measurement was stopped by a signal", result.exit_code, code="stopped"
            )
        run_dir = RunDir(folder / "run")
        peaks = result.report["peak_memory_bytes"]
        assert isinstance(peaks, list)
        return figures_of(read_events(run_dir.events), length.warm_up, _largest(peaks))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _largest(peaks: Sequence[object]) -> int | None:
    return max((int(peak) for peak in peaks if isinstance(peak, int)), default=None)


def short_config(config: Config, output_dir: Path, length: RunLength) -> Config:
    """Return the config of a short run: each step is logged, and nothing happens besides the steps
    (no evaluation, checkpoint, logger, callback, upload or restart)."""
    args = config.train_args.model_copy(
        update={
            "max_steps": length.total,
            "logging_steps": 1,
            "save_steps": 0,
            "load_best_model_at_end": False,
            "save_best": False,
            "metric_for_best_model": None,
            "early_stopping": None,
            "profile": None,
            "push_to_hub": False,
            "trackio_space_id": None,
        }
    )
    recovery = config.recovery.model_copy(
        update={"max_restarts": 0, "save_interval_s": None, "rollback_on_loss_spike": False}
    )
    return config.model_copy(
        update={
            "output_dir": str(output_dir),
            "checkpoint_dir": None,
            "resume": "never",
            "val_dataset": None,
            "split_dataset_ratio": 0.0,
            "report_to": [],
            "callbacks": [],
            "evaluation": Evaluation(),
            "recovery": recovery,
            "train_args": args,
        }
    )


def figures_of(events: Sequence[Event], warm_up: int, peak_memory_bytes: int | None) -> ShortRun:
    """Return the figures of a run from its event log. Steps with an incomplete global batch, at
    the end of an epoch, are left out.

    Raises:
        ConfigError: no step is left.
        RunError: the log is incomplete.
    """
    starts: list[RunStartEvent] = [event for event in events if event["type"] == "run_start"]
    steps = effective_steps(events)
    if not starts or not steps:
        raise RunError("the event log of a short run is incomplete", code="incomplete-event-log")
    start = starts[-1]
    derived = start["derived"]
    batch_size, per_epoch = int(derived["global_batch_size"] or 0), derived.get("steps_per_epoch")
    packs_rows = bool(start.get("packing"))
    measured = [step for step in steps[warm_up:] if packs_rows or step["samples"] == batch_size]
    if not measured:
        raise ConfigError(
            "the dataset is too small to measure: no step has a full batch of {batch_size} samples",
            code="dataset-too-small",
            fix="use a larger dataset, or lower `per_device_train_batch_size`",
            batch_size=batch_size,
        )
    has_tokens = measured[0]["tokens"] is not None
    work = [(step["tokens"] or 0) if has_tokens else step["samples"] for step in measured]
    device, on_cpu = str(start["device"]), start["device"] == "cpu"
    return ShortRun(
        step_s=tuple(step["step_time_s"] for step in measured),
        work=sum(work) / len(work),
        unit="tokens" if has_tokens else "samples",
        parts=mean_parts([split_step(step["ranks"]) for step in measured]) if on_cpu else None,
        peak_memory_bytes=peak_memory_bytes,
        traffic_bytes=_mean_traffic(measured),
        first_step_s=steps[0]["step_time_s"],
        losses=tuple(step["loss"] for step in steps),
        strategy=str(start["strategy"]),
        device=device,
        precision=str(start["precision"]),
        world_size=start["world_size"],
        global_batch_size=batch_size,
        steps_per_epoch=None if per_epoch is None else int(per_epoch),
    )


def _mean_traffic(steps: Sequence[StepEvent]) -> int | None:
    sent = [step.get("traffic") for step in steps]
    known = [sum(kinds.values()) for kinds in sent if kinds is not None]
    return round(sum(known) / len(known)) if len(known) == len(sent) else None


def mean_parts(parts: Sequence[StepParts]) -> StepParts:
    """Return the mean of each part of several steps or runs."""
    columns = zip(*(astuple(each) for each in parts), strict=True)
    return StepParts(*(sum(column) / len(parts) for column in columns))


def split_step(ranks: Sequence[RankStep]) -> StepParts:
    """Split a step. The last rank to arrive at the collectives waits for none, so the least time
    that a rank spends in them is communication, and what others spend beyond it is waiting."""
    communication_s = min(rank["communication_s"] for rank in ranks)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(ranks)

    computation_s = mean(
        [rank["forward_s"] + rank["backward_s"] + rank["optimizer_s"] for rank in ranks]
    )
    waiting_s = mean([rank["communication_s"] - communication_s + rank["data_s"] for rank in ranks])
    other_s = mean([rank["other_s"] for rank in ranks])
    return StepParts(computation_s, communication_s, waiting_s, other_s)
