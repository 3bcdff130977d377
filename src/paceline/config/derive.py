"""Values that follow from the config and the data: batch sizes, steps, warm-up, learning rate, and
the size of the optimizer state. Imports no torch."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from paceline.config.schema import Config
from paceline.config.schema.schedules import warmup_length
from paceline.config.schema.train_args import TrainArgs
from paceline.core.formatting import shares_text


def optimizer_bytes_per_element(args: TrainArgs) -> int:
    """Return the bytes of optimizer state per trained element, in float32 as in a checkpoint (in
    bfloat16 with weights in bfloat16; 0 for Adafactor, whose factored state is small)."""
    float32_bytes = {
        "adamw": 8,
        "adam": 8,
        "adamw_8bit": 8,
        "paged_adamw_8bit": 8,
        "adamw_torchao_8bit": 8,
        "muon": 8,
        "schedule_free_adamw": 8,
        "lion": 4,
        "sgd": 4 if args.momentum else 0,
        "rmsprop": 8 if args.momentum else 4,
        "adagrad": 4,
    }.get(args.optim, 0)
    return float32_bytes // 2 if args.weight_dtype == "bfloat16" else float32_bytes


def average_bytes_per_element(args: TrainArgs) -> int:
    """Return the bytes per trained element of the average of the weights (``ema_decay``)."""
    if args.ema_decay is None:
        return 0
    return 2 if args.weight_dtype == "bfloat16" else 4


@dataclass(frozen=True)
class ResolvedValues:
    """The resolved training schedule.

    A step is one update of the weights. ``tokens_per_step`` is the mean over the data, or None if
    samples have no tokens. A run that resumes on another number of replicas keeps its global batch
    size. If the replicas do not divide it, some replicas and micro-batches have one sample less
    than others, and none has more than ``micro_batch_size``.
    """

    world_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    steps_per_epoch: int | None
    steps: int
    epochs: float | None
    warmup_steps: int
    learning_rate: float
    tokens_per_step: int | None
    eval_every_steps: int
    replicas: int
    save_every_steps: int = 0
    log_every_steps: int = 1

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields by name, as the ``run_start`` event records them."""
        return asdict(self)

    def is_eval_step(self, step: int) -> bool:
        """Return whether an evaluation follows this step."""
        return self.eval_every_steps > 0 and step % self.eval_every_steps == 0

    @property
    def samples_per_micro_batch(self) -> float:
        """Return the mean number of samples over the micro-batches of a full global batch."""
        return self.global_batch_size / (self.gradient_accumulation_steps * self.replicas)

    @property
    def shares(self) -> str:
        """Return the number of samples per replica for display, such as ``3+3+2``.

        The numbers are approximate if samples have tokens, as then tokens may be balanced instead.
        """
        about = "" if self.tokens_per_step is None else "about "
        return about + shares_text(self.global_batch_size, self.replicas)


def derive(
    config: Config,
    *,
    world_size: int,
    rows_per_epoch: Callable[[int], int | None],
    num_eval: int,
    default_learning_rate: float,
    tokens_per_row: float | None = None,
    replicas: int | None = None,
    global_batch_size: int | None = None,
) -> ResolvedValues:
    """Resolve batch sizes, steps, warm-up and learning rate.

    An epoch has ``ceil(rows / global_batch_size)`` steps: the last batch may be short, and no
    row is left out.

    Args:
        rows_per_epoch: returns the number of rows (samples, or packed rows) of an epoch with a
            global batch size; None if it is unknown, which requires ``max_steps``.
        num_eval: validation samples after filtering.
        tokens_per_row: mean number of tokens of a row; None if samples have no tokens.
        replicas: ranks or groups of ranks with their own micro-batches. Default: every rank.
        global_batch_size: the global batch size of a resumed run, from which accumulation follows.
            Default: the config's global batch size, else micro-batch × accumulation × replicas.
    """
    args = config.train_args
    replicas = world_size if replicas is None else replicas
    batch = global_batch_size or args.global_batch_size
    if batch is None:
        accumulation = args.gradient_accumulation_steps
        batch = args.per_device_train_batch_size * replicas * accumulation
    else:
        accumulation = accumulation_of(batch, args.per_device_train_batch_size, replicas)
    num_rows = rows_per_epoch(batch)
    per_epoch = None if num_rows is None else max(1, math.ceil(num_rows / batch))
    steps = args.max_steps
    if steps is None:
        assert per_epoch is not None, "`max_steps` is required"
        steps = max(1, math.ceil(args.num_train_epochs * per_epoch))
    warmup = warmup_length(args.warmup_steps, args.warmup_ratio, steps)
    rate = args.learning_rate if args.learning_rate is not None else default_learning_rate
    tokens = None
    if tokens_per_row is not None:
        tokens = round(tokens_per_row * (batch if num_rows is None else min(batch, num_rows)))
    eval_every = 0
    if num_eval and args.eval_steps != "never":
        eval_every = count_of_steps(args.eval_steps, steps) or per_epoch or steps
    return ResolvedValues(
        world_size=world_size,
        micro_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=accumulation,
        global_batch_size=batch,
        steps_per_epoch=per_epoch,
        steps=steps,
        epochs=None if per_epoch is None else steps / per_epoch,
        warmup_steps=warmup,
        learning_rate=rate,
        tokens_per_step=tokens,
        eval_every_steps=eval_every,
        replicas=replicas,
        save_every_steps=count_of_steps(args.save_steps, steps),
        log_every_steps=count_of_steps(args.logging_steps, steps),
    )


def accumulation_of(global_batch_size: int, micro_batch_size: int, replicas: int) -> int:
    """Return the number of micro-batches of a replica that the global batch needs."""
    return math.ceil(global_batch_size / (micro_batch_size * replicas))


def count_of_steps(every: float, steps: int) -> int:
    """Return an interval in steps. A value below 1 is a fraction of all ``steps``, rounded up as in
    transformers."""
    # A product such as 30 * (1 / 10) must not be rounded up because of its last binary digit.
    return math.ceil(every * steps - 1e-9) if 0 < every < 1 else int(every)
