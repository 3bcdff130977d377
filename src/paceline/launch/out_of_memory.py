"""Compare a rank that ran out of memory with its plan, and find the smallest change that fits."""

import logging
from dataclasses import replace

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import OutOfMemory
from paceline.core.files import human_bytes
from paceline.distributed.timing.progress import PROGRESS
from paceline.launch.passes.memory import smaller_settings
from paceline.planner.estimate import estimate
from paceline.planner.machine.local import local_machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.model_profile import describe
from paceline.planner.search.advice import advise
from paceline.planner.search.trials import settings_text
from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)


def explain(error: OutOfMemory, spec: RunSpec) -> str:
    """Return the message for the user: what filled the device, what was predicted, what to do."""
    try:
        predicted, fix = _plan(error, spec)
    except Exception as failure:  # no memory is left, or a model that only building it describes
        logger.debug(f"no prediction: {type(failure).__name__}: {failure}")
        predicted, fix = "", ""
    smaller = smaller_settings(spec.config, spec.layout, spec.device_type, PROGRESS.phase)
    if smaller is not None:
        fix = f"set `{settings_text(smaller)}` (the result stays the same, up to rounding)"
    elif not fix:
        fix = _general_advice(spec.config)
    return f"{error.what}.{predicted} To fix: {fix}."


def _general_advice(config: Config) -> str:
    args = config.train_args
    changes = []
    if args.per_device_train_batch_size > 1:
        changes.append(
            f"lower `per_device_train_batch_size` (now {args.per_device_train_batch_size}) and"
            " raise `gradient_accumulation_steps` by the same factor (the result stays the same)"
        )
    if config.task in CAUSAL_TASKS:
        changes.append(f"lower `max_length` (now {args.max_length})")
    return ", or ".join(changes) or "use a smaller model, or a device with more memory"


def _plan(error: OutOfMemory, spec: RunSpec) -> tuple[str, str]:
    config, layout = spec.config, spec.layout
    is_cpu = spec.device_type == "cpu"
    profile, batch = describe(config), micro_batch(config)
    machine = local_machine(layout.num_processes, is_cpu, config.train_args.compute_format)
    mode = estimate(layout, config, profile, batch, machine)
    if mode.cost is None or not mode.total:
        return "", ""
    cost = mode.cost
    parts = {
        "parameters": cost.parameters,
        "gradients": cost.gradients,
        "optimizer": cost.optimizer,
        "activations": cost.activations,
    }
    listed = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in parts.items() if size)
    predicted = f" The plan predicted {human_bytes(mode.total)}: {listed}."
    # The change must fit even if the run needs more than predicted by the same factor as now.
    factor = max(1.0, error.needed_bytes / mode.total)
    limited = replace(machine, memory_bytes=round(machine.memory_bytes / factor))
    smallest = advise(config, profile, batch, limited, mode).smallest
    if smallest is None:
        return predicted, ""
    needed = human_bytes(smallest.mode.total)
    costs = "; ".join(smallest.costs)
    return predicted, f"set `{smallest.text}` ({needed} predicted; {costs})"
