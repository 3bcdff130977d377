"""The full training state as named tensors: what a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.parallel.base import Part, StateSource

if TYPE_CHECKING:
    from paceline.engine.train import Session


def training_state(session: Session) -> list[Part]:
    """What this rank writes into a checkpoint: parameters, buffers and optimizer by the strategy; schedule, random state and data
    position as numbers, by rank 0.

    Random state is (seed, step): every draw is a function of them (see :mod:`paceline.world.seeds`), so nothing else is
    needed to go on exactly.
    """
    parts = session.strategy.state()
    if not session.world.is_first:
        return parts
    epoch, place = divmod(session.step, session.order.steps_per_epoch)
    numbers = {
        "random/seed": session.config.train_args.seed,
        "schedule/step": session.step,
        "data/epoch": epoch,
        "data/position": place * session.order.batch_size,
    }
    tensors = {name: torch.tensor(value) for name, value in numbers.items()} | session.precision.state()
    return parts + [Part.whole(name, value) for name, value in tensors.items()]


def load_training_state(session: Session, source: StateSource, step: int) -> None:
    """The reverse, on every rank."""
    session.strategy.load_state(source)
    scaler = {name: float(source.read(name, (), ())) for name in source.tensors() if name.startswith("scaler/")}
    session.precision.load_state(scaler)
    session.step = session.first_step = step
    session.saver.last_step = step
