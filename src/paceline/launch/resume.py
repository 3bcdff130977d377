"""From which checkpoint a run continues, and whether it can continue from it exactly."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.checkpoint.remote import CheckpointStore, fetch_checkpoint, is_url
from paceline.config.derive import ResolvedValues
from paceline.config.diff import changes_training
from paceline.config.load import diff_configs, load_config, load_stored
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.log import CONSOLE_ONLY
from paceline.core.run_dir import RunDir
from paceline.launch.layout import check_row_state
from paceline.tasks.base import Prepared
from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)


def checkpoint_to_resume(config: Config, run_dir: RunDir) -> Path | None:
    """Return the checkpoint from which the first attempt continues.

    Raises:
        ConfigError: the one that the config names is damaged.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return _newest_whole(run_dir)
    path = _find(config.resume, run_dir, _log_skipped)
    problem = store.verify(path)
    if problem is not None:
        raise ConfigError(
            f"`resume: {config.resume}` is not whole: {problem}",
            fix="give an earlier checkpoint, or `resume=auto`",
        )
    _log_foreign_files(path)
    return path


def fetch_newest(config: Config, run_dir: RunDir, *, is_first_attempt: bool, dry_run: bool) -> None:
    """Download the newest checkpoint of ``checkpoint_dir`` to the run's folder, if it is not there.

    Raises:
        ConfigError: ``checkpoint_dir`` holds a run, and `resume: never` asks for a new one.
    """
    remote = CheckpointStore(str(config.checkpoint_dir))
    remote.check()
    if config.resume == "never" and is_first_attempt and remote.names():
        raise ConfigError(
            f"`checkpoint_dir: {remote.url}` holds a run already, and `resume: never` asks for a"
            " new one",
            fix=(
                "set another `checkpoint_dir`, delete what is there, or set `resume: auto` to"
                " resume it"
            ),
        )
    if (config.resume == "auto" or not is_first_attempt) and not dry_run:
        remote.fetch_newest(run_dir.checkpoints, _log_skipped)


def _find(text: str, run_dir: RunDir, on_damage: Callable[[str], None]) -> Path:
    """The checkpoint that ``resume`` names; one in an object store is downloaded to the run's
    folder."""
    if not is_url(text):
        return store.find(Path(text), on_damage)
    return fetch_checkpoint(text, run_dir.root / ".resume", on_damage)


def _newest_whole(run_dir: RunDir) -> Path | None:
    path, damaged = store.newest_whole(run_dir.checkpoints)
    for text in damaged:
        _log_skipped(text)
    if path is not None:
        _log_foreign_files(path)
    return path


def _log_foreign_files(path: Path) -> None:
    foreign = store.foreign_files(path)
    if foreign:
        logger.warning(
            "%s holds what is not the checkpoint's, and is not read: %s", path, ", ".join(foreign)
        )


def _log_skipped(text: str) -> None:
    logger.warning("a checkpoint is passed over: %s", text)


def checkpoint_after_restart(config: Config, run_dir: RunDir) -> Path | None:
    """Return the checkpoint from which a later attempt continues: the run's newest, else that from
    which the first attempt started."""
    newest = _newest_whole(run_dir)
    if newest is not None or config.resume in ("auto", "never"):
        return newest
    return _find(config.resume, run_dir, lambda text: None)


def check_resume(
    spec: RunSpec, path: Path, meta: dict[str, Any], allow_change: bool
) -> dict[str, Any] | None:
    """Check that the run can continue exactly from the checkpoint at ``path``.

    Returns:
        The report, if the run is complete already.

    Raises:
        ConfigError: it cannot.
    """
    config, derived = spec.config, spec.derived
    _check_same_config(config, meta["config"], path, allow_change)
    check_row_state(config, load_stored(meta["config"]), path)
    _check_same_data(spec.data, meta, path, allow_change)
    if meta["step"] > derived.steps:
        raise ConfigError(
            f"{path} is at step {meta['step']}, and the run has {derived.steps} steps",
            fix="raise `max_steps` or `num_train_epochs`, or set another `output_dir`",
        )
    run_dir = RunDir(Path(config.output_dir))
    finished = _finished_report(run_dir, derived) if config.resume == "auto" else None
    if finished is None:
        # The `resume` event holds it.
        text = f"resuming from step {meta['step']} of {derived.steps}: {path}"
        logger.info(text, extra=CONSOLE_ONLY)
    return finished


def check_restart(config: Config, run_dir: RunDir, allow_change: bool) -> None:
    """Check that the run in the folder, which reached no checkpoint, may start again.

    Raises:
        ConfigError: it has another config.
    """
    _check_same_config(config, _stored_config(run_dir), run_dir.root, allow_change)
    logger.info(
        "%s holds a run that reached no checkpoint: it starts again from the beginning",
        run_dir.root,
        extra=CONSOLE_ONLY,
    )


def _stored_config(run_dir: RunDir) -> dict[str, Any]:
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
    config: Config, stored: dict[str, Any], where: Path, allow_change: bool
) -> None:
    changes = [
        change for change in diff_configs(load_stored(stored), config) if changes_training(*change)
    ]
    if not changes:
        return
    listing = "; ".join(f"{key}: {old!r} → {new!r}" for key, old, new in changes)
    if allow_change:
        logger.warning(
            "resuming with config changes (--allow-config-change): %s", listing, extra=CONSOLE_ONLY
        )
        return
    setting = next(
        (
            f"`train_args.precision={old}`"
            for key, old, _ in changes
            if key == "train_args.precision"
        ),
        None,
    )
    if setting is not None and len(changes) == 1:
        raise ConfigError(
            f"`output_dir` holds another run ({where}), made with another precision. Changed:"
            f" {listing}. `precision: auto` follows the device",
            fix=(
                f"set {setting} to resume in the precision of the run; set another `output_dir` for"
                " a new run; or pass --allow-config-change"
            ),
        )
    raise ConfigError(
        f"`output_dir` holds another run ({where}), made with another config. Changed: {listing}",
        fix=(
            "set another `output_dir` for a new run; put the old values back to go on with it; or"
            " pass --allow-config-change to go on with the new ones"
        ),
    )


def _check_same_data(data: Prepared, meta: dict[str, Any], path: Path, allow_change: bool) -> None:
    if meta["fingerprint"] == data.fingerprint:
        return
    if allow_change:
        logger.warning(
            "the run continues from %s although the training data has changed",
            path,
            extra=CONSOLE_ONLY,
        )
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
