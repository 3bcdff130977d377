"""The plan of a run: what turns its config into a spec for the ranks, and what is checked on the
way, in this order. Local runs, dry runs, torchrun, elastic hosts and Ray all follow it.

A wrong config is reported here, before any rank is started and any file is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from paceline.core.log import log_notices
from paceline.launch.passes import checkpoint, data, devices, early, layout, memory, sizes
from paceline.launch.passes.draft import Draft, known
from paceline.planner.devices import peak_rate
from paceline.planner.machine.local import device_memory
from paceline.planner.run_prediction import predict_step
from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)

Pass = Callable[[Draft], Draft]
#: Raises ConfigError, or returns the notices to log, if any.
Check = Callable[[Draft], Iterable[tuple[str, str]] | None]

#: What completes the draft. Only these functions change the config after it was loaded.
PASSES: tuple[Pass, ...] = (
    early.apply_scheduler,
    early.fit_length,
    devices.find_devices,
    devices.resolve_offload,
    devices.resolve_precision,
    devices.resolve_tf32,
    layout.choose_layout,
    layout.set_accumulation,
    data.read_data,
    memory.fit_to_memory,
    memory.set_save_interval,
    checkpoint.find_checkpoint,
    sizes.derive_sizes,
    checkpoint.compare_with_run,
)
#: What is checked once a pass has run, in this order.
CHECKS: dict[Pass, tuple[Check, ...]] = {
    early.fit_length: (
        early.notices_of_config,
        early.check_mode,
        early.check_folders,
        early.check_resume,
        early.check_packages,
        early.check_metric_settings,
        early.check_uploads,
        early.check_files,
        early.check_rewards,
    ),
    devices.find_devices: (devices.check_ranks,),
    devices.resolve_offload: (devices.check_host,),
    devices.resolve_precision: (devices.find_slow_precision,),
    devices.resolve_tf32: (
        devices.check_kernels,
        devices.check_compilation,
        devices.check_low_precision,
        devices.check_attention_kernel,
    ),
    layout.set_accumulation: (
        layout.check_support,
        layout.check_images,
        *data.BEFORE_READING,
    ),
    data.read_data: (data.notices_of_data,),
    memory.set_save_interval: (sizes.find_idle_settings,),
    checkpoint.find_checkpoint: (checkpoint.check_same_batch,),
    sizes.derive_sizes: (
        sizes.check_task_batch,
        sizes.check_shares,
        sizes.check_num_steps,
        sizes.check_selection,
        sizes.check_profile,
    ),
}


def plan(draft: Draft, first: Pass = PASSES[0], last: Pass = PASSES[-1]) -> Draft:
    """Run the passes from ``first`` to ``last``, and the checks that follow each of them.

    Raises:
        ConfigError: if the run cannot start, or cannot be resumed exactly.
    """
    for each in PASSES[PASSES.index(first) : PASSES.index(last) + 1]:
        draft = each(draft)
        for check in CHECKS.get(each, ()):
            log_notices(logger, check(draft) or ())
    return draft


def make_spec(draft: Draft) -> RunSpec:
    """Return the spec for the ranks of a run whose plan is complete."""
    peak, on_host = None, known(draft.host).devices
    if on_host.type != "cpu":
        peak = peak_rate(on_host.names[0], device_memory(), draft.config.train_args.compute_format)
    return RunSpec(
        draft.config,
        known(draft.derived),
        known(draft.data),
        known(draft.layout),
        on_host.type,
        draft.started_at,
        draft.resume_from,
        peak,
        failure=draft.failure,
        saves_state=draft.saves_state,
        predict=predict_step,
    )
