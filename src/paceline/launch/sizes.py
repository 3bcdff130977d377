"""How the global batch is shared among the replicas, and whether the data are enough for it."""

from __future__ import annotations

from paceline.config.resolve import Derived
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.words import counted


def sharing_text(config: Config, derived: Derived) -> str | None:
    """For a run that goes on on another number of replicas, or with other micro-batches: how its global batch is shared now.
    None where it is as the config says."""
    given, found = config.train_args.gradient_accumulation_steps, derived.gradient_accumulation_steps
    batch, replicas = counted(derived.global_batch_size, "sample"), counted(derived.replicas, "replica")
    each = derived.shares if derived.global_batch_size % derived.replicas else None
    if found != given:
        text = f"gradient_accumulation_steps: {given} → {found}, which keeps the run's global batch of {batch} on {replicas}"
        return f"{text}, as {each}" if each else text
    return f"{replicas}: {batch} of the global batch as {each}" if each else None


def check_sizes(derived: Derived, samples: int) -> None:
    """Raise ConfigError where ``samples`` for training are too few, or there are more replicas than a global batch feeds."""
    if samples == 0:
        raise ConfigError("the dataset holds no sample to train on", fix="check `dataset` and `max_length`")
    if derived.replicas > samples:
        raise ConfigError(
            f"{derived.replicas} ranks are more than the {counted(samples, 'training sample')}",
            fix=f"set `parallel.num_gpus` to at most {samples}, or give more data",
        )
    if derived.replicas > derived.global_batch_size:
        most = derived.global_batch_size * (derived.world_size // derived.replicas)
        raise ConfigError(
            f"the run's global batch of {counted(derived.global_batch_size, 'sample')} cannot be shared among "
            f"{derived.replicas} replicas: some would have nothing to train on",
            fix=f"set `parallel.num_gpus` to at most {most}, or split the model over the ranks (`parallel.tensor`, "
            "`parallel.pipeline`), or set another `output_dir` for a new run",
        )
    if derived.global_batch_size > samples:
        raise ConfigError(
            f"the global batch of {counted(derived.global_batch_size, 'sample')} ({derived.micro_batch_size} a micro-batch × "
            f"{derived.gradient_accumulation_steps} accumulation × {counted(derived.replicas, 'replica')}) is larger than the "
            f"data: {counted(samples, 'training sample')}",
            fix="lower `per_device_train_batch_size` or `gradient_accumulation_steps`, or give more data",
        )
