"""The trained model's folder, ``model/``, at the end of a run."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from paceline.checkpoint.format import name_of
from paceline.checkpoint.reader import CheckpointReader
from paceline.checkpoint.writer import reason_of
from paceline.core.errors import RunError
from paceline.core.files import human_bytes, replace_dir
from paceline.core.run_dir import RunDir
from paceline.parallel.base import load_whole
from paceline.parallel.protocols import consolidated
from paceline.train.state import RankContext, TrainComponents


def save_model_folder(
    ctx: RankContext,
    components: TrainComponents,
    build: Callable[[], nn.Module],
    step: int,
    handle_rank_loss: Callable[[], object],
) -> None:
    """Write ``model/``, which appears whole, on rank 0. A collective.

    Args:
        build: makes the model as the task does.
        step: of the last checkpoint, which holds the model.
        handle_rank_loss: called on every rank after the model was written.

    Raises:
        RunError: it could not be written.
    """
    lost_ranks = None
    while lost_ranks != ctx.comm.lost:  # again if the rank that wrote it was lost
        lost_ranks = ctx.comm.lost
        with consolidated(components.strategy):
            if ctx.comm.is_rank_zero:
                _write_model(ctx.run_dir, components, build, step)
        ctx.comm.barrier()
        handle_rank_loss()


def _write_model(
    run_dir: RunDir, components: TrainComponents, build: Callable[[], nn.Module], step: int
) -> None:
    path = run_dir.checkpoints / name_of(step)
    final = run_dir.model
    aside = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    for old in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(old, ignore_errors=True)
    try:
        aside.mkdir()
        if not _save_from_checkpoint(components, path, aside):
            model = _whole_model(components, build, path)
            with _own_memory(model):
                components.task.save_model(model, aside)
        replace_dir(aside, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunError(
            f"the trained model could not be written to {final}: {reason_of(error)} (free: "
            f"{human_bytes(shutil.disk_usage(final.parent).free)})",
            fix="free some space; the same command goes on from the last checkpoint and writes it",
        ) from error


@contextmanager
def _own_memory(model: nn.Module) -> Iterator[None]:
    """For the while, each parameter has memory of its own. Where it lies in a bucket with others,
    safetensors refuses it."""
    views = {
        one: one.data
        for one in model.parameters()
        if one.untyped_storage().nbytes() > one.numel() * one.element_size()
    }
    for one, values in views.items():
        one.data = values.clone()
    try:
        yield
    finally:
        for one, values in views.items():
            one.data = values


def _save_from_checkpoint(components: TrainComponents, path: Path, folder: Path) -> bool:
    """Write the model from the shards of the last checkpoint, if the task can, so that no process
    holds the whole model."""
    if components.strategy.rank0_has_full_model:
        return False
    with CheckpointReader(path) as reader:
        return components.task.save_from(reader, folder)


def _whole_model(
    components: TrainComponents, build: Callable[[], nn.Module], path: Path
) -> nn.Module:
    """Return the trained model as the task built it: the one at hand, or, if it is spread over
    ranks, a new one in the host's memory, filled from the last checkpoint."""
    if components.strategy.rank0_has_full_model:
        return components.model
    model = build()
    with CheckpointReader(path) as reader:
        load_whole(model, reader)
    return model
