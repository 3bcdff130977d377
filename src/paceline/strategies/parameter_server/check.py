"""Checks of a run that resumes from a checkpoint of parameter servers."""

from pathlib import Path

from paceline.config.schema import Config
from paceline.core.errors import ConfigError


def check_stored(config: Config, stored: Config, path: Path) -> None:
    """Check that the optimizer can use the row state in a checkpoint of parameter servers.

    Raises:
        ConfigError: if the stored state belongs to another kind of optimizer.
    """
    stored_optimizer, optimizer = stored.parameter_server.optimizer, config.train_args.optim
    if stored_optimizer != optimizer:
        raise ConfigError(
            "{path} was written with `parameter_server.optimizer: {stored_optimizer}`, whose state"
            " `optim: {optimizer}` (`parallel.mode: {mode}`) cannot use",
            code="optimizer-of-another-mode",
            fix="set `parallel.mode: parameter_server`, or another `output_dir` for a new run",
            path=path,
            stored_optimizer=stored_optimizer,
            optimizer=optimizer,
            mode=config.parallel.mode,
        )
