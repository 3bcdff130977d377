"""What a run says of itself when it begins: the ``run_start`` event, and what is known by then."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.core.processes import host_name
from paceline.models.shape.activations import Activations, dims_of, language_activations
from paceline.observe.report.build import workload
from paceline.tasks.language import LanguageTask

if TYPE_CHECKING:
    from paceline.train.run_spec import RunSpec
    from paceline.train.trainer import Session


def announce(
    session: Session, spec: RunSpec, notices: list[tuple[str, str]], resumed: str | None
) -> None:
    """Emit ``run_start`` and what follows it; a collective. ``notices``: (level, text) that nobody
    has seen yet; ``resumed``: the checkpoint that the run goes on from."""
    mesh = _mesh(session, spec)
    if not session.world.is_rank_zero:
        return
    emit = session.events.emit
    emit(
        "run_start",
        config=spec.config.model_dump(mode="json"),
        derived=spec.derived.as_dict(),
        world_size=session.derived.world_size,
        axes=asdict(spec.layout.axes),
        mesh=mesh,
        predicted=_predicted(session, spec),
        device=str(session.world.device.type),
        precision=spec.config.train_args.precision,
        strategy=session.strategy.name,
        model={
            "name": spec.config.model,
            "parameters": sum(one.numel for one in session.shape.parameters),
            "trainable_parameters": sum(one.numel for one in session.shape.trained),
        },
        data=spec.data.counts.as_dict(),
        versions=_versions(),
        pid=os.getpid(),
        launcher=spec.launcher_pid,
        host=host_name(),
        output_dir=str(session.run_dir.root),
        resumed_from_step=session.first_step if resumed else None,
    )
    if spec.failure is not None:
        emit("fault", file_only=True, **spec.failure)
    for level, text in spec.notices:
        # by the launcher, while the ranks were starting
        session.events.notice(text, level, file_only=True)
    for level, text in notices:
        session.events.notice(text, level)
    if resumed:
        emit("resume", step=session.first_step, path=resumed)


def _mesh(session: Session, spec: RunSpec) -> dict[str, Any]:
    """``{axes: {name: size}, ranks: [{rank, host, device, coordinates: {axis: n}}]}``. A rank that
    has no share of the model's mesh has no coordinates, and a ``role``; one process that drives
    several devices names them all."""
    strategy, axes = session.strategy, spec.layout.axes
    devices = getattr(strategy, "devices", [session.world.device])
    told: list[Any] = session.world.gather_objects((host_name(), ", ".join(map(str, devices))))
    ranks = []
    for rank, (host, device) in enumerate(told):
        places = session.world.axes.coordinates(rank) if rank < session.world.axes.size else {}
        at = {axis: places[axis] for axis in asdict(axes) if axis in places}
        role = strategy.rank_role(spec.config, axes, rank)
        more = {} if role is None else {"role": role}
        ranks.append({"rank": rank, "host": host, "device": device, "coordinates": at, **more})
    return {"axes": asdict(axes), "ranks": ranks}


def _predicted(session: Session, spec: RunSpec) -> dict[str, Any]:
    """What the strategy declares: bytes on the fullest rank, and bytes that the busiest rank sends
    in a step."""
    work, kept = workload(session), _activations(session)
    if kept is not None:
        blocks = kept.blocks if len(session.shape.blocks) == kept.layers else ()
        work = replace(work, activation_bytes=kept.total, block_activation_bytes=blocks)
    cost = session.strategy.estimate_cost(session.shape, spec.layout.axes, work, session.config)
    activations = None if kept is None else cost.activations
    memory = {
        "parameters": cost.parameters,
        "gradients": cost.gradients,
        "optimizer": cost.optimizer,
    }
    return {
        "memory_bytes": {
            **memory,
            "activations": activations,
            "total": cost.state + (activations or 0),
        },
        "traffic_bytes_per_step": cost.traffic_per_step,
        "traffic_bytes": {name: size for name, size in cost.traffic.items() if size},
        "traffic_is_bound": cost.traffic_is_bound,
    }


def _activations(session: Session) -> Activations | None:
    """Of the fullest micro-batch; None where the model's widths do not tell, as with all that are
    no language models."""
    model: Any = session.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    lengths, labels = (
        getattr(session.train_dataset, name, None) for name in ("lengths", "label_counts")
    )
    dims = (
        dims_of(base.config.to_dict())
        if isinstance(session.task, LanguageTask) and hasattr(base, "config")
        else None
    )
    if dims is None or lengths is None or labels is None or not len(lengths):
        return None
    many = min(len(lengths), max(1, round(session.derived.samples_per_micro_batch)))
    longest = np.partition(lengths, len(lengths) - many)[-many:]
    tokens = float(
        longest.sum() if session.config.train_args.packing is not False else many * longest.max()
    )
    return language_activations(
        dims,
        session.config,
        tokens,
        tokens * float(labels.sum() / lengths.sum()),
        mask_bytes=4 if session.world.device.type == "cpu" else 1,
        fused_attention=getattr(base.config, "_attn_implementation", "sdpa") != "eager",
        longest=min(tokens, session.config.train_args.max_length),
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
