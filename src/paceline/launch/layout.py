"""Choose the strategy and the mesh of a run, and how replicas share the global batch, before the
ranks are started."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.derive import ResolvedValues
from paceline.config.diff import OTHER_TRAINING
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.log import CONSOLE_ONLY, Notice
from paceline.distributed.mesh import ParallelDims
from paceline.models.kinds import reads_images
from paceline.parallel.registry import (
    ParallelLayout,
    check_strategy,
    get_spec,
    layout,
    mode_of,
)

if TYPE_CHECKING:
    from paceline.distributed.environment import RankEnv


logger = logging.getLogger(__name__)


def choose_layout(
    config: Config, num_devices: int, device_type: str, outer: RankEnv | None
) -> ParallelLayout:
    """Return the layout for ``num_devices`` devices: the configured one, or, with ``mode: auto``,
    the fastest that fits in memory.

    Args:
        outer: rank that an outer launcher assigned to this process, or None.

    Raises:
        ConfigError: if the product of the axes is not the number of ranks, or if the strategy does
            not support this config.
    """
    name = mode_of(config.parallel)
    if name == "auto":
        from paceline.planner.choose import pick

        chosen, why = pick(config, num_devices, device_type=device_type)
        text = f"strategy: {chosen.text()}, chosen by `mode: auto`: {why}"
    else:
        if outer is not None:  # the ranks of an outer launcher include the servers
            num_devices -= get_spec(name).extra_ranks(config)
        if num_devices < 1:
            raise ConfigError(
                f"`parallel.mode: {name}` has no worker: all ranks are servers",
                fix="start more ranks, or lower `parameter_server.num_servers`",
            )
        chosen = layout(config.parallel, num_devices, name)
        text = f"strategy: {chosen.text()}"
    # The event log contains this in its `run_start` event.
    logger.info(text, extra=CONSOLE_ONLY)
    if chosen.num_processes == 1 and outer is not None and outer.world_size > 1:
        raise ConfigError(
            f"`parallel.mode: {name}` is not supported with {counted(outer.world_size, 'rank')} of"
            " an outer launcher: it runs in one process",
            fix="start it without torchrun (`paceline sft …`), or set `parallel.mode: ddp`",
        )
    if chosen.num_processes == 1 and outer is None and config.parallel.hosts != (1, 1):
        raise ConfigError(
            f"`parallel.mode: {name}` is not supported with `parallel.nnodes:"
            f" {config.parallel.nnodes}`: it runs in one process",
            fix="set `parallel.mode: ddp`, or `parallel.nnodes: 1`",
        )
    check_strategy(chosen.strategy, config, chosen.axes)
    _check_images(config, chosen.axes)
    spec = get_spec(chosen.strategy)
    num_servers = spec.extra_ranks(config)
    if num_servers and device_type not in ("cpu", "cuda"):
        raise ConfigError(
            f"`parallel.mode: {chosen.strategy}` is not supported with {device_type} devices: Gloo,"
            " which connects workers and servers, cannot send their tensors",
            allowed="`parallel.device: cpu` or `cuda`",
            fix="set `parallel.device: cpu`, or `parallel.mode: ddp`",
        )
    if num_servers and device_type != "cpu" and outer is not None:
        raise ConfigError(
            f"`parallel.mode: {chosen.strategy}` on {device_type} devices is not supported with an"
            " outer launcher or several hosts: each of their ranks has a device, and the servers"
            " have none",
            fix=(
                "start it on one host without torchrun (`paceline sft …`), or set"
                " `parallel.device: cpu`"
            ),
        )
    can_lose_ranks = bool(spec.expendable_ranks(config, chosen.axes))
    if outer is not None and can_lose_ranks:
        raise ConfigError(
            "`parameter_server.on_worker_failure: continue` is not supported with an outer"
            " launcher: it ends all ranks when one ends",
            fix="start it without torchrun (`paceline sft …`), or set `on_worker_failure: restart`",
        )
    if config.parallel.hosts != (1, 1) and can_lose_ranks:
        raise ConfigError(
            "`parameter_server.on_worker_failure: continue` is not supported with"
            f" `parallel.nnodes: {config.parallel.nnodes}`: all ranks must be on one host",
            fix="set `on_worker_failure: restart`: all ranks restart from the latest checkpoint",
        )
    return replace(chosen, num_processes=chosen.num_processes + num_servers)


def _check_images(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError if a vision-language model would be divided in a way that vision towers do
    not support."""
    names = [name for name in ("tensor", "pipeline") if getattr(dims, name) > 1]
    if names and reads_images(config):
        setting = f"`parallel.{names[0]}: {getattr(dims, names[0])}`"
        raise ConfigError(
            f"{setting} is not supported with the vision-language model `{config.model}`",
            fix="set `parallel.mode: ddp`, `zero1`, `zero2` or `zero3`",
        )


