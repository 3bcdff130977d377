"""Passes and checks that follow from the devices of this host."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.core.log import Notice, log_notices
from paceline.core.texts import UserText
from paceline.distributed.devices import (
    check_several_ranks,
    choose_devices,
    expands_segments,
    gpu_capability,
    with_precision,
    with_supported_tf32,
    without_idle_offload,
)
from paceline.launch.passes.draft import Draft, Host, known
from paceline.launch.passes.host_checks import quick_checks
from paceline.launch.passes.rank_memory import rank_memory
from paceline.models.kernels.attention_choice import check_attention
from paceline.models.kernels.liger import check_liger
from paceline.models.transforms.compile_check import check_compile
from paceline.models.transforms.float8_check import check_float8
from paceline.parallel.registry import uses_one_device

logger = logging.getLogger(__name__)


def find_devices(draft: Draft) -> Draft:
    """Choose the devices of this host."""
    num_launched = None if draft.outer is None else draft.outer.local_world_size
    parallel = draft.config.parallel
    devices = choose_devices(parallel, num_launched, uses_one_device(parallel))
    return replace(draft, host=Host(devices, rank_memory(devices)))


def check_ranks(draft: Draft) -> Sequence[Notice]:
    """Check that ranks on these devices can communicate."""
    check_several_ranks(draft.device_type, draft.num_devices)
    return [Notice(*notice) for notice in known(draft.host).devices.notices]


def resolve_offload(draft: Draft) -> Draft:
    """Turn off offloading on a CPU, where it has no effect."""
    parallel, notices = without_idle_offload(draft.config.parallel, draft.device_type)
    log_notices(logger, notices)
    return draft.with_config(draft.config.model_copy(update={"parallel": parallel}))


def check_host(draft: Draft) -> Sequence[Notice]:
    """Check the limits of this host: open files, shared memory, threads, ports."""
    notices = []
    for check in quick_checks(draft.config, draft.device_type, known(draft.host).devices.count):
        if check.fatal:
            raise ConfigError(
                "this host cannot run the config: {check}: {result}",
                code="host-check-failed",
                fix=check.advice,
                check=check.name,
                result=check.value,
            )
        text = UserText(
            "{check}: {value}; {advice}",
            code="host-check",
            check=check.name,
            value=check.value,
            advice=check.advice,
        )
        notices.append(Notice("warning", text))
    if expands_segments(draft.device_type):
        text = UserText(
            "memory: torch's allocator uses expandable segments, which fragment less; another"
            " setting in PYTORCH_ALLOC_CONF takes precedence",
            code="expandable-segments",
        )
        notices.append(Notice("info", text))
    return notices


def resolve_precision(draft: Draft) -> Draft:
    """Replace ``precision: auto`` by the precision that these devices support."""
    names = known(draft.host).devices.names[: known(draft.host).devices.count]
    config, text = with_precision(draft.config, draft.device_type, names)
    logger.info(text)
    return draft.with_config(config)


def find_slow_precision(draft: Draft) -> Iterable[tuple[str, str]]:
    """Return a warning about a precision in which these devices compute slowly."""
    precision = draft.config.train_args.precision
    if draft.device_type == "cpu" and precision.startswith("fp16"):
        yield (
            "warning",
            UserText(
                "`train_args.precision: {precision}` is slow on a CPU, which computes in float16 by"
                " way of float32; `precision: auto` chooses float32",
                code="slow-precision-on-cpu",
                precision=precision,
            ),
        )


def resolve_tf32(draft: Draft) -> Draft:
    """Turn off TensorFloat-32 where no device has it."""
    config, idle = with_supported_tf32(draft.config, draft.device_type, _capability(draft))
    if idle is not None:
        logger.warning(idle)
    return draft.with_config(config)


def check_kernels(draft: Draft) -> None:
    """Check that Liger's kernels run on these devices."""
    check_liger(draft.config, draft.device_type)


def check_compilation(draft: Draft) -> None:
    """Check that the blocks of the model can be compiled on these devices."""
    check_compile(draft.config, draft.device_type)


def check_low_precision(draft: Draft) -> None:
    """Check that these devices can multiply in float8."""
    check_float8(draft.config, draft.device_type, _capability(draft))


def check_attention_kernel(draft: Draft) -> None:
    """Check that the attention kernel of the config runs on these devices."""
    check_attention(draft.config, draft.device_type, _capability(draft))


def _capability(draft: Draft) -> tuple[int, int] | None:
    return gpu_capability(draft.device_type, known(draft.host).devices.count)
