"""`paceline doctor`: check this machine and the links between its ranks."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.commands.options import OptionParser, WholeNumber, add_config, config_and_overrides
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.doctor.run import DoctorOptions

_MAX_RANKS = 64
_PLACEHOLDER_CONFIG = ("model=builtin:qwen2-tiny", "dataset=builtin:python-docs")
_FILE_WIDTH = 120


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--ranks",
        type=WholeNumber(1, _MAX_RANKS),
        metavar="N",
        help="number of ranks; default: those that a run with this config would have",
    )
    parser.example = "paceline doctor --ranks 2"


def run(args: Namespace) -> int:
    """Check, measure and print. Exit code 1: something would make a run fail."""
    from paceline.doctor.run import doctor

    result = doctor(make_options(args))
    if result.report is not None and args.json:
        print(json.dumps(result.report, indent=2))
    elif result.report is not None:
        from rich.console import Console

        from paceline.doctor.table import report_table

        console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)
        console.print(report_table(result.checks, result.report))
    return result.exit_code


def make_options(args: Namespace) -> DoctorOptions:
    """Load the config, or a placeholder for it.

    Raises:
        ConfigError: the config is wrong, or it names another number of ranks.
    """
    from paceline.config.load import load_config
    from paceline.doctor.run import DoctorOptions

    path, overrides = config_and_overrides(args)
    has_config = path is not None or any(
        not override.lstrip("-").startswith("parallel.") for override in overrides
    )
    loaded = load_config(path, [*([] if has_config else _PLACEHOLDER_CONFIG), *overrides])
    num_gpus = loaded.config.parallel.num_gpus
    if args.ranks is not None and num_gpus not in ("auto", args.ranks):
        raise ConfigError(
            f"`--ranks {args.ranks}` was given, and `parallel.num_gpus` is {num_gpus}",
            fix="leave one of them out",
        )
    return DoctorOptions(loaded, has_config, args.ranks)
