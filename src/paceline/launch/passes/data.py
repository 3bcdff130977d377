"""Read the data of a run once, and check what needs no data before that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from paceline.config.schema.schedules import schedule_problem
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.distributed.mesh import ParallelDims
from paceline.launch.passes.checkpoint import check_run_folder, check_stored_config
from paceline.launch.passes.draft import Draft, known
from paceline.launch.passes.model import check_model, checking_in_background
from paceline.parallel.registry import ParallelLayout
from paceline.tasks import load_task


def read_data(draft: Draft) -> Draft:
    """Read, tokenize and cache the data, unless the choice of the layout needed them already."""
    if draft.data is not None:
        return draft
    # Under an outer launcher there is no fork server, and the ranks check the model themselves.
    can_check = not draft.dry_run and draft.outer is None
    check = checking_in_background(draft.config, known(draft.layout)) if can_check else None
    with check or contextlib.nullcontext():
        return replace(draft, data=load_task(draft.config).prepare())


def read_data_early(draft: Draft) -> Draft:
    """Read the data before the layout is chosen.

    Raises:
        ConfigError: if the run folder, the data or the model cannot be used.
    """
    on_one_device = replace(draft, layout=ParallelLayout("single", ParallelDims(), 1))
    for check in BEFORE_READING:
        check(on_one_device)  # its notices follow once the layout is known
    return replace(draft, data=read_data(on_one_device).data)


def check_task(draft: Draft) -> None:
    """Check what the task requires of the config. Most tasks import torch for that, which takes
    seconds."""
    load_task(draft.config).check()


def check_folder(draft: Draft) -> None:
    """Check that the run may use its folder, on the host that holds it."""
    if draft.reads_folder:
        check_run_folder(draft.loaded, draft.run_dir, draft.is_first_attempt)


def check_user_callbacks(draft: Draft) -> None:
    """Check the callbacks of the user."""
    if draft.config.callbacks:
        from paceline.train.callbacks.user import check_callbacks  # not needed by most runs

        check_callbacks(draft.config)


def check_model_if_dry(draft: Draft) -> Iterable[Notice] | None:
    """Build the model without weights in a dry run. The ranks do it otherwise, and a process in the
    background while the data are read."""
    return check_model(draft.config, known(draft.layout)) if draft.dry_run else None


def check_schedule(draft: Draft) -> None:
    """Check that the schedule fits the learning rate of the task. A rate in the config is checked
    when the config is loaded."""
    args = draft.config.train_args
    if args.learning_rate is not None:
        return
    rate = load_task(draft.config).default_learning_rate
    problem = schedule_problem(args.lr_scheduler_type, args.lr_scheduler_kwargs, rate)
    if problem is not None:
        raise ConfigError(
            "`train_args.lr_scheduler_kwargs`: {problem}",
            code="invalid-schedule-arguments",
            fix="set `train_args.learning_rate`, or correct it",
            problem=problem,
        )


#: The checks that precede reading, in this order.
BEFORE_READING = (
    check_folder,
    check_stored_config,
    check_task,
    check_user_callbacks,
    check_model_if_dry,
    check_schedule,
)


def notices_of_data(draft: Draft) -> Iterable[tuple[str, str]]:
    """Return the notices about the data: dropped rows, truncation, and the like."""
    return known(draft.data).notices
