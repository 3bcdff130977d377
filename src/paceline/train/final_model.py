"""Write the trained model to ``model/`` at the end of a run."""

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
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.parallel.state import load_full
from paceline.train.state import RankContext, TrainComponents


def save_model_folder(
    ctx: RankContext,
    components: TrainComponents,
    build: Callable[[], nn.Module],
    step: int,
) -> None:
    """Write ``model/`` atomically, on rank 0. A collective.

    Args:
        build: function that returns a new model of the task.
        step: step of the last checkpoint, which contains the trained weights.

    Raises:
        RunError: if the model could not be written.
    """
    folder = _staging_dir(ctx.run_dir)
    with (
        components.strategy.consolidated(),
        rank_zero_phase(ctx.comm, "writing the trained model", folder),
    ):
        if ctx.comm.is_rank_zero:
            _write_model(ctx.run_dir, components, build, step)
    ctx.comm.barrier()


def _staging_dir(run_dir: RunDir) -> Path:
    """Return the hidden folder to which this process writes the model."""
    return run_dir.model.with_name(f".{run_dir.model.name}.{os.getpid()}.tmp")


def _write_model(
    run_dir: RunDir, components: TrainComponents, build: Callable[[], nn.Module], step: int
) -> None:
    task, model = components.task, components.model
    final = run_dir.model
    staging_dir = _staging_dir(run_dir)
    for leftover in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        staging_dir.mkdir()
        is_saved = False
        if not components.strategy.rank0_has_full_model:
            # If the task supports it, it converts the checkpoint shard by shard, so that no process
            # holds the full model. Otherwise a new model is loaded into host memory.
            with CheckpointReader(run_dir.checkpoints / name_of(step)) as reader:
                is_saved = task.save_from(reader, staging_dir)
                if not is_saved:
                    model = build()
                    load_full(model, reader)
        if not is_saved:
            with _separate_storage(model):
                task.save_model(model, staging_dir)
        replace_dir(staging_dir, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging_dir, ignore_errors=True)
        free_bytes = shutil.disk_usage(final.parent).free
        raise RunError(
            "the trained model could not be written to {final}: {reason} ({free_bytes} free)",
            code="model-not-written",
            fix="free some space; the same command then resumes from the last checkpoint and"
            " writes the model",
            final=final,
            reason=reason_of(error),
            free_bytes=human_bytes(free_bytes),
        ) from error


@contextmanager
def _separate_storage(model: nn.Module) -> Iterator[None]:
    """Give each parameter a separate storage within the block, because safetensors rejects
    parameters that share a storage, as those in a bucket do."""
    views = {
        param: param.data
        for param in model.parameters()
        if param.untyped_storage().nbytes() > param.numel() * param.element_size()
    }
    for param, values in views.items():
        param.data = values.clone()
    try:
        yield
    finally:
        for param, values in views.items():
            param.data = values
