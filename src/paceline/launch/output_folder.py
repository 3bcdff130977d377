"""Whether a run may write into its `output_dir`, and keep checkpoints in its `checkpoint_dir`."""

import logging
import tempfile
from pathlib import Path

from paceline.checkpoint.remote import check_url, is_url
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.log import CONSOLE_ONLY
from paceline.core.run_dir import RunDir, lock_run

logger = logging.getLogger(__name__)


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
