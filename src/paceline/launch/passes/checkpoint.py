"""Check whether a run may use its output folder, from which checkpoint it resumes, and whether it
can resume exactly."""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint import store
from paceline.checkpoint.format import CheckpointMeta
from paceline.checkpoint.integrity import foreign_files, verify
from paceline.checkpoint.reader import read_meta
from paceline.checkpoint.remote import CheckpointStore, fetch_checkpoint
from paceline.checkpoint.urls import check_url, is_url
from paceline.config.diff import changes_training, has_same_end
from paceline.config.load import Loaded, diff_configs, load_config, load_stored
from paceline.config.schema import Config
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.log import CONSOLE_ONLY
from paceline.core.report import Report
from paceline.core.run_dir import RunDir, lock_run, propose_folder
from paceline.core.texts import UserText
from paceline.launch.passes.draft import Draft, known
from paceline.parallel.registry import check_stored
from paceline.tasks.base import Prepared

logger = logging.getLogger(__name__)


def find_checkpoint(draft: Draft) -> Draft:
    """Find the checkpoint that the run resumes from, and download it if only ``checkpoint_dir`` has
    it. Rank 0 finds it for the ranks of all hosts."""
    if not draft.reads_folder:
        return draft
    config, run_dir, is_first_attempt = draft.config, draft.run_dir, draft.is_first_attempt
    if config.checkpoint_dir is not None:
        fetch_latest(config, run_dir, is_first_attempt=is_first_attempt, dry_run=draft.dry_run)
    choose = checkpoint_to_resume if is_first_attempt else checkpoint_after_restart
    path = choose(config, run_dir)
    if path is None:
        return draft
    meta = read_meta(path)
    size = int(meta["global_batch_size"])
    return replace(draft, resume_from=str(path), meta=meta, global_batch_size=size)


def check_same_batch(draft: Draft) -> None:
    """Check that the run does not resume with another global batch size."""
    configured = draft.config.train_args.global_batch_size
    resumed = draft.global_batch_size
    if resumed is not None and configured not in (None, resumed):
        raise ConfigError(
            "`train_args.global_batch_size: {configured}`: the run in `output_dir` has a global"
            " batch of {resumed:sample}, which does not change when it resumes",
            code="changed-global-batch",
            allowed=str(resumed),
            fix="set another `output_dir` for a new run",
            configured=configured,
            resumed=resumed,
        )


def check_stored_config(draft: Draft) -> None:
    """Check that the run in the folder has the same config, before the data are read. Keys that
    the config leaves open are compared later, by :func:`compare_with_run`, which also reports a
    folder that cannot be read."""
    config, run_dir = draft.config, draft.run_dir
    if draft.allow_config_change or not draft.reads_folder or config.resume != "auto":
        return
    newest = store.committed(run_dir.checkpoints)[-1:]
    try:
        if newest:
            stored = read_meta(newest[0])["config"]
        elif run_dir.config.is_file():
            stored = load_config(run_dir.config).config.model_dump(mode="json")
        else:
            return
        load_stored(stored)
    except (PacelineError, OSError, ValueError):
        return
    path = newest[0] if newest else run_dir.root
    _check_same_config(config, stored, path, allow_change=False, is_early=True)


def compare_with_run(draft: Draft) -> Draft:
    """Check that the run can continue the one in its folder exactly, and read the report if that
    one is complete."""
    allow_change = draft.allow_config_change
    if draft.meta is not None:
        return replace(draft, finished=_compare_with_checkpoint(draft, draft.meta))
    if draft.reads_folder and draft.config.resume == "auto" and draft.run_dir.config.is_file():
        check_restart(draft.config, draft.run_dir, allow_change)
    return draft


