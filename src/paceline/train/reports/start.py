"""Emit the ``run_start`` event, which describes a run at its start."""

import logging
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from paceline.core.events import (
    Mesh,
    MeshRank,
    ModelFigures,
    Prediction,
    RunStartEvent,
)
from paceline.core.log import log_notices
from paceline.core.processes import host_name
from paceline.core.report import PackingFigures, PeakRate
from paceline.models.attention import attention_of, kernel_of
from paceline.models.blocks import base_model
from paceline.models.kernels.attention_choice import SDPA
from paceline.models.kernels.layer_kernels import has_attention, layer_kernels
from paceline.models.shape.activations import Activations, language_activations
from paceline.models.shape.adapter_memory import merged_experts
from paceline.models.shape.dims import dims_of
from paceline.models.tensor_plan.style import HEAD, uses_sequence_parallel
from paceline.parallel.registry import estimate_cost, get_spec
from paceline.train.reports.figures import data_figures, workload
from paceline.train.trainer import Trainer
from paceline.version import __version__

logger = logging.getLogger(__name__)


def emit_run_start(
    trainer: Trainer, peak: PeakRate | None, notices: Sequence[tuple[str, str]]
) -> None:
    """Emit ``run_start`` and the events that follow it. A collective.

    Args:
        peak: the peak rate of a device; None if unknown.
        notices: (level, text) of the messages that have not been printed yet.
    """
    spec, events, path = trainer.spec, trainer.ctx.events, trainer.resumed_from
    first_step = trainer.state.first_step
    mesh = _mesh(trainer)
    if not trainer.strategy.world.is_rank_zero:
        return
    config = spec.config
    start: RunStartEvent = {
        "type": "run_start",
        "config": config.model_dump(mode="json"),
        "derived": trainer.spec.derived.as_dict(),
        "world_size": trainer.spec.derived.world_size,
        "axes": asdict(trainer.spec.layout.axes),
        "mesh": mesh,
        "predicted": _predicted(trainer, first_step),
        "device": str(trainer.strategy.world.device.type),
        "peak": peak,
        "precision": config.train_args.precision,
        "strategy": trainer.strategy.name,
        "model": {
            "name": config.model,
            "parameters": trainer.components.shape.num_parameters,
            "trainable_parameters": sum(param.numel for param in trainer.components.shape.trained),
            **_kernels(base_model(trainer.components.model)),
        },
        "data": data_figures(trainer),
        "versions": _versions(),
        "pid": os.getpid(),
        "launcher": spec.launcher_pid,
        "host": host_name(),
        "output_dir": str(trainer.ctx.run_dir.root),
        "cwd": os.getcwd(),
        "command_started_at": spec.started_at,
        "resumed_from_step": None if path is None else first_step,
    }
    if trainer.has_packed_rows:
        start["packing"] = _packing(trainer)
    if trainer.spec.data.source_figures:
        start["sources"] = list(trainer.spec.data.source_figures)
    events.emit(start)
    if spec.memory_fallback is not None:
        events.emit(spec.memory_fallback, file_only=True)
    elif spec.failure is not None:
        events.emit({"type": "fault", **spec.failure}, file_only=True)
    for level, text in spec.notices:
        events.notice(text, level, file_only=True)
    log_notices(logger, notices)
    if path is not None:
        events.emit({"type": "resume", "step": first_step, "path": path})


def _kernels(model: Any) -> ModelFigures:
    """Return what computes the layers of a model."""
    return {
        "attention": kernel_of(model) if has_attention(model) else None,
        "layers": [
            {"kind": each.kind, "kernel": each.kernel, "missing": list(each.missing)}
            for each in layer_kernels(model)
        ],
    }


