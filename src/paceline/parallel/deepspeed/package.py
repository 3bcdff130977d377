"""DeepSpeed as a package: whether it is there, and its import, in silence."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.core.errors import ConfigError


def check_installed(stage: int) -> None:
    """Raise ConfigError if DeepSpeed is not installed. It is not imported: that takes a second, and
    each rank reports by itself if DeepSpeed does not load.

    Args:
        stage: the ZeRO stage that is asked for, for the remedy.
    """
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:  # a folder of that name is not DeepSpeed
        raise _not_installed(f"zero{stage}")


def import_deepspeed(device_type: str) -> Any:
    """The module ``deepspeed``. ``device_type``: "cpu" makes it compute there whatever else it
    finds.

    Raises:
        ConfigError: not installed, or it does not load on this machine.
    """
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when DeepSpeed is first imported
    try:
        with quiet():
            found = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "deepspeed":
            raise _does_not_load(error) from error
        raise _not_installed("zero2") from error
    except Exception as error:  # it looks for compilers and drivers while it is imported
        raise _does_not_load(error) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device_type == "cpu":
        # DeepSpeed asks oneDNN, which needs AVX512-FP16; torch computes float16 on every CPU.
        found.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return found


def _not_installed(mode: str) -> ConfigError:
    return ConfigError(
        "`parallel.mode: deepspeed`, and DeepSpeed is not installed",
        allowed="`parallel.mode: zero1`, `zero2` and `zero3` shard the same without DeepSpeed",
        fix=(
            f"run `pip install 'paceline[deepspeed]'`, or set `parallel.mode: {mode}`"
            f" (`parallel.mode={mode}` on the command line)"
        ),
    )


def _does_not_load(error: Exception) -> ConfigError:
    return ConfigError(
        f"`parallel.mode: deepspeed`, and DeepSpeed does not load here: {type(error).__name__}:"
        f" {error}",
        allowed="`parallel.mode: zero1`, `zero2` and `zero3` do the same without it",
        fix="run `pip install 'paceline[deepspeed]'`, or set another mode",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed logs to the terminal at every turn, and calls what torch has renamed."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
