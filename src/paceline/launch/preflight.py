"""Everything that is decided before a rank exists. What is wrong is said here, with nothing started
and nothing written."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint import store as checkpoint
from paceline.checkpoint.remote import CheckpointStore, check_url, fetch_checkpoint, is_url
from paceline.config.derive import ResolvedValues, derive
from paceline.config.diff import changes_training
from paceline.config.load import Loaded, diff_configs, load_stored
from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.run_dir import RunDir, lock_run
from paceline.distributed.environment import outer_launcher
from paceline.launch.layout import check_row_state
from paceline.launch.model_check import check_model, checking_beside
from paceline.launch.sizes import check_sizes, sharing_text
from paceline.parallel.balance import equal_notice
from paceline.parallel.compression.cost import compression_notice
from paceline.parallel.registry import ParallelLayout, mode_of, strategy_class
from paceline.tasks import load_task
from paceline.tasks.base import Prepared

if TYPE_CHECKING:
    from paceline.distributed.devices import Devices

Say = Callable[[str, str], None]


@dataclass(frozen=True)
class Plan:
    """A run that can start: the spec for its ranks, and how it stands to an earlier run in the same
    folder."""

    spec: Any  # a RunSpec, or what else ranks do
    devices: Devices | None
    finished: dict[str, Any] | None = None  # the report of a run that is already done


@dataclass(frozen=True)
class LeaderPlan:
    """What rank 0 has found in the run's folder, for the ranks that do not read it.

    Args:
        resume_from: the checkpoint, as a path on rank 0's host.
    """

    resume_from: str | None = None
    global_batch_size: int | None = None


def check_early(config: Config) -> None:
    """What costs next to nothing: the mode, the output folder, whether what is asked for is
    installed."""
    mode_of(config.parallel)
    check_output_dir(Path(config.output_dir))
    if config.checkpoint_dir is not None:
        check_checkpoint_dir(config.checkpoint_dir, Path(config.output_dir))
    if is_url(config.resume):
        check_url("resume", config.resume)
    elif config.resume not in ("auto", "never") and not Path(config.resume).exists():
        raise ConfigError(
            f"`resume: {config.resume}` does not exist",
            allowed=(
                f"auto, never, or a checkpoint such as RUN/checkpoints/{checkpoint.name_of(40)}"
            ),
            fix=(
                "check the path, or leave `resume` out: a run goes on from its newest checkpoint by"
                " itself"
            ),
        )
    if "tensorboard" in config.report_to:
        from paceline.observe.tensorboard import check_tensorboard

        check_tensorboard()


def check_checkpoint_dir(place: str, output_dir: Path) -> None:
    """Raise ConfigError if checkpoints cannot be kept at ``place``. Connects to nothing."""
    check_url("checkpoint_dir", place)
    if is_url(place):
        return
    folder, own = Path(place).absolute(), RunDir(output_dir).checkpoints.absolute()
    if folder in (own, output_dir.absolute()) or own in folder.parents:
        raise ConfigError(
            f"`checkpoint_dir: {place}` is inside the run's own folder, which keeps the newest"
            " checkpoint anyway",
            fix="leave `checkpoint_dir` out, or give a folder elsewhere",
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"`checkpoint_dir: {place}` is a file", fix="give a folder")


def check_output_dir(folder: Path) -> None:
    """Raise ConfigError where a run could not write into ``folder``. Leaves nothing behind."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"`output_dir: {folder}` is a file", fix="give a folder, e.g. `output_dir=./output/run`"
        )
    above = folder
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise ConfigError(
            f"`output_dir: {folder}` lies below {above}, which is a file", fix="give another folder"
        )
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ConfigError(
            f"`output_dir: {folder}` cannot be written: {error.strerror or error} ({above})",
            fix="give a folder that you may write to, e.g. `output_dir=./output/run`",
        ) from error


