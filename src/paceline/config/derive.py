"""What an optimizer keeps. No torch here: the planner reads it too."""

import math
from dataclasses import asdict, dataclass
from typing import cast

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.events import DerivedFigures
from paceline.core.formatting import shares_text


def optimizer_bytes_per_element(args: TrainArgs) -> int:
    """Bytes of float32 state an optimizer keeps for each trained element (Adafactor: its factored
    state counts as 0)."""
    return {
        "adamw": 8,
        "adam": 8,
        "sgd": 4 if args.momentum else 0,
        "rmsprop": 8 if args.momentum else 4,
        "adagrad": 4,
    }.get(args.optim, 0)


@dataclass(frozen=True)
class ResolvedValues:
    """What the numbers in the config come to.

    ``steps`` are updates of the weights; ``tokens_per_step`` is the mean over the data, None where
    samples have no tokens. Where a run goes on with its global batch on another number of replicas,
    that number may not divide it: then some micro-batches, and some replicas' shares, have one
    sample less than others, and none has more than ``micro_batch_size``.
    """

    world_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    steps_per_epoch: int
    steps: int
    epochs: float
    warmup_steps: int
    learning_rate: float
    tokens_per_step: int | None
    eval_every_steps: int
    replicas: int
    save_every_steps: int = 0
    log_every_steps: int = 1

    def as_dict(self) -> DerivedFigures:
        return cast(DerivedFigures, asdict(self))

    @property
    def samples_per_micro_batch(self) -> float:
        """The mean over the micro-batches of a whole global batch."""
        return self.global_batch_size / (self.gradient_accumulation_steps * self.replicas)

    @property
    def shares(self) -> str:
        """Samples of each replica, for a person. Where samples have tokens these may be what is
        shared evenly."""
        about = "" if self.tokens_per_step is None else "about "
        return about + shares_text(self.global_batch_size, self.replicas)


def derive(
    config: Config,
    *,
    world_size: int,
    num_train: int,
    num_eval: int,
    default_learning_rate: float,
    train_tokens: int | None = None,
    replicas: int | None = None,
    global_batch_size: int | None = None,
) -> ResolvedValues:
    """Work out batch, steps, warm-up and learning rate.

    Args:
        num_train, num_eval: samples after filtering.
        replicas: ranks, or groups of them, that each have micro-batches of their own (default:
            every rank).
        global_batch_size: of a run that goes on: it stays what it was, and accumulation is as much
            as the micro-batches of the config need for it. Default: micro-batch × accumulation ×
            replicas.

    An epoch has ceil(num_train / global batch) steps: the last batch may be short, no sample is
    left out.
    """
    args = config.train_args
    replicas = world_size if replicas is None else replicas
    accumulation, together = (
        args.gradient_accumulation_steps,
        args.per_device_train_batch_size * replicas,
    )
    batch = together * accumulation
    if global_batch_size is not None:
        batch, accumulation = global_batch_size, math.ceil(global_batch_size / together)
    per_epoch = max(1, math.ceil(num_train / batch))
    steps = (
        args.max_steps
        if args.max_steps is not None
        else max(1, math.ceil(args.num_train_epochs * per_epoch))
    )
    warmup = (
        args.warmup_steps if args.warmup_steps is not None else math.ceil(args.warmup_ratio * steps)
    )
    rate = args.learning_rate if args.learning_rate is not None else default_learning_rate
    tokens = (
        round(train_tokens / num_train * min(batch, num_train))
        if train_tokens is not None
        else None
    )
    return ResolvedValues(
        world_size=world_size,
        micro_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=accumulation,
        global_batch_size=batch,
        steps_per_epoch=per_epoch,
        steps=steps,
        epochs=steps / per_epoch,
        warmup_steps=min(warmup, steps),
        learning_rate=rate,
        tokens_per_step=tokens,
        eval_every_steps=(count_of_steps(args.eval_steps, steps) or per_epoch) if num_eval else 0,
        replicas=replicas,
        save_every_steps=count_of_steps(args.save_steps, steps),
        log_every_steps=count_of_steps(args.logging_steps, steps),
    )


def count_of_steps(every: float, steps: int) -> int:
    """Return a number of steps, of which a value below 1 is a share of all ``steps``, rounded up as
    transformers does."""
    # A product such as 30 * (1 / 10) must not be rounded up because of its last binary digit.
    return math.ceil(every * steps - 1e-9) if 0 < every < 1 else int(every)