def check_row_state(config: Config, stored: Config, path: Path) -> None:
    """Check that the optimizer can use the row state in a checkpoint of parameter servers.

    Raises:
        ConfigError: if the stored state belongs to another kind of optimizer.
    """
    stored_optimizer, optimizer = stored.parameter_server.optimizer, config.train_args.optim
    was_served = stored.parallel.mode == "parameter_server" != config.parallel.mode
    if was_served and stored_optimizer != optimizer:
        raise ConfigError(
            f"{path} was written with `parameter_server.optimizer: {stored_optimizer}`, whose state"
            f" `optim: {optimizer}` (`parallel.mode: {config.parallel.mode}`) cannot use",
            fix="set `parallel.mode: parameter_server`, or another `output_dir` for a new run",
        )


def sharing_text(config: Config, derived: ResolvedValues) -> str | None:
    """Describe how the replicas share the global batch if the run resumes with a different number
    of replicas or size of micro-batches. Return None if the config is unchanged."""
    configured = config.train_args.gradient_accumulation_steps
    accumulation = derived.gradient_accumulation_steps
    batch = counted(derived.global_batch_size, "sample")
    replicas = counted(derived.replicas, "replica")
    shares = derived.shares if derived.global_batch_size % derived.replicas else None
    if accumulation != configured:
        text = (
            f"gradient_accumulation_steps: {configured} → {accumulation}, which keeps the run's"
            f" global batch of {batch} on {replicas}"
        )
        return f"{text}, as {shares}" if shares else text
    return f"{replicas}: {batch} of the global batch as {shares}" if shares else None


def check_sizes(derived: ResolvedValues, samples: int | None, mode: str) -> list[Notice]:
    """Check that every replica gets part of the run's global batch.

    Args:
        mode: name of the strategy.
        samples: number of training samples; None if it is unknown. It may be smaller than the
            global batch or the number of replicas: missing rows are padded with zero weight, which
            changes neither the loss nor the gradient.

    Returns:
        The notices to log.

    Raises:
        ConfigError: if there are no training samples, or more replicas than samples in the global
            batch of a resumed run or, in a mode whose replicas train separately, in the dataset.
    """
    if samples is None:
        samples = derived.global_batch_size
    if samples == 0:
        raise ConfigError(
            "the dataset contains no training sample", fix="check `dataset` and `max_length`"
        )
    if derived.replicas > samples and mode in OTHER_TRAINING:
        raise ConfigError(
            f"`parallel.mode: {mode}` trains each worker on separate samples, but there are"
            f" {derived.replicas} workers and only {counted(samples, 'training sample')}",
            fix=(
                f"set `parallel.num_gpus` to at most {samples}, use `parallel.mode: ddp`, or add"
                " data"
            ),
        )
    if derived.replicas > derived.global_batch_size:
        max_ranks = derived.global_batch_size * (derived.world_size // derived.replicas)
        raise ConfigError(
            f"the run's global batch of {counted(derived.global_batch_size, 'sample')} cannot be"
            f" shared among {derived.replicas} replicas: some would have nothing to train on",
            fix=(
                f"set `parallel.num_gpus` to at most {max_ranks}, or split the model over the ranks"
                " (`parallel.tensor`, `parallel.pipeline`), or set another `output_dir` for a"
                " new run"
            ),
        )
    if derived.global_batch_size <= samples:
        return []
    all_samples = (
        "the only training sample" if samples == 1 else f"all {samples:,} training samples"
    )
    text = (
        f"the global batch of {counted(derived.global_batch_size, 'sample')}"
        f" ({derived.micro_batch_size} per micro-batch × {derived.gradient_accumulation_steps}"
        f" accumulation × {counted(derived.replicas, 'replica')}) is larger than the dataset: each"
        f" step trains on {all_samples}, and the missing rows are padded with zero weight"
    )
    if derived.replicas > samples:
        idle = derived.replicas - samples
        text += (
            f". {counted(idle, 'replica')} of {derived.replicas} {'gets' if idle == 1 else 'get'}"
            f" padding only; {counted(samples, 'replica')} would train on the same samples"
        )
    return [Notice("warning", text)]
