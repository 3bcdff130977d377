"""`paceline sweep`: train every combination of some overrides, or search for the best values."""

from __future__ import annotations

import json
import logging
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.options import (
    AnyPath,
    AnyText,
    Integer,
    OptionParser,
    add_config,
    config_and_overrides,
)
from paceline.core.errors import EXIT_DONE, EXIT_FAILED, ConfigError, RunError
from paceline.core.formatting import counted
from paceline.core.log import CONSOLE_ONLY

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.sweep.metric import Metric
    from paceline.sweep.scheduler import RunChooser, Scheduler, SweepSettings
    from paceline.sweep.space import SweepSpace
    from paceline.sweep.state import SweepRun, SweepState

logger = logging.getLogger(__name__)


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--folder",
        AnyPath("a folder"),
        "FOLDER",
        "folder of the sweep, with one folder per run (default: `output_dir` followed by `-sweep`)",
    )
    parser.add_option(
        "--metric",
        AnyText(
            "eval_loss, train_loss, tokens_per_second or a metric of the evaluations",
            may_be_empty=False,
        ),
        "NAME",
        "metric by which runs are compared (default: eval_loss; without evaluations, train_loss)",
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--maximize",
        action="store_const",
        const=True,
        dest="maximize",
        help="a higher metric is better (default: by its name)",
    )
    direction.add_argument(
        "--minimize",
        action="store_const",
        const=False,
        dest="maximize",
        help="a lower metric is better",
    )
    parser.add_option(
        "--parallel", Integer(1, 64), "N", "runs at a time, each on devices of its own", default=1
    )
    parser.add_option(
        "--trials",
        Integer(1, 10_000),
        "N",
        "search with Optuna for the best values, with N runs in all",
    )
    parser.add_flag("--no-pruning", "with --trials, do not stop runs early")
    parser.add_flag("--allow-config-change", "resume runs although the config has changed")
    parser.example = (
        "paceline sweep examples/demo.yaml lora.enable=true lora.rank=8,16"
        " train_args.learning_rate=1e-3,2e-3"
    )


def run(args: Namespace) -> int:
    """Run the sweep; the results are printed as a table, or with `--json` as a list.

    Raises:
        ConfigError: the usage or a combination is invalid; no run was started.
    """
    from paceline.config.load import load_config
    from paceline.core.run_dir import LaunchLock, RunDir
    from paceline.sweep.devices import divide_devices
    from paceline.sweep.scheduler import Scheduler, SweepSettings
    from paceline.sweep.space import REPLACED_BY_SWEEP, parse_space
    from paceline.sweep.state import load_state

    path, overrides = config_and_overrides(args)
    space = parse_space(overrides)
    _check_usage(args, space)
    planned = _planned(space, args.trials)
    first = load_config(path, [*space.fixed, *planned[0]]).config
    folder = args.folder or Path(f"{first.output_dir.rstrip('/')}-sweep")
    _check_folder(folder)
    fixed = tuple(text for text in space.fixed if text.split("=")[0] not in REPLACED_BY_SWEEP)
    settings = SweepSettings(
        path, fixed, folder, first.checkpoint_dir, args.allow_config_change, args.debug
    )
    shares = divide_devices(first.parallel, args.parallel)
    with LaunchLock(RunDir(folder), f"--folder {folder}"):
        state = load_state(folder)
        with Scheduler(settings, state, shares) as scheduler, scheduler.handling_signals():
            metric, source, runs = _prepare(args, scheduler, state, space, first)
            try:
                scheduler.run(source, metric)
                _finish(args, state, runs, metric)
            except OSError as error:
                raise RunError(
                    "the state of the sweep in {folder} cannot be written: {reason}",
                    code="sweep-not-written",
                    fix="free some space, and run the same command again",
                    folder=folder,
                    reason=error.strerror or error,
                ) from error
            stopped_by = scheduler.stopped_by
    if stopped_by is not None:
        _print_how_to_continue(settings)
        return stopped_by
    return EXIT_FAILED if any(run["status"] == "failed" for run in runs) else EXIT_DONE


def _check_usage(args: Namespace, space: SweepSpace) -> None:
    from paceline.config.packages import check_package
    from paceline.distributed.environment import outer_launcher

    if not space.axes:
        raise ConfigError(
            "`paceline sweep` needs a key with several values",
            code="missing-sweep-values",
            fix="write for example `lora.rank=8,16` or, with `--trials`,"
            " `train_args.learning_rate=1e-5..1e-3:log`",
        )
    if space.ranges and args.trials is None:
        key = space.ranges[0].key
        raise ConfigError(
            "`{key}` is a range, and only a search samples from ranges",
            code="range-without-search",
            fix="add `--trials N`, or write the values to compare, as in {key}=A,B,C",
            key=key,
        )
    if args.trials is not None:
        check_package("optuna", "`--trials`", "leave out `--trials`", extra="sweep")
    elif args.no_pruning:
        raise ConfigError(
            "`--no-pruning` needs `--trials`", code="no-pruning-without-trials", fix="leave it out"
        )
    if outer_launcher() is not None:
        raise ConfigError(
            "`paceline sweep` starts the ranks of its runs, so it cannot run under torchrun",
            code="nested-launcher",
            fix="run `paceline sweep` alone",
        )