def plan_run(
    loaded: Loaded,
    *,
    started_at: float,
    layout: ParallelLayout,
    device_type: str,
    devices: Devices | None,
    say: Say,
    allow_config_change: bool = False,
    global_batch_size: int | None = None,
    life: int = 1,
    leader: LeaderPlan | None = None,
    dry_run: bool = False,
) -> Plan:
    """Read and tokenise the data, work out batch and steps, and see whether a run is to be gone on
    with.

    Args:
        started_at: when the command began, in seconds since the epoch.
        say: gets (level, text) of each thing a person should know, as it comes up.
        global_batch_size: of the life of this run before, which may have reached no checkpoint;
            else a checkpoint's holds.
        life: from the second on, what the lives before have saved is gone on with, whatever
            ``resume`` says.
        leader: on ranks other than 0 of a run over several hosts; nothing of the folder here
            counts.
        dry_run: check the model too, which else the ranks do.
    """
    from paceline.train.run_spec import RunSpec

    config = loaded.config
    run_dir = RunDir(Path(config.output_dir))
    if leader is None:
        if life == 1:
            _check_another_run(config, run_dir)
        _check_own_folder(loaded, run_dir)
        check_free(run_dir, say)
    notices: list[tuple[str, str]] = list(loaded.notices) + (
        list(devices.notices) if devices else []
    )
    task = load_task(config)
    if dry_run:
        for level, text in check_model(config, layout):
            say(level, text)
    # Under an outer launcher there is no fork server, and the ranks build the model themselves.
    with (
        contextlib.nullcontext() if dry_run or outer_launcher() else checking_beside(config, layout)
    ):
        prepared = task.prepare()
    for level, text in prepared.notices:
        say(level, text)
    notices += prepared.notices
    crowded = _crowded_loaders(
        config,
        layout.num_processes if devices is None else min(devices.count, layout.num_processes),
    )
    for level, text in crowded:
        say(level, text)
    notices += crowded
    wasted = compression_notice(config, layout.axes.data)
    if wasted is not None:
        say(*wasted)
        notices.append(wasted)
    path: Path | None = None
    if leader is None:
        if config.checkpoint_dir is not None:
            _fetch_newest(config, run_dir, say, notices, is_first_life=life == 1, dry_run=dry_run)
        path = (
            _checkpoint(config, run_dir, say, notices)
            if life == 1
            else _own_checkpoint(config, run_dir, say, notices)
        )
    meta = None if path is None else checkpoint.read_meta(path)
    if meta is not None:
        global_batch_size = int(meta["global_batch_size"])
    elif leader is not None:
        global_batch_size = leader.global_batch_size
    derived = derive(
        config,
        world_size=layout.world_size,
        num_train=prepared.num_train,
        num_eval=prepared.num_eval,
        default_learning_rate=task.default_learning_rate,
        train_tokens=prepared.train_tokens,
        replicas=layout.axes.replicas,
        global_batch_size=global_batch_size,
    )
    about_sizes = check_sizes(derived, prepared.num_train, layout.strategy)
    shared = sharing_text(config, derived)
    if shared is not None:
        about_sizes.append(("info", shared))
    unbalanced = equal_notice(config, derived)
    if unbalanced is not None:
        about_sizes.append(unbalanced)
    for level, text in about_sizes:
        say(level, text)
    notices += about_sizes
    strategy_class(layout.strategy).check_length(config, derived.steps)
    _check_schedule(config)
    finished = None
    if path is not None and meta is not None:
        finished = _check_resume(
            config, derived, prepared, run_dir, path, meta, say, allow_config_change
        )
    elif leader is None and config.resume == "auto" and run_dir.config.is_file():
        _check_same_config(config, _stored_config(run_dir), run_dir.root, allow_config_change, say)
        say(
            "info",
            f"{run_dir.root} holds a run that reached no checkpoint: it starts again from the"
            " beginning",
        )
    resume_from = leader.resume_from if leader is not None else None if path is None else str(path)
    return Plan(
        RunSpec(config, derived, prepared, layout, device_type, started_at, resume_from, notices),
        devices,
        finished,
    )


def check_free(run_dir: RunDir, say: Say) -> None:
    """Raise ConfigError where another run is going on in the folder; one that is just ending is
    waited for."""
    if not run_dir.lock.exists():
        return
    try:
        lock_run(run_dir, wait_s=0.0, sign=False).close()
    except RunError:
        say("info", f"waiting for the run in {run_dir.root} to end…")
        try:
            lock_run(run_dir, wait_s=10.0, sign=False).close()
        except RunError as error:
            raise ConfigError(error.what, fix=error.fix) from error


