"""Check that DeepSpeed is installed. Imports no torch."""

import importlib.util

from paceline.core.errors import ConfigError

SUPPORTED = "deepspeed>=0.19,<0.20"


def check_installed(stage: int) -> None:
    """Raise ConfigError if DeepSpeed is not installed.

    It is not imported, which takes a second: a rank reports it if DeepSpeed cannot be imported.

    Args:
        stage: the requested ZeRO stage; the error suggests the mode for it.
    """
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:  # a folder of that name is not DeepSpeed
        raise not_installed(f"zero{stage}")


def not_installed(mode: str) -> ConfigError:
    return ConfigError(
        "`parallel.mode: deepspeed`: DeepSpeed is not installed",
        code="missing-deepspeed",
        allowed="`parallel.mode: zero1`, `zero2` and `zero3` shard the same without DeepSpeed",
        fix="run `pip install 'paceline[deepspeed]'`, or set `parallel.mode: {mode}`"
        " (`parallel.mode={mode}` on the command line)",
        mode=mode,
    )
