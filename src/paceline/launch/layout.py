"""Which strategy a run takes, on which mesh, and how the global batch is shared among the replicas:
decided before a rank exists."""

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
    """The layout for ``num_devices`` devices: as the config says, or, with ``mode: auto``, the
    fastest that fits in memory.

    Args:
        outer: the rank that an outer launcher gave this process.

    Raises:
        ConfigError: the axes do not make that number of ranks; or the strategy cannot run this
            config, with what would fit.
    """
    name = mode_of(config.parallel)
    if name == "auto":
        from paceline.planner.choose import pick

        chosen, why = pick(config, num_devices, device_type=device_type)
        text = f"strategy: {chosen.text()}, chosen by `mode: auto`: {why}"
    else:
        if outer is not None:  # it has started the serving ranks too
            num_devices -= get_spec(name).extra_ranks(config)
        if num_devices < 1:
            raise ConfigError(
                f"`parallel.mode: {name}` has no worker: all ranks that were started are servers",
                fix="start more ranks, or lower `parameter_server.num_servers`",
            )
        chosen = layout(config.parallel, num_devices, name)
        text = f"strategy: {chosen.text()}"
    # The `run_start` event holds it.
    logger.info(text, extra=CONSOLE_ONLY)
    if chosen.num_processes == 1 and outer is not None and outer.world_size > 1:
        raise ConfigError(
            f"`parallel.mode: {name}` runs in one process, and the outer launcher started"
            f" {counted(outer.world_size, 'rank')}",
            fix="start it without torchrun (`paceline sft …`), or set `parallel.mode: ddp`",
        )
    if chosen.num_processes == 1 and outer is None and config.parallel.hosts != (1, 1):
        raise ConfigError(
            f"`parallel.mode: {name}` runs in one process, and `parallel.nnodes` is"
            f" {config.parallel.nnodes}",
            fix="set `parallel.mode: ddp`, or `parallel.nnodes: 1`",
        )
    check_strategy(chosen.strategy, config, chosen.axes)
    serving = get_spec(chosen.strategy).extra_ranks(config)
    if serving and device_type != "cpu":
        raise ConfigError(
            f"`parallel.mode: {chosen.strategy}` runs on CPU ranks alone so far, and these are"
            f" {device_type} devices",
            fix="set `parallel.device: cpu`, or `parallel.mode: ddp`",
        )
    if outer is not None and get_spec(chosen.strategy).expendable_ranks(config, chosen.axes):
        raise ConfigError(
            "`parameter_server.on_worker_failure: continue` needs Paceline's own launcher: an"
            " outer one"
            " ends all ranks when one ends",
            fix="start it without torchrun (`paceline sft …`), or set `on_worker_failure: restart`",
        )
    if config.parallel.hosts != (1, 1) and get_spec(chosen.strategy).expendable_ranks(
        config, chosen.axes
    ):
        raise ConfigError(
            "`parameter_server.on_worker_failure: continue` works on one host, and"
            " `parallel.nnodes` is"
            f" {config.parallel.nnodes}",
            fix="set `on_worker_failure: restart`: all ranks then go back to the newest checkpoint",
        )
    return replace(chosen, num_processes=chosen.num_processes + serving)


def check_row_state(config: Config, stored: Config, path: Path) -> None:
    """What servers keep beside the rows must be what the optimizer wants that gets them."""
    there, here = stored.parameter_server.optimizer, config.train_args.optim
    served = stored.parallel.mode == "parameter_server" != config.parallel.mode
    if served and there != here:
        raise ConfigError(
            f"{path} was written by servers with `parameter_server.optimizer: {there}`, and"
            f" `parallel.mode: {config.parallel.mode}` would go on with `optim: {here}` from its"
            " state",
            fix="set `parallel.mode: parameter_server`, or another `output_dir` for a new run",
        )


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
        The notices to log.

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
