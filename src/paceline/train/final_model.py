"""The trained model's folder, ``model/``, at the end of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from paceline.checkpoint import store
from paceline.core.errors import RunError
from paceline.core.files import human_bytes, replace_dir
from paceline.parallel.base import load_whole
from paceline.train.rank_loss import regroup
from paceline.train.trainer import Session


def save_model_folder(session: Session, build: Callable[[], nn.Module]) -> None:
    """``model/`` appears whole, written by rank 0. A collective. ``build`` makes the model as the
    task does.

    Raises:
        RunError: it could not be written.
    """
    lost = None
    while lost != session.world.lost:  # once more where the rank that wrote it was lost
        lost = session.world.lost
        with session.strategy.consolidated():
            if session.world.is_rank_zero:
                _write_model(session, build)
        session.world.barrier()
        regroup(session)


def _write_model(session: Session, build: Callable[[], nn.Module]) -> None:
    final = session.run_dir.model
    aside = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    for old in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(old, ignore_errors=True)
    try:
        aside.mkdir()
        if not _save_from_parts(session, aside):
            model = _whole_model(session, build)
            with _own_memory(model):
                session.task.save_model(model, aside)
        replace_dir(aside, final)
    except store.write_errors() as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunError(
            f"the trained model could not be written to {final}: {store.reason_of(error)} (free: "
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


def _save_from_parts(session: Session, folder: Path) -> bool:
    """Write the model out of the last checkpoint's parts, where the task can, so that no process
    holds it whole."""
    if session.strategy.rank0_has_full_model:
        return False
    with store.CheckpointReader(
        session.run_dir.checkpoints / store.name_of(session.step)
    ) as reader:
        return session.task.save_from(reader, folder)


def _whole_model(session: Session, build: Callable[[], nn.Module]) -> nn.Module:
    """The trained model as the task built it: the one at hand, or, where it is spread over ranks, a
    new one in the host's memory, filled from the checkpoint of the last step."""
    if session.strategy.rank0_has_full_model:
        return session.model
    model = build()
    with store.CheckpointReader(
        session.run_dir.checkpoints / store.name_of(session.step)
    ) as reader:
        load_whole(model, reader)
    return model
