"""The folder of a run: whether the run may write into it, from which of its checkpoints it
continues, and whether it can continue exactly."""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import JsonValue

from paceline.checkpoint import store
from paceline.checkpoint.format import CheckpointMeta
from paceline.checkpoint.integrity import foreign_files, verify
from paceline.checkpoint.remote import CheckpointStore, check_url, fetch_checkpoint, is_url
from paceline.config.derive import ResolvedValues
from paceline.config.diff import changes_training
from paceline.config.load import Loaded, diff_configs, load_config, load_stored
from paceline.config.schema import Config
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError, RunError
from paceline.core.log import CONSOLE_ONLY
from paceline.core.run_dir import RunDir, lock_run
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
    problem = verify(path)
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
        remote.fetch_latest(run_dir.checkpoints, _log_skipped)


def _find(text: str, run_dir: RunDir, on_damage: Callable[[str], None]) -> Path:
    """The checkpoint that ``resume`` names; one in an object store is downloaded to the run's
    folder."""
    if not is_url(text):
        return store.find(Path(text), on_damage)
    return fetch_checkpoint(text, run_dir.root / ".resume", on_damage)


def _newest_whole(run_dir: RunDir) -> Path | None:
    path, damaged = store.latest_valid(run_dir.checkpoints)
    for text in damaged:
        _log_skipped(text)
    if path is not None:
        _log_foreign_files(path)
    return path


def _log_foreign_files(path: Path) -> None:
    foreign = foreign_files(path)
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
    spec: RunSpec, path: Path, meta: CheckpointMeta, allow_change: bool
) -> dict[str, JsonValue] | None:
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


def _stored_config(run_dir: RunDir) -> dict[str, JsonValue]:
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
    config: Config, stored: Mapping[str, YamlValue], where: Path, allow_change: bool
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


def _check_same_data(data: Prepared, meta: CheckpointMeta, path: Path, allow_change: bool) -> None:
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


def _finished_report(run_dir: RunDir, derived: ResolvedValues) -> dict[str, JsonValue] | None:
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


def check_run_folder(loaded: Loaded, run_dir: RunDir, is_first_attempt: bool) -> None:
    """Check that this run may use the folder. A run in it that is just ending is waited for.

    Raises:
        ConfigError: another run holds the folder, or what is in it would be overwritten.
    """
    if is_first_attempt:
        _check_no_run(loaded.config, run_dir)
    _check_no_overwriting(loaded, run_dir)
    _wait_until_free(run_dir)


def check_checkpoint_dir(place: str, output_dir: Path) -> None:
    """Raise ConfigError if checkpoints cannot be kept at ``place``. Connects to nothing."""
    check_url("checkpoint_dir", place)
    if is_url(place):
        return
    folder, checkpoints = Path(place).absolute(), RunDir(output_dir).checkpoints.absolute()
    if folder in (checkpoints, output_dir.absolute()) or checkpoints in folder.parents:
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


def _wait_until_free(run_dir: RunDir) -> None:
    """Raise ConfigError where another run is going on in the folder; one that is just ending is
    waited for."""
    if not run_dir.lock.exists():
        return
    try:
        lock_run(run_dir, wait_s=0.0, sign=False).close()
    except RunError:
        logger.info("waiting for the run in %s to end…", run_dir.root, extra=CONSOLE_ONLY)
        try:
            lock_run(run_dir, wait_s=10.0, sign=False).close()
        except RunError as error:
            raise ConfigError(error.what, fix=error.fix) from error


def _check_no_run(config: Config, run_dir: RunDir) -> None:
    if config.resume == "never" and run_dir.is_run():
        raise ConfigError(
            f"`output_dir: {run_dir.root}` holds a run already, and `resume: never` asks for a"
            " new one",
            fix=(
                "set another `output_dir`, delete that folder, or set `resume: auto` to go on"
                " with it"
            ),
        )


def _check_no_overwriting(loaded: Loaded, run_dir: RunDir) -> None:
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
    existing = [
        path.name for path in (run_dir.model, run_dir.report, run_dir.report_html) if path.exists()
    ]
    if existing and not run_dir.config.is_file():
        raise ConfigError(
            f"`output_dir: {root}` holds no run, and the run would write over what is there:"
            f" {', '.join(existing)}",
            fix="set another `output_dir`, e.g. `output_dir=./output/run`",
        )