def _crowded_loaders(config: Config, num_ranks: int) -> list[tuple[str, str]]:
    from paceline.distributed.devices import cpu_cores

    loaders, cores = config.train_args.dataloader_num_workers * num_ranks, cpu_cores()
    if loaders <= cores:
        return []
    return [
        (
            "warning",
            (
                f"{loaders} loader processes on {cores} cores: fewer (`dataloader_num_workers`) may"
                " be faster"
            ),
        )
    ]


def _check_schedule(config: Config) -> None:
    if config.train_args.lr_scheduler_kwargs:
        from paceline.train.optimizer import check_schedule

        problem = check_schedule(config.train_args)
        if problem:
            raise ConfigError(f"`train_args.lr_scheduler_kwargs` has {problem}")


def _check_another_run(config: Config, run_dir: RunDir) -> None:
    if config.resume == "never" and run_dir.is_run():
        raise ConfigError(
            f"`output_dir: {run_dir.root}` holds a run already, and `resume: never` asks for a"
            " new one",
            fix=(
                "set another `output_dir`, delete that folder, or set `resume: auto` to go on"
                " with it"
            ),
        )


def _check_own_folder(loaded: Loaded, run_dir: RunDir) -> None:
    """A run never writes over what is not a run's."""
    if run_dir.events.is_file():
        return
    root = run_dir.root
    if (
        loaded.path is not None
        and run_dir.config.exists()
        and loaded.path.resolve() == run_dir.config.resolve()
    ):
        raise ConfigError(
            f"the run would write its own config.yaml over your config file: {loaded.path} lies in"
            f" `output_dir: {root}`",
            fix=(
                "set another `output_dir`, e.g. `output_dir=./output/run`, or give the file another"
                " name"
            ),
        )
    taken = [
        one.name for one in (run_dir.model, run_dir.report, run_dir.report_html) if one.exists()
    ]
    if taken and not run_dir.config.is_file():
        raise ConfigError(
            f"`output_dir: {root}` holds no run, and the run would write over what is there:"
            f" {', '.join(taken)}",
            fix="set another `output_dir`, e.g. `output_dir=./output/run`",
        )


def _checkpoint(
    config: Config, run_dir: RunDir, say: Say, notices: list[tuple[str, str]]
) -> Path | None:
    """The checkpoint to go on from."""
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return _newest_whole(run_dir, say, notices)
    path = _find(
        config.resume,
        run_dir,
        lambda text: _warn(f"a checkpoint is passed over: {text}", say, notices),
    )
    problem = checkpoint.verify(path)
    if problem is not None:
        raise ConfigError(
            f"`resume: {config.resume}` is not whole: {problem}",
            fix="give an earlier checkpoint, or `resume=auto`",
        )
    _say_foreign_files(path, say, notices)
    return path


def _fetch_newest(
    config: Config,
    run_dir: RunDir,
    say: Say,
    notices: list[tuple[str, str]],
    *,
    is_first_life: bool,
    dry_run: bool,
) -> None:
    """Bring the newest checkpoint of ``checkpoint_dir`` to the run's folder, if it is not there."""
    store = CheckpointStore(str(config.checkpoint_dir))
    store.check()
    if config.resume == "never" and is_first_life and store.names():
        raise ConfigError(
            f"`checkpoint_dir: {store.url}` holds a run already, and `resume: never` asks for a"
            " new one",
            fix=(
                "set another `checkpoint_dir`, delete what is there, or set `resume: auto` to"
                " resume it"
            ),
        )
    if (config.resume == "auto" or not is_first_life) and not dry_run:
        store.fetch_newest(
            run_dir.checkpoints,
            lambda text: _warn(f"a checkpoint is passed over: {text}", say, notices),
        )


def _find(text: str, run_dir: RunDir, say: Callable[[str], None]) -> Path:
    """The checkpoint that ``resume`` names; one in an object store is downloaded to the run's
    folder."""
    if not is_url(text):
        return checkpoint.find(Path(text), say)
    return fetch_checkpoint(text, run_dir.root / ".resume", say)


def _newest_whole(run_dir: RunDir, say: Say, notices: list[tuple[str, str]]) -> Path | None:
    path, wrong = checkpoint.newest_whole(run_dir.checkpoints)
    for text in wrong:
        _warn(f"a checkpoint is passed over: {text}", say, notices)
    if path is not None:
        _say_foreign_files(path, say, notices)
    return path


