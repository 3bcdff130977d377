"""How the global batch is shared among the replicas, and whether the data are enough for it."""

from paceline.config.derive import ResolvedValues
from paceline.config.diff import OTHER_TRAINING
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.log import Notice


def sharing_text(config: Config, derived: ResolvedValues) -> str | None:
    """For a run that goes on on another number of replicas, or with other micro-batches: how its
    global batch is shared now. None where it is as the config says."""
    configured, accumulation = (
        config.train_args.gradient_accumulation_steps,
        derived.gradient_accumulation_steps,
    )
    batch, replicas = (
        counted(derived.global_batch_size, "sample"),
        counted(derived.replicas, "replica"),
    )
    each = derived.shares if derived.global_batch_size % derived.replicas else None
    if accumulation != configured:
        text = (
            f"gradient_accumulation_steps: {configured} → {accumulation}, which keeps the run's"
            f" global batch of {batch} on {replicas}"
        )
        return f"{text}, as {each}" if each else text
    return f"{replicas}: {batch} of the global batch as {each}" if each else None


def check_sizes(derived: ResolvedValues, samples: int, mode: str) -> list[Notice]:
    """Check that every replica can get part of the run's global batch.

    Args:
        mode: the strategy's name.
        samples: training samples. Fewer than a global batch, or than replicas, are enough: the
            missing rows are padded with zero weight, so the loss and the gradient are those of the
            samples alone.

    Returns:
        Notices for a person.

    Raises:
        ConfigError: no sample to train on; more replicas than samples in the global batch of a
            resumed run, or than samples at all in a mode whose replicas train separately.
    """
    if samples == 0:
        raise ConfigError(
            "the dataset holds no sample to train on", fix="check `dataset` and `max_length`"
        )
    if derived.replicas > samples and mode in OTHER_TRAINING:
        raise ConfigError(
            f"`parallel.mode: {mode}` trains each worker on its own samples, and {derived.replicas}"
            f" workers are more than the {counted(samples, 'training sample')}",
            fix=(
                f"set `parallel.num_gpus` to at most {samples}, use `parallel.mode: ddp`, or add"
                " data"
            ),
        )
    if derived.replicas > derived.global_batch_size:
        most = derived.global_batch_size * (derived.world_size // derived.replicas)
        raise ConfigError(
            f"the run's global batch of {counted(derived.global_batch_size, 'sample')} cannot be"
            f" shared among {derived.replicas} replicas: some would have nothing to train on",
            fix=(
                f"set `parallel.num_gpus` to at most {most}, or split the model over the ranks"
                " (`parallel.tensor`, `parallel.pipeline`), or set another `output_dir` for a"
                " new run"
            ),
        )
    if derived.global_batch_size <= samples:
        return []
    text = (
        f"the global batch of {counted(derived.global_batch_size, 'sample')}"
        f" ({derived.micro_batch_size} per micro-batch × {derived.gradient_accumulation_steps}"
        f" accumulation × {counted(derived.replicas, 'replica')}) is larger than the dataset: each"
        f" step trains on {_all_of(samples)}, and the missing rows are padded with zero weight"
    )
    if derived.replicas > samples:
        idle = derived.replicas - samples
        text += (
            f". {counted(idle, 'replica')} of {derived.replicas} {'gets' if idle == 1 else 'get'}"
            f" padding only; {counted(samples, 'replica')} would train on the same samples"
        )
    return [Notice("warning", text)]


def _all_of(samples: int) -> str:
    return "the only training sample" if samples == 1 else f"all {samples:,} training samples"
