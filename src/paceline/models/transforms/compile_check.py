"""Check `train_args.torch_compile` before a run. Imports no torch."""

import os
from importlib.util import find_spec
from shutil import which

from paceline.config.schema import Config
from paceline.core.errors import ConfigError

_WHAT = "`train_args.torch_compile: true`"
_OFF = "set `train_args.torch_compile: false`"


def check_compile(config: Config, device_type: str) -> None:
    """Raise ConfigError if blocks cannot be compiled on this host, or not with these settings."""
    args = config.train_args
    if not args.torch_compile:
        return
    if args.recomputation == "selective":
        raise ConfigError(
            "{subject} is not supported with `train_args.gradient_checkpointing: selective`: the"
            " compiler itself selects which results of a graph it stores, and matrix products are"
            " among them",
            code="compile-with-selective-checkpointing",
            allowed="none, full, N",
            fix="set `train_args.gradient_checkpointing: none`, or `full` to store less",
            subject=_WHAT,
        )
    if args.torch_compile_backend != "inductor":
        return
    if device_type == "cpu":
        if not any(which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name):
            raise ConfigError(
                "{subject} requires a C++ compiler on CPUs, and none was found",
                code="missing-compiler",
                fix="install g++, set the variable CXX to a compiler, or {off}",
                subject=_WHAT,
                off=_OFF,
            )
    elif device_type in ("cuda", "xpu") and find_spec("triton") is None:
        raise ConfigError(
            "{subject} requires Triton on `{device_type}`, and it is not installed",
            code="missing-triton",
            fix="run `pip install triton`, or {off}",
            subject=_WHAT,
            device_type=device_type,
            off=_OFF,
        )
