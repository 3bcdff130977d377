"""The full training state as named tensors: what a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.engine.train import Session


def training_state(session: Session) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer by the strategy; schedule, random state and data position as numbers.

    Random state is (seed, step): every draw is a function of them (see :mod:`paceline.world.seeds`), so nothing else is
    needed to go on exactly. Whole on rank 0, empty elsewhere.
    """
    state = session.strategy.full_state()
    if not session.world.is_first:
        return {}
    epoch, place = divmod(session.step, session.order.steps_per_epoch)
    numbers = {
        "random/seed": session.config.train_args.seed,
        "schedule/step": session.step,
        "data/epoch": epoch,
        "data/position": place * session.order.batch_size,
    }
    return state | {name: torch.tensor(value) for name, value in numbers.items()} | session.precision.state()


def load_training_state(session: Session, state: dict[str, torch.Tensor] | None, step: int) -> None:
    """The reverse, on every rank; ``state`` is needed on rank 0 only."""
    given = state or {}
    session.strategy.load_full_state(given)
    scaler = {name: float(value) for name, value in given.items() if name.startswith("scaler/")}
    session.precision.load_state(session.world.broadcast_object(scaler))  # type: ignore[arg-type]
    session.step = session.first_step = session.saved_step = step