def _say_foreign_files(path: Path, say: Say, notices: list[tuple[str, str]]) -> None:
    foreign = checkpoint.foreign_files(path)
    if foreign:
        _warn(
            f"{path} holds what is not the checkpoint's, and is not read: {', '.join(foreign)}",
            say,
            notices,
        )


def _warn(text: str, say: Say, notices: list[tuple[str, str]]) -> None:
    say("warning", text)
    notices.append(("warning", text))


def _own_checkpoint(
    config: Config, run_dir: RunDir, say: Say, notices: list[tuple[str, str]]
) -> Path | None:
    """What a later life goes on from: the run's own, else what the first life began from."""
    own = _newest_whole(run_dir, say, notices)
    return (
        own
        if own is not None or config.resume in ("auto", "never")
        else _find(config.resume, run_dir, lambda text: None)
    )


def _check_resume(
    config: Config,
    derived: ResolvedValues,
    prepared: Prepared,
    run_dir: RunDir,
    path: Path,
    meta: dict[str, Any],
    say: Say,
    allow_change: bool,
) -> dict[str, Any] | None:
    """Raise ConfigError where the run cannot go on exactly from ``path``. Returns the report, where
    it is done already."""
    _check_same_config(config, meta["config"], path, allow_change, say)
    check_row_state(config, load_stored(meta["config"]), path)
    _check_same_data(prepared, meta, path, allow_change, say)
    if meta["step"] > derived.steps:
        raise ConfigError(
            f"{path} is at step {meta['step']}, and the run has {derived.steps} steps",
            fix="raise `max_steps` or `num_train_epochs`, or set another `output_dir`",
        )
    finished = _finished_report(run_dir, derived) if config.resume == "auto" else None
    if finished is None:
        say("info", f"resuming from step {meta['step']} of {derived.steps}: {path}")
    return finished


def _stored_config(run_dir: RunDir) -> dict[str, Any]:
    from paceline.config.load import load_config

    try:
        return load_config(run_dir.config).config.model_dump(mode="json")
    except ConfigError as error:
        reason = error.what.splitlines()[0].rstrip(":")
        raise ConfigError(
            f"`output_dir: {run_dir.root}` holds another run, or something else: its config.yaml"
            f" does not load ({reason})",
            fix="set another `output_dir`",
        ) from error


def _check_same_config(
    config: Config, stored: dict[str, Any], where: Path, allow_change: bool, say: Say
) -> None:
    changes = [one for one in diff_configs(load_stored(stored), config) if changes_training(*one)]
    if not changes:
        return
    listing = "; ".join(f"{key}: {old!r} → {new!r}" for key, old, new in changes)
    if allow_change:
        say("warning", f"going on with a changed config, as told: {listing}")
        return
    kept = next(
        (
            f"`train_args.precision={old}`"
            for key, old, _ in changes
            if key == "train_args.precision"
        ),
        None,
    )
    if kept is not None and len(changes) == 1:
        raise ConfigError(
            f"`output_dir` holds another run ({where}), made with another precision. Changed:"
            f" {listing}. `precision: auto` follows the device",
            fix=(
                f"set {kept} to resume in the precision of the run; set another `output_dir` for a"
                " new run; or pass --allow-config-change"
            ),
        )
    raise ConfigError(
        f"`output_dir` holds another run ({where}), made with another config. Changed: {listing}",
        fix=(
            "set another `output_dir` for a new run; put the old values back to go on with it; or"
            " pass --allow-config-change to go on with the new ones"
        ),
    )


def _check_same_data(
    prepared: Prepared, meta: dict[str, Any], path: Path, allow_change: bool, say: Say
) -> None:
    if meta["fingerprint"] == prepared.fingerprint:
        return
    if allow_change:
        say("warning", f"going on from {path} although the training data is not what it was")
        return
    raise ConfigError(
        f"the run in {path} cannot go on exactly: the training data is not what it was",
        fix=(
            "put the data, the tokenizer and its chat template back as they were; or pass"
            " --allow-config-change; or set another `output_dir`"
        ),
    )


def _finished_report(run_dir: RunDir, derived: ResolvedValues) -> dict[str, Any] | None:
    try:
        report = json.loads(run_dir.report.read_text())
    except (OSError, ValueError):
        return None
    done = (
        report.get("status") == "done"
        and report.get("steps") == derived.steps
        and os.path.isdir(run_dir.model)
    )
    return dict(report) if done else None
