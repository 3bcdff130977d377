"""What of the section ``recovery`` a strategy cannot do."""

from __future__ import annotations

from paceline.config.schema import Config
from paceline.core.errors import ConfigError


def check_rewind(config: Config, mode: str) -> None:
    """Refuse to go back before a jump of the loss where no rank knows the loss of all at each step.
    ``mode``: the setting that makes it so, as in ``parallel.mode: diloco``."""
    if config.recovery.rewind_on_spike:
        raise ConfigError(
            f"`recovery.rewind_on_spike: true` does not go with `{mode}`: it needs the loss of all"
            " ranks at each step, and here they do not wait for each other",
            allowed="strategies that meet at each step, such as `parallel.mode: ddp` or zero3",
            fix=(
                "leave `recovery.rewind_on_spike` out: an update without a finite gradient is"
                " skipped all the same"
            ),
        )