def checkpoint_to_resume(config: Config, run_dir: RunDir) -> Path | None:
    """Return the checkpoint from which the first attempt resumes.

    Raises:
        ConfigError: if the checkpoint that the config names is damaged.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return _latest_valid(run_dir)
    path = _find(config.resume, run_dir, _log_skipped)
    problem = verify(path)
    if problem is not None:
        raise ConfigError(
            "`resume: {resume}` is not a valid checkpoint: {problem}",
            code="invalid-resume-checkpoint",
            fix="set an earlier checkpoint, or `resume=auto`",
            resume=config.resume,
            problem=problem,
        )
    _log_foreign_files(path)
    return path


def fetch_latest(config: Config, run_dir: RunDir, *, is_first_attempt: bool, dry_run: bool) -> None:
    """Download the latest valid checkpoint from ``checkpoint_dir``, unless the run's folder already
    has it.

    Raises:
        ConfigError: if ``checkpoint_dir`` contains a run, but `resume: never` starts a new one.
    """
    remote = CheckpointStore(str(config.checkpoint_dir))
    remote.check()
    if config.resume == "never" and is_first_attempt and remote.names():
        raise ConfigError(
            "`checkpoint_dir: {url}` already contains a run, but `resume: never` starts a new one",
            code="checkpoint-dir-contains-run",
            fix="set another `checkpoint_dir`, delete this one, or set `resume: auto` to resume it",
            url=remote.url,
        )
    if (config.resume == "auto" or not is_first_attempt) and not dry_run:
        remote.fetch_latest(run_dir.checkpoints, _log_skipped)


def _find(text: str, run_dir: RunDir, warn: Callable[[str], None]) -> Path:
    """Return the checkpoint that ``resume`` names. If it is in an object store, download it to the
    run's folder first."""
    if not is_url(text):
        return store.find(Path(text), warn)
    return fetch_checkpoint(text, run_dir.root / ".resume", warn)


def _latest_valid(run_dir: RunDir) -> Path | None:
    path, problems = store.latest_valid(run_dir.checkpoints)
    for text in problems:
        _log_skipped(text)
    if path is not None:
        _log_foreign_files(path)
    return path


def _log_foreign_files(path: Path) -> None:
    foreign = foreign_files(path)
    if foreign:
        logger.warning(
            UserText(
                "ignoring files in {path} that do not belong to the checkpoint: {foreign}",
                code="foreign-files-ignored",
                path=path,
                foreign=", ".join(foreign),
            ),
        )


def _log_skipped(text: str) -> None:
    logger.warning(UserText("skipping a checkpoint: {text}", code="checkpoint-skipped", text=text))


def checkpoint_after_restart(config: Config, run_dir: RunDir) -> Path | None:
    """Return the checkpoint from which the run resumes after a restart: its latest valid one, or
    else the one from which the first attempt started."""
    latest = _latest_valid(run_dir)
    if latest is not None or config.resume in ("auto", "never"):
        return latest
    return _find(config.resume, run_dir, lambda text: None)


def _compare_with_checkpoint(draft: Draft, meta: CheckpointMeta) -> Report | None:
    """Check that the run can resume exactly from its checkpoint.

    Returns:
        The report if the run is already complete, else None.

    Raises:
        ConfigError: if the run cannot resume exactly.
    """
    config, num_steps = draft.config, known(draft.derived).steps
    path, allow_change = Path(str(draft.resume_from)), draft.allow_config_change
    _check_same_config(config, meta["config"], path, allow_change)
    check_stored(config.parallel.mode, config, load_stored(meta["config"]), path)
    _check_same_data(known(draft.data), meta, path, allow_change)
    if meta["step"] > num_steps:
        raise ConfigError(
            "cannot resume {path}: it is at step {step}, but the run has only {num_steps} steps",
            code="beyond-last-step",
            fix="raise `max_steps` or `num_train_epochs`, or set another `output_dir`",
            path=path,
            step=meta["step"],
            num_steps=num_steps,
        )
    finished = None
    if config.resume == "auto":
        may_end_early = has_same_end(meta["config"], config)
        early_end = meta["step"] if may_end_early else None
        finished = _finished_report(draft.run_dir, num_steps, early_end)
    if finished is None:
        # The event log contains this in its `resume` event.
        logger.info(f"resuming from step {meta['step']} of {num_steps}: {path}", extra=CONSOLE_ONLY)
    return finished