def _planned(space: SweepSpace, num_trials: int | None) -> list[tuple[str, ...]]:
    """Return the combinations that are checked before the first run: all of a grid, and those at
    the limits of a search."""
    from paceline.sweep.space import Values, combinations, extremes

    if num_trials is not None:
        return extremes(space.axes)
    return combinations([axis for axis in space.axes if isinstance(axis, Values)])


def _check_folder(folder: Path) -> None:
    from paceline.core.run_dir import RunDir

    if RunDir(folder).is_run():
        raise ConfigError(
            "`{folder}` contains a run, so it cannot be the folder of a sweep",
            code="folder-contains-run",
            fix="choose another folder with `--folder`",
            folder=folder,
        )


def _prepare(
    args: Namespace, scheduler: Scheduler, state: SweepState, space: SweepSpace, first: Config
) -> tuple[Metric, RunChooser, list[SweepRun]]:
    """Check all combinations, and return the metric, the source of the runs, and these runs, to
    which a search appends."""
    from paceline.sweep.grid import Grid
    from paceline.sweep.metric import check_metric, choose_metric
    from paceline.sweep.search import Search, is_in_space
    from paceline.sweep.space import folder_name

    planned, is_search = _planned(space, args.trials), args.trials is not None
    if is_search:
        runs = [run for run in state.runs if is_in_space(run, space)]
    else:
        runs = [state.find(arguments) or state.add(arguments) for arguments in planned]
    to_check: list[tuple[Sequence[str], str]] = [(run["arguments"], run["name"]) for run in runs]
    if is_search:  # in folders that no run has, so that nothing is resumed from them
        to_check += [(arguments, f"check-{folder_name(arguments)}") for arguments in planned]
    logger.info(f"checking {counted(len(to_check), 'combination')}…", extra=CONSOLE_ONLY)
    checked = scheduler.check(to_check)
    metric = choose_metric(args.metric, args.maximize, checked["has_evaluations"])
    check_metric(metric, checked["has_evaluations"], checked["metrics"])
    state.metric = metric
    for number, run in enumerate(runs):
        if number in checked["complete"]:
            run["status"] = "done"  # perhaps by another command, such as a job of a cluster
        elif run["status"] == "done":
            run["status"] = "pending"  # its files were deleted, or it has further steps now
        if run["status"] in ("done", "pruned"):  # an earlier command may have used another metric
            state.set_figures(run, metric, state.read_report(run))
    if not is_search:
        return metric, Grid(runs), runs
    prunes = not args.no_pruning and metric.is_of_evaluation
    search = Search(space, state, metric, args.trials, first.train_args.seed, prunes)
    return metric, search, search.runs


def _finish(args: Namespace, state: SweepState, runs: list[SweepRun], metric: Metric) -> None:
    """Write the page, and print the results."""
    from paceline.commands.reports import open_console
    from paceline.sweep.importance import parameter_importance
    from paceline.sweep.page import result_table, write_page
    from paceline.sweep.state import PAGE_FILE

    state.importance = parameter_importance(runs, metric)
    state.save()
    write_page(state, runs, metric)
    if args.json:
        print(json.dumps([state.as_json(run) for run in runs], indent=2))
    else:
        print()
        open_console().print(result_table(runs, metric))
    if runs and all(run["metric"] is None for run in runs if run["status"] == "done"):
        logger.warning("no run has reported the metric `%s`", metric.name, extra=CONSOLE_ONLY)
    for run in runs:
        if run["status"] == "failed":
            logger.warning("%s failed: %s", run["name"], run["error"], extra=CONSOLE_ONLY)
    logger.info(f"\npage        {state.folder / PAGE_FILE}", extra=CONSOLE_ONLY)
    logger.info(f"in browser  paceline ui {shlex.quote(str(state.folder))}", extra=CONSOLE_ONLY)


def _print_how_to_continue(settings: SweepSettings) -> None:
    logger.info(
        f"\nstopped; the state is in {settings.folder}. To continue, run the same command again:"
        " runs that are done are not made again, and others resume from their latest checkpoint",
        extra=CONSOLE_ONLY,
    )
