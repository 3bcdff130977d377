"""The full training state as named tensors: what a checkpoint holds."""

import hashlib

import torch
from torch import nn

from paceline.checkpoint.transfer import OpenCheckpoint
from paceline.core.errors import ConfigError
from paceline.data.order import SampleOrder
from paceline.models.shape.record import ModelShape
from paceline.parallel.base import Strategy
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.save_load import load_state, state_shards
from paceline.parallel.state import StateReader, TensorShard


def collect_train_state(
    strategy: Strategy, step: int, order: SampleOrder, scaler: LossScaler | None
) -> list[TensorShard]:
    """Return what this rank writes into a checkpoint: parameters, buffers and optimizer by the
    strategy; schedule, random state and data position as numbers, by rank 0.

    Random state is (seed, step): every draw is a function of them (see
    :mod:`paceline.distributed.seeds`), so nothing else is needed to continue exactly.
    """
    shards = state_shards(strategy)
    if not strategy.world.is_rank_zero:
        return shards
    epoch, position = divmod(step, order.steps_per_epoch)
    numbers = {
        "random/seed": order.seed,
        "schedule/step": step,
        "data/epoch": epoch,
        "data/position": position * order.batch_size,
    }
    tensors = {name: torch.tensor(value) for name, value in numbers.items()}
    if scaler is not None:
        tensors |= {f"scaler/{name}": value for name, value in scaler.state().items()}
    return shards + [TensorShard.whole(name, value) for name, value in tensors.items()]


#: Elements of each frozen parameter that its digest is made of: another model differs in nearly
#: all.
_SAMPLED = 256


def frozen_digest(model: nn.Module) -> str | None:
    """Changes when the parameters do that are not trained, and that a checkpoint therefore does not
    hold: SHA-256 over their names, dtypes, shapes, and some of their elements. None where all are
    trained."""
    frozen = sorted(
        (name, one.detach()) for name, one in model.named_parameters() if not one.requires_grad
    )
    digest = hashlib.sha256()
    for name, one in frozen:
        digest.update(f"{name} {one.dtype} {list(one.shape)}\n".encode())
        if not one.is_meta and one.numel():
            some = one.reshape(-1)[:: max(1, one.numel() // _SAMPLED)]
            digest.update(some.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if frozen else None


def check_same_model(
    opened: OpenCheckpoint, path: str, shape: ModelShape, frozen: str | None
) -> None:
    """Raise ConfigError if the checkpoint ``path`` is not of a model of this shape with these
    frozen weights (see :func:`frozen_digest`): nothing was written yet."""
    stored = {
        name.removeprefix("model/"): one[1]
        for name, one in opened.tensors().items()
        if name.startswith("model/")
    }
    trained = {one.name: one.shape for one in shape.trained}
    lines = [
        f"{name}: {list(stored[name])} there, {list(trained[name])} here"
        for name in stored.keys() & trained.keys()
        if tuple(stored[name]) != trained[name]
    ]
    lines += [f"{name} is trained there, not here" for name in stored.keys() - trained.keys()]
    lines += [f"{name} is trained here, not there" for name in trained.keys() - stored.keys()]
    if lines:
        more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        raise ConfigError(
            f"{path} is a checkpoint of another model: {'; '.join(sorted(lines)[:3])}{more}",
            allowed=(
                f"a checkpoint with the {len(trained)} trained weights of this model, in their"
                " shapes"
            ),
            fix=(
                "set `model`, `lora` and the task as they were, or another `output_dir` for a"
                " new run"
            ),
        )
    stored_digest = opened.meta.get("frozen")
    if None not in (stored_digest, frozen) and stored_digest != frozen:
        raise ConfigError(
            f"{path} was trained on top of other weights: the frozen ones of the model, which no"
            " checkpoint holds, are not what they were",
            fix=(
                "put the files of `model` back as they were (of a hub model, the same revision), or"
                " set another `output_dir` for a new run"
            ),
        )


def load_train_state(strategy: Strategy, source: StateReader, scaler: LossScaler | None) -> None:
    """Load a checkpoint into the strategy and the loss scaler, on every rank."""
    names = source.tensors()
    # before what a strategy keeps of its own scale
    if scaler is not None and "scaler/scale" in names:
        scale, growth_tracker = (
            float(source.read(f"scaler/{name}", (), ())) for name in ("scale", "growth_tracker")
        )
        scaler.load(scale, growth_tracker)
    load_state(strategy, source)
    if not strategy.replicas_diverge and any(name.startswith("local/") for name in names):
        text = (
            "the checkpoint is of workers that trained on their own: this goes on from the mean of"
            " their parameters and the first one's optimizer; the rest of their state is dropped"
        )
        strategy.notices.append(("warning", text))