def check_restart(config: Config, run_dir: RunDir, allow_change: bool) -> None:
    """Check that a run whose folder has no checkpoint yet may start from the beginning.

    Raises:
        ConfigError: if the config stored in the folder differs or cannot be loaded.
    """
    try:
        stored = load_config(run_dir.config).config.model_dump(mode="json")
    except ConfigError as error:
        reason = error.what.splitlines()[0].rstrip(":")
        raise ConfigError(
            "`output_dir: {root}` contains another run: its config.yaml cannot be loaded"
            " ({reason})",
            code="config-of-run-unreadable",
            fix="set another `output_dir`",
            root=run_dir.root,
            reason=reason,
        ) from error
    _check_same_config(config, stored, run_dir.root, allow_change)
    logger.info(
        "the run in %s has no checkpoint yet: it starts from the beginning",
        run_dir.root,
        extra=CONSOLE_ONLY,
    )


def _check_same_config(
    config: Config,
    stored: Mapping[str, YamlValue],
    path: Path,
    allow_change: bool,
    is_early: bool = False,
) -> None:
    """Check that a run may continue with this config.

    Args:
        is_early: whether later passes may still set keys that the config leaves open, so that these
            alone are no difference.
    """
    changes = [
        change
        for change in diff_configs(load_stored(stored), config)
        if changes_training(*change) and not (is_early and change[2] == "auto")
    ]
    if not changes or (is_early and all(new is None for _, _, new in changes)):
        return
    listing = "; ".join(f"{key}: {old!r} → {new!r}" for key, old, new in changes)
    if allow_change:
        logger.warning(
            "resuming with config changes (--allow-config-change): %s", listing, extra=CONSOLE_ONLY
        )
        return
    if [key for key, _, _ in changes] == ["train_args.precision"]:
        raise ConfigError(
            "`output_dir` contains a run with another precision ({path}). Changed: {listing}."
            " `precision: auto` depends on the device",
            code="changed-precision",
            fix="set `train_args.precision={changes}` to resume it; set"
            " `output_dir={propose_folder}` for a new run; or pass --allow-config-change",
            path=path,
            listing=listing,
            changes=changes[0][1],
            propose_folder=propose_folder(config.output_dir),
        )
    raise ConfigError(
        "`output_dir` contains a run with another config ({path}). Changed: {listing}",
        code="changed-config",
        fix="set `output_dir={propose_folder}` for a new run; restore the old values to resume it;"
        " or pass --allow-config-change to resume it with the new ones",
        path=path,
        listing=listing,
        propose_folder=propose_folder(config.output_dir),
    )


def _check_same_images(data: Prepared, meta: CheckpointMeta, path: Path) -> None:
    before, now = meta.get("image_backend"), data.image_backend
    if before is None or now is None or before == now:
        return
    raise ConfigError(
        "cannot resume {path} exactly: its images were processed by {before}, and would now be"
        " processed by {now}, which computes other pixels",
        code="changed-image-backend",
        fix="install torchvision: `pip install 'paceline[vision]'`; or set another `output_dir`"
        if before == "torchvision"
        else "uninstall torchvision, or set another `output_dir`",
        path=path,
        before=before,
        now=now,
    )


def _check_same_data(data: Prepared, meta: CheckpointMeta, path: Path, allow_change: bool) -> None:
    _check_same_images(data, meta, path)
    if meta["fingerprint"] == data.fingerprint:
        return
    if allow_change:
        logger.warning(
            "resuming %s with changed training data (--allow-config-change)",
            path,
            extra=CONSOLE_ONLY,
        )
        return
    raise ConfigError(
        "cannot resume {path} exactly: the training data has changed",
        code="changed-data",
        fix="restore the data, the tokenizer and its chat template; or pass --allow-config-change;"
        " or set another `output_dir`",
        path=path,
    )


def _finished_report(run_dir: RunDir, num_steps: int, early_end: int | None) -> Report | None:
    """Return the report of the run if it is complete. ``early_end`` is a step at which a callback
    may have ended it."""
    try:
        report: Report = json.loads(run_dir.report.read_text())
    except (OSError, ValueError):
        return None
    last_step = early_end if report.get("stop_reason") else num_steps
    done = (
        report.get("status") == "done"
        and report.get("steps") == last_step
        and os.path.isdir(run_dir.model)
    )
    return report if done else None


