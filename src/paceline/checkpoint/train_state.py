"""Collect and load the training state of a run as named tensors, which are the content of a
checkpoint."""

import hashlib

import torch
from torch import nn

from paceline.checkpoint.transfer import OpenCheckpoint
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.order.base import Order
from paceline.models.shape.record import ModelShape
from paceline.models.weights.load import final_dtype
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.save_load import load_state
from paceline.parallel.state import StateReader, TensorShard
from paceline.parallel.strategy import Strategy

#: Number of elements of each frozen parameter that are part of the digest.
_NUM_SAMPLED = 256


def collect_train_state(
    strategy: Strategy, step: int, order: Order, scaler: LossScaler | None
) -> list[TensorShard]:
    """Return what this rank writes to a checkpoint: its shards of parameters, buffers and optimizer
    state, and on rank 0 also the learning-rate schedule, the random state and the position in the
    data.

    The random state is (seed, step): every random number is a function of these two (see
    :mod:`paceline.distributed.seeds`), so they suffice to continue exactly.
    """
    shards = strategy.state_shards()
    if not strategy.world.is_rank_zero:
        return shards
    epoch, position = order.position(step)
    numbers = {
        "random/seed": order.seed,
        "schedule/step": step,
        "data/epoch": epoch,
        "data/position": position,
    }
    tensors = {name: torch.tensor(value) for name, value in numbers.items()}
    if scaler is not None:
        tensors |= {f"scaler/{name}": value for name, value in scaler.state().items()}
    return shards + [TensorShard.full(name, value) for name, value in tensors.items()]


def frozen_digest(model: nn.Module) -> str | None:
    """Return a digest of the frozen parameters, which a checkpoint does not contain: the SHA-256 of
    their names, dtypes, shapes and some of their elements. None if all parameters are trained."""
    frozen = sorted(
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    )
    digest = hashlib.sha256()
    for name, values in frozen:
        dtype = final_dtype(values)
        digest.update(f"{name} {dtype} {list(values.shape)}\n".encode())
        if not values.is_meta and values.numel():
            flat = values.detach().reshape(-1)
            sample = flat[:: max(1, values.numel() // _NUM_SAMPLED)].to(dtype)
            digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if frozen else None


def check_same_model(
    opened: OpenCheckpoint, path: str, shape: ModelShape, frozen: str | None
) -> None:
    """Check that the checkpoint ``path`` belongs to a model with this shape and these frozen
    weights (see :func:`frozen_digest`).

    Raises:
        ConfigError: it is not.
    """
    stored = {
        name.removeprefix("model/"): tensor_shape
        for name, (_, tensor_shape) in opened.tensors().items()
        if name.startswith("model/")
    }
    trained = {parameter.name: parameter.shape for parameter in shape.trained}
    differences = [
        f"{name} has shape {list(stored[name])} in the checkpoint, {list(trained[name])} in the"
        " model"
        for name in stored.keys() & trained.keys()
        if tuple(stored[name]) != trained[name]
    ]
    differences += [f"{name} is only in the checkpoint" for name in stored.keys() - trained.keys()]
    differences += [
        f"{name} is trained, but not in the checkpoint" for name in trained.keys() - stored.keys()
    ]
    if differences:
        rest = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ConfigError(
            "{path} is a checkpoint of another model: {differences}{rest}",
            code="checkpoint-of-another-model",
            allowed="a checkpoint with the {num_trained} trained weights of this model",
            fix="restore `model`, `lora` and the task, or set another `output_dir` for a new run",
            path=path,
            differences="; ".join(sorted(differences)[:3]),
            rest=rest,
            num_trained=len(trained),
        )
    stored_digest = opened.meta.get("frozen")
    if None not in (stored_digest, frozen) and stored_digest != frozen:
        raise ConfigError(
            "{path} was trained with other frozen weights: the model's weights, which checkpoints"
            " do not contain, have changed",
            code="changed-frozen-weights",
            fix="restore the files of `model` (of a hub model, the same revision), or set another"
            " `output_dir` for a new run",
            path=path,
        )


def load_train_state(strategy: Strategy, source: StateReader, scaler: LossScaler | None) -> None:
    """Load a checkpoint into the strategy and the loss scaler, on every rank."""
    names = source.tensors()
    # The strategy may also restore a loss scale, which takes precedence, so the scaler is loaded
    # first.
    if scaler is not None and "scaler/scale" in names:
        scale, growth_tracker = (
            float(source.read(f"scaler/{name}", (), ())) for name in ("scale", "growth_tracker")
        )
        scaler.load(scale, growth_tracker)
    load_state(strategy, source)
    if not strategy.replicas_diverge and any(name.startswith("local/") for name in names):
        text = UserText(
            "the checkpoint is of a run whose workers had diverged: training continues from"
            " the mean of their parameters and the optimizer state of the first worker; the"
            " rest of their state is dropped",
            code="diverged-workers-averaged",
        )
        strategy.notices.append(("warning", text))
