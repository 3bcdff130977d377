"""Emit the ``run_start`` event, which describes a run at its start."""

import logging
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import nn

from paceline.config.derive import ResolvedValues
from paceline.config.schema import Config
from paceline.core.event_log import EventLog
from paceline.core.events import (
    Fault,
    MemoryFallbackEvent,
    Mesh,
    MeshRank,
    Prediction,
    RunStartEvent,
)
from paceline.core.log import log_notices
from paceline.core.processes import host_name
from paceline.core.report import DataFigures, PackingFigures, PeakRate, SourceFigures
from paceline.core.run_dir import RunDir
from paceline.data.order.base import Order
from paceline.data.order.build import SourceSize, tokens_per_row
from paceline.models.attention import attention_of, kernel_of
from paceline.models.blocks import base_model
from paceline.models.kernels.attention_choice import SDPA
from paceline.models.shape.activations import Activations, language_activations
from paceline.models.shape.dims import dims_of
from paceline.models.shape.record import ModelShape
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.registry import ParallelLayout, estimate_cost, get_spec, load_object
from paceline.parallel.strategy import Strategy
from paceline.version import __version__

logger = logging.getLogger(__name__)

#: Number of steps whose micro-batches are inspected to estimate the number of distinct IDs in a
#: micro-batch.
_COUNTED_STEPS = 8


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
    """Predicts the time of a run's step from its cost, up to a step; None if it is not known."""

    def __call__(self, info: "RunInfo", cost: Cost, step: int) -> StepPrediction | None: ...


