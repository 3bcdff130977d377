"""What a run says of itself when it begins: the ``run_start`` event, and what is known by then."""

import logging
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.config.derive import ResolvedValues
from paceline.config.schema import Config
from paceline.core.event_log import EventLog
from paceline.core.events import DataFigures, Fault, Mesh, MeshRank, Prediction
from paceline.core.log import log_notices
from paceline.core.processes import host_name
from paceline.core.run_dir import RunDir
from paceline.data.order import SampleOrder
from paceline.models.attention import attention_of
from paceline.models.blocks import base_model
from paceline.models.shape.activations import Activations, dims_of, language_activations
from paceline.models.shape.record import ModelShape
from paceline.parallel.base import Strategy
from paceline.parallel.cost import Workload
from paceline.parallel.parameter_server.cost import distinct_ids
from paceline.parallel.registry import ParallelLayout, estimate_cost, get_spec

logger = logging.getLogger(__name__)

#: Steps whose micro-batches are counted to estimate how many distinct ids one has.
_COUNTED_STEPS = 8


@dataclass(frozen=True)
class RunInfo:
    """A run as rank 0 describes it.

    Args:
        data_counts: the accounting of the training data.
        started_at: when the command began, in seconds since the epoch.
        model: as the strategy placed it.
        shape: of the model as the task built it.
        predicts_activations: the model is a language model, whose widths give the size of its
            activations.
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
    order: SampleOrder
    predicts_activations: bool

    def workload(self, step: int) -> Workload:
        """Return the mean work of a replica in a step, as far as it is known at ``step``."""
        derived = self.derived
        lengths = getattr(self.train_dataset, "lengths", None)
        mean_length = 1.0 if lengths is None else float(np.mean(lengths))
        return Workload(
            derived.gradient_accumulation_steps,
            derived.samples_per_micro_batch * mean_length,
            distinct=self._distinct_ids(step),
        )

    def _distinct_ids(self, step: int) -> tuple[tuple[float, ...], ...]:
        """Return how many ids a micro-batch asks of each table and server, counted in some
        micro-batches of the run; empty if the data have no ids."""
        count_ids = getattr(self.train_dataset, "distinct_ids", None)
        if count_ids is None or self.strategy.name != "parameter_server" or step == 0:
            return ()
        num_parts = self.derived.replicas * self.derived.gradient_accumulation_steps
        steps = sorted({step * number // _COUNTED_STEPS for number in range(_COUNTED_STEPS)})
        micro_batches = (
            part for counted in steps for part in self.order.micro_batches(counted, num_parts)
        )
        counts = [count_ids(part) for part in micro_batches if len(part)]
        num_servers = self.config.parameter_server.num_servers
        return distinct_ids(counts, self.train_dataset.tables, num_servers)


def emit_run_start(
    info: RunInfo,
    events: EventLog,
    *,
    resumed: tuple[str, int] | None,
    failure: Fault | None,
    launcher_pid: int | None,
    launcher_notices: Sequence[tuple[str, str]],
    notices: Sequence[tuple[str, str]],
) -> None:
    """Emit ``run_start`` and what follows it; a collective.

    Args:
        resumed: the checkpoint that the run continues from, and its step.
        failure: the fields of the ``fault`` event, if a failure ended the attempt before this one.
        launcher_notices: (level, text) of each message that the launcher has printed.
        notices: (level, text) of each message that is not printed yet.
    """
    mesh = _mesh(info)
    if not info.strategy.world.is_rank_zero:
        return
    config = info.config
    events.emit(
        {
            "type": "run_start",
            "config": config.model_dump(mode="json"),
            "derived": info.derived.as_dict(),
            "world_size": info.derived.world_size,
            "axes": asdict(info.layout.axes),
            "mesh": mesh,
            "predicted": _predicted(info, 0 if resumed is None else resumed[1]),
            "device": str(info.strategy.world.device.type),
            "precision": config.train_args.precision,
            "strategy": info.strategy.name,
            "model": {
                "name": config.model,
                "parameters": sum(param.numel for param in info.shape.parameters),
                "trainable_parameters": sum(param.numel for param in info.shape.trained),
            },
            "data": info.data_counts,
            "versions": _versions(),
            "pid": os.getpid(),
            "launcher": launcher_pid,
            "host": host_name(),
            "output_dir": str(info.run_dir.root),
            "resumed_from_step": None if resumed is None else resumed[1],
        }
    )
    if failure is not None:
        events.emit({"type": "fault", **failure}, file_only=True)
    for level, text in launcher_notices:
        events.notice(text, level, file_only=True)
    log_notices(logger, notices)
    if resumed is not None:
        path, step = resumed
        events.emit({"type": "resume", "step": step, "path": path})


def _mesh(info: RunInfo) -> Mesh:
    """``{axes: {name: size}, ranks: [{rank, host, device, coordinates: {axis: n}}]}``. A rank that
    has no share of the model's mesh has no coordinates, and a ``role``; one process that drives
    several devices names them all."""
    strategy, axes = info.strategy, info.layout.axes
    comm = strategy.world
    devices = getattr(strategy, "devices", [comm.device])
    by_rank: list[Any] = comm.gather_objects((host_name(), ", ".join(map(str, devices))))
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
    """What the strategy declares: bytes on the fullest rank, and bytes that the busiest rank sends
    in a step."""
    work, kept = info.workload(step), _activations(info)
    if kept is not None:
        blocks = kept.blocks if len(info.shape.blocks) == kept.layers else ()
        work = replace(work, activation_bytes=kept.total, block_activation_bytes=blocks)
    cost = estimate_cost(info.layout.strategy, info.shape, info.layout.axes, work, info.config)
    activations = None if kept is None else cost.activations
    return {
        "memory_bytes": {
            "parameters": cost.parameters,
            "gradients": cost.gradients,
            "optimizer": cost.optimizer,
            "activations": activations,
            "total": cost.state + (activations or 0),
        },
        "traffic_bytes_per_step": cost.traffic_per_step,
        "traffic_bytes": {name: size for name, size in cost.traffic.items() if size},
        "traffic_is_bound": cost.traffic_is_bound,
    }


def _activations(info: RunInfo) -> Activations | None:
    """Of the fullest micro-batch; None where the model's widths do not tell, as with all that are
    no language models."""
    model: Any = info.model
    base = base_model(model)
    lengths, labels = (
        getattr(info.train_dataset, name, None) for name in ("lengths", "label_counts")
    )
    dims = (
        dims_of(base.config.to_dict())
        if info.predicts_activations and hasattr(base, "config")
        else None
    )
    if dims is None or lengths is None or labels is None or not len(lengths):
        return None
    many = min(len(lengths), max(1, round(info.derived.samples_per_micro_batch)))
    longest = np.partition(lengths, len(lengths) - many)[-many:]
    tokens = float(
        longest.sum() if info.config.train_args.packing is not False else many * longest.max()
    )
    return language_activations(
        dims,
        info.config,
        tokens,
        tokens * float(labels.sum() / lengths.sum()),
        mask_bytes=4 if info.strategy.world.device.type == "cpu" else 1,
        fused_attention=attention_of(base) != "eager",
        longest=min(tokens, info.config.train_args.max_length),
    )


def _versions() -> dict[str, str]:
    from paceline.version import __version__

    found = {
        "paceline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("transformers", "peft"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(module.__version__)
    return found