def check_run_folder(loaded: Loaded, run_dir: RunDir, is_first_attempt: bool) -> None:
    """Check that this run may use the folder. Wait if another run in it is about to end.

    Raises:
        ConfigError: if another run uses the folder, or if files in it would be overwritten.
    """
    if is_first_attempt and loaded.config.resume == "never" and run_dir.is_run():
        raise ConfigError(
            "`output_dir: {root}` already contains a run, but `resume: never` starts a new one",
            code="output-dir-contains-run",
            fix="set `output_dir={propose_folder}`, delete that folder, or set `resume: auto` to"
            " resume it",
            root=run_dir.root,
            propose_folder=propose_folder(loaded.config.output_dir),
        )
    _check_no_overwriting(loaded, run_dir)
    _wait_until_free(run_dir)


def check_checkpoint_dir(location: str, output_dir: Path) -> None:
    """Check that ``location`` is valid for checkpoints, without connecting to it.

    Raises:
        ConfigError: if it is a file or inside the run's folder, or its form is not supported.
    """
    check_url("checkpoint_dir", location)
    if is_url(location):
        return
    folder, checkpoints = Path(location).absolute(), RunDir(output_dir).checkpoints.absolute()
    if folder in (checkpoints, output_dir.absolute()) or checkpoints in folder.parents:
        raise ConfigError(
            "`checkpoint_dir: {location}` is inside the run's folder, which contains the latest"
            " checkpoint anyway",
            code="checkpoint-dir-in-output-dir",
            fix="remove `checkpoint_dir`, or set a folder outside of `output_dir`",
            location=location,
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            "`checkpoint_dir: {location}` is a file",
            code="checkpoint-dir-is-file",
            fix="set a folder",
            location=location,
        )


def check_output_dir(folder: Path) -> None:
    """Check that a run can write to ``folder``, without creating it.

    Raises:
        ConfigError: if the folder is not writable.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            "`output_dir: {folder}` is a file",
            code="output-dir-is-file",
            fix="set a folder, e.g. `output_dir=./output/run`",
            folder=folder,
        )
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigError(
            "`output_dir: {folder}` is below {parent}, which is a file",
            code="output-dir-below-file",
            fix="set another folder",
            folder=folder,
            parent=parent,
        )
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ConfigError(
            "`output_dir: {folder}` is not writable: {reason} ({parent})",
            code="output-dir-not-writable",
            fix="set a folder that you can write to, e.g. `output_dir=./output/run`",
            folder=folder,
            reason=error.strerror or error,
            parent=parent,
        ) from error


def _wait_until_free(run_dir: RunDir) -> None:
    """Raise ConfigError if another run uses the folder. Wait if that run is about to end."""
    if not run_dir.lock.exists():
        return
    try:
        lock_run(run_dir, wait_s=0.0, sign=False).close()
    except RunError:
        logger.info("waiting for the run in %s to end…", run_dir.root, extra=CONSOLE_ONLY)
        try:
            lock_run(run_dir, wait_s=10.0, sign=False).close()
        except RunError as error:
            raise ConfigError(
                error.what, code="checkpoint-dir-not-usable", fix=error.fix
            ) from error


def _check_no_overwriting(loaded: Loaded, run_dir: RunDir) -> None:
    """Check that the run would not overwrite files that a previous run did not write."""
    if run_dir.events.is_file():
        return
    root = run_dir.root
    if (
        loaded.path is not None
        and run_dir.config.exists()
        and loaded.path.resolve() == run_dir.config.resolve()
    ):
        raise ConfigError(
            "the run would overwrite your config file {loaded} with its own config.yaml: it is in"
            " `output_dir: {root}`",
            code="config-would-be-overwritten",
            fix="set another `output_dir`, e.g. `output_dir=./output/run`, or rename the file",
            loaded=loaded.path,
            root=root,
        )
    existing = [
        path.name for path in (run_dir.model, run_dir.report, run_dir.report_html) if path.exists()
    ]
    if existing and not run_dir.config.is_file():
        raise ConfigError(
            "`output_dir: {root}` does not contain a run, and the run would overwrite files in it:"
            " {existing}",
            code="files-would-be-overwritten",
            fix="set another `output_dir`, e.g. `output_dir=./output/run`",
            root=root,
            existing=", ".join(existing),
        )