def _packing(trainer: Trainer) -> PackingFigures:
    args, sources = trainer.spec.config.train_args, trainer.spec.data.sources
    rows = [source.num_rows for source in sources]
    if trainer.is_streamed:
        return {"strategy": args.packing_strategy, "capacity": args.max_length}
    tokens = sum(source.tokens for source in sources)
    return {
        "strategy": args.packing_strategy,
        "rows": rows,
        "capacity": args.max_length,
        "fill": tokens / (sum(rows) * args.max_length),
    }


def _mesh(trainer: Trainer) -> Mesh:
    """Return ``{axes: {name: size}, ranks: [{rank, host, device, coordinates: {axis: n}}]}``.

    A rank outside the model's mesh has a ``role`` instead of coordinates. For a process that uses
    several devices, ``device`` lists all of them.
    """
    strategy, axes = trainer.strategy, trainer.spec.layout.axes
    comm = strategy.world
    devices = ", ".join(map(str, strategy.devices))
    by_rank: list[Any] = comm.gather_objects((host_name(), devices))
    ranks: list[MeshRank] = []
    for rank, (host, device) in enumerate(by_rank):
        dims = comm.axes.coordinates(rank) if rank < comm.axes.size else {}
        coordinates = {axis: dims[axis] for axis in asdict(axes) if axis in dims}
        role = get_spec(trainer.spec.layout.strategy).rank_role(trainer.spec.config, axes, rank)
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


def _predicted(trainer: Trainer, step: int) -> Prediction:
    """Return the predictions of the strategy: the maximum memory of a rank, and the maximum number
    of bytes that a rank sends in a step."""
    spec, shape = trainer.spec, trainer.components.shape
    work, activations = workload(trainer, step), _activations(trainer)
    if activations is not None:
        work = replace(work, activations=activations.of_model(len(shape.blocks)))
    cost = estimate_cost(spec.layout.strategy, shape, spec.layout.axes, work, spec.config)
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


def _activations(trainer: Trainer) -> Activations | None:
    """Return the predicted activations of the largest micro-batch, or None if they cannot be
    predicted, as for all models except language models."""
    model: Any = trainer.components.model
    base, dataset, spec = base_model(model), trainer.data.train_dataset, trainer.spec
    shape = trainer.components.shape
    train_args = spec.config.train_args
    lengths, labels = getattr(dataset, "lengths", None), getattr(dataset, "label_counts", None)
    dims = None
    if trainer.components.task.is_language_model and hasattr(base, "config"):
        dims = dims_of(base.config.to_dict())
    if dims is None or lengths is None or labels is None or not len(lengths):
        return None
    num_samples = min(len(lengths), max(1, round(spec.derived.samples_per_micro_batch)))
    longest = np.partition(lengths, len(lengths) - num_samples)[-num_samples:]
    is_packed = train_args.packing is not False
    tokens = float(longest.sum() if is_packed else num_samples * longest.max())
    if train_args.packs_rows:
        tokens = spec.derived.samples_per_micro_batch * train_args.max_length
    return language_activations(
        dims,
        spec.config,
        tokens,
        tokens * float(labels.sum() / lengths.sum()),
        mask_bytes=4 if trainer.strategy.world.device.type == "cpu" else 1,
        device_type=trainer.strategy.world.device.type,
        fused_attention=attention_of(base) != "eager",
        row=tokens if is_packed else float(longest.max()),
        joined=kernel_of(base) == SDPA,
        low_weights=spec.layout.has_low_weights,
        tensor_ranks=spec.layout.axes.tensor,
        splits_head=HEAD in shape.tensor_plan.values(),
        sequence_parallel=uses_sequence_parallel(
            spec.config.parallel.sequence_parallel,
            spec.layout.axes.tensor,
            spec.layout.axes.pipeline,
            shape.splits_tokens,
        ),
        merged=merged_experts(shape),
        expert_ranks=spec.layout.axes.expert,
    )


def _versions() -> dict[str, str]:
    packages = {"paceline": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "peft"):
        module = sys.modules.get(name)
        if module is not None:
            packages[name] = str(module.__version__)
    return packages