@dataclass(frozen=True)
class RunInfo:
    """The parts of a run that its events and its report describe.

    Args:
        sources: the sizes of the sources; empty if samples have no tokens.
        source_figures: as in :class:`~paceline.tasks.base.Prepared`.
        data_counts: how many rows of the training data were read, kept and dropped; if the data is
            streamed, up to now.
        started_at: when the command began, in seconds since the epoch.
        model: the model as the strategy has set it up.
        shape: the shape of the model as the task has built it.
        predicts_activations: whether the model is a language model, whose dimensions determine the
            size of its activations.
        predict: predicts the time of a step.
    """

    config: Config
    derived: ResolvedValues
    layout: ParallelLayout
    data_counts: DataFigures
    started_at: float
    run_dir: RunDir
    strategy: Strategy
    model: nn.Module
    shape: ModelShape
    train_dataset: Any
    order: Order
    sources: tuple[SourceSize, ...]
    source_figures: tuple[SourceFigures, ...]
    predicts_activations: bool
    predict: PredictStep | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether rows are tokenized while the run trains."""
        return "tokens" in self.data_counts

    @property
    def has_packed_rows(self) -> bool:
        """Whether the batch size counts packed rows."""
        return self.config.train_args.packs_rows and (bool(self.sources) or self.is_streamed)

    def workload(self, step: int) -> Workload:
        """Return the mean workload of a replica per step, as far as it is known at ``step``."""
        derived = self.derived
        lengths = getattr(self.train_dataset, "lengths", None)
        mean_length = 1.0 if lengths is None else float(np.mean(lengths))
        if self.config.train_args.packs_rows and self.sources:
            mean_length = tokens_per_row(self.config, self.sources)
        elif self.is_streamed and derived.tokens_per_step is not None:
            mean_length = derived.tokens_per_step / derived.global_batch_size
        return Workload(
            derived.gradient_accumulation_steps,
            derived.samples_per_micro_batch * mean_length,
            distinct=self._distinct_ids(step),
        )

    def _distinct_ids(self, step: int) -> tuple[tuple[float, ...], ...]:
        """Return the mean number of distinct IDs in a micro-batch by table and server, counted in
        some micro-batches of the run; empty if the data have no IDs."""
        location = get_spec(self.layout.strategy).count_distinct
        if location is None or step == 0:
            return ()
        num_parts = self.derived.replicas * self.derived.gradient_accumulation_steps
        steps = sorted({step * number // _COUNTED_STEPS for number in range(_COUNTED_STEPS)})
        micro_batches = (
            batch for step in steps for batch in self.order.micro_batches(step, num_parts)
        )
        counted: tuple[tuple[float, ...], ...] = load_object(location)(
            self.config, self.train_dataset, micro_batches
        )
        return counted


def emit_run_start(
    info: RunInfo,
    events: EventLog,
    *,
    resumed: tuple[str, int] | None,
    failure: Fault | None,
    memory_fallback: MemoryFallbackEvent | None,
    launcher_pid: int | None,
    peak: PeakRate | None,
    launcher_notices: Sequence[tuple[str, str]],
    notices: Sequence[tuple[str, str]],
) -> None:
    """Emit ``run_start`` and the events that follow it. A collective.

    Args:
        info: the run.
        events: the event log.
        resumed: the checkpoint from which the run is resumed and its step, or None.
        failure: the fields of the ``fault`` event, if a failure ended the previous attempt.
        memory_fallback: the event to emit instead, if the failure was a lack of memory and this
            attempt has smaller memory settings.
        launcher_pid: process ID of the launcher.
        peak: the peak rate of a device; None if unknown.
        launcher_notices: (level, text) of the messages that the launcher has already printed.
        notices: (level, text) of the messages that have not been printed yet.
    """
    mesh = _mesh(info)
    if not info.strategy.world.is_rank_zero:
        return
    config = info.config
    start: RunStartEvent = {
        "type": "run_start",
        "config": config.model_dump(mode="json"),
        "derived": info.derived.as_dict(),
        "world_size": info.derived.world_size,
        "axes": asdict(info.layout.axes),
        "mesh": mesh,
        "predicted": _predicted(info, 0 if resumed is None else resumed[1]),
        "device": str(info.strategy.world.device.type),
        "peak": peak,
        "precision": config.train_args.precision,
        "strategy": info.strategy.name,
        "model": {
            "name": config.model,
            "parameters": info.shape.num_parameters,
            "trainable_parameters": sum(param.numel for param in info.shape.trained),
            "attention": kernel_of(base_model(info.model)),
        },
        "data": info.data_counts,
        "versions": _versions(),
        "pid": os.getpid(),
        "launcher": launcher_pid,
        "host": host_name(),
        "output_dir": str(info.run_dir.root),
        "resumed_from_step": None if resumed is None else resumed[1],
    }
    if info.has_packed_rows:
        start["packing"] = _packing(info)
    if info.source_figures:
        start["sources"] = list(info.source_figures)
    events.emit(start)
    if memory_fallback is not None:
        events.emit(memory_fallback, file_only=True)
    elif failure is not None:
        events.emit({"type": "fault", **failure}, file_only=True)
    for level, text in launcher_notices:
        events.notice(text, level, file_only=True)
    log_notices(logger, notices)
    if resumed is not None:
        path, step = resumed
        events.emit({"type": "resume", "step": step, "path": path})


def _packing(info: RunInfo) -> PackingFigures:
    args, rows = info.config.train_args, [source.num_rows for source in info.sources]
    if info.is_streamed:
        return {"strategy": args.packing_strategy, "capacity": args.max_length}
    tokens = sum(source.tokens for source in info.sources)
    return {
        "strategy": args.packing_strategy,
        "rows": rows,
        "capacity": args.max_length,
        "fill": tokens / (sum(rows) * args.max_length),
    }


def _mesh(info: RunInfo) -> Mesh:
    """Return ``{axes: {name: size}, ranks: [{rank, host, device, coordinates: {axis: n}}]}``.

    A rank outside the model's mesh has a ``role`` instead of coordinates. For a process that uses
    several devices, ``device`` lists all of them.
    """
    strategy, axes = info.strategy, info.layout.axes
    comm = strategy.world
    devices = ", ".join(map(str, strategy.devices))
    by_rank: list[Any] = comm.gather_objects((host_name(), devices))
    ranks: list[MeshRank] = []
    for rank, (host, device) in enumerate(by_rank):
        dims = comm.axes.coordinates(rank) if rank < comm.axes.size else {}
        coordinates = {axis: dims[axis] for axis in asdict(axes) if axis in dims}
        role = get_spec(info.layout.strategy).rank_role(info.config, axes, rank)
        entry: MeshRank = {
            "rank": rank,
            "host": host,
            "device": device,
            "coordinates": coordinates,
        }
        if role is not None:
            entry["role"] = role
        ranks.append(entry)
    return {"axes": asdict(axes), "ranks": ranks}


def _predicted(info: RunInfo, step: int) -> Prediction:
    """Return the predictions of the strategy: the maximum memory of a rank, and the maximum number
    of bytes that a rank sends in a step."""
    work, activations = info.workload(step), _activations(info)
    if activations is not None:
        work = replace(work, activations=activations.of_model(len(info.shape.blocks)))
    cost = estimate_cost(info.layout.strategy, info.shape, info.layout.axes, work, info.config)
    activation_bytes = None if activations is None else cost.activations
    return {
        "memory_bytes": {
            "parameters": cost.parameters,
            "gradients": cost.gradients,
            "optimizer": cost.optimizer,
            "activations": activation_bytes,
            "total": cost.state if activations is None else cost.total,
        },
        "traffic_bytes_per_step": cost.traffic_per_step,
        "traffic_bytes": {name: size for name, size in cost.traffic.items() if size},
        "traffic_is_bound": cost.traffic_is_bound,
    }


def _activations(info: RunInfo) -> Activations | None:
    """Return the predicted activations of the largest micro-batch, or None if they cannot be
    predicted, as for all models except language models."""
    model: Any = info.model
    base, dataset, train_args = base_model(model), info.train_dataset, info.config.train_args
    lengths, labels = getattr(dataset, "lengths", None), getattr(dataset, "label_counts", None)
    dims = None
    if info.predicts_activations and hasattr(base, "config"):
        dims = dims_of(base.config.to_dict())
    if dims is None or lengths is None or labels is None or not len(lengths):
        return None
    num_samples = min(len(lengths), max(1, round(info.derived.samples_per_micro_batch)))
    longest = np.partition(lengths, len(lengths) - num_samples)[-num_samples:]
    is_packed = train_args.packing is not False
    tokens = float(longest.sum() if is_packed else num_samples * longest.max())
    if train_args.packs_rows:
        tokens = info.derived.samples_per_micro_batch * train_args.max_length
    return language_activations(
        dims,
        info.config,
        tokens,
        tokens * float(labels.sum() / lengths.sum()),
        mask_bytes=4 if info.strategy.world.device.type == "cpu" else 1,
        device_type=info.strategy.world.device.type,
        fused_attention=attention_of(base) != "eager",
        row=tokens if is_packed else float(longest.max()),
        joined=kernel_of(base) == SDPA,
        low_weights=info.layout.has_low_weights,
        tensor_ranks=info.layout.axes.tensor,
    )


def _versions() -> dict[str, str]:
    packages = {"paceline": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "peft"):
        module = sys.modules.get(name)
        if module is not None:
            packages[name] = str(module.__version__)
    return packages
