"""Options that the commands which write jobs for a cluster share."""

import re
from argparse import Namespace
from dataclasses import dataclass
from typing import NamedTuple

from paceline.commands.options import Integer, InvalidValue, OptionParser
from paceline.core.errors import ConfigError


class Duration(NamedTuple):
    """A time limit as it was written, and in seconds."""

    text: str
    seconds: int


@dataclass(frozen=True)
class TimeLimit:
    """A time limit in Slurm's notation."""

    allowed: str = (
        "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, or with"
        " :seconds"
    )

    def __call__(self, text: str) -> Duration:
        days, dash, rest = text.rpartition("-")
        parts = rest.split(":")
        numbers = [*([days] if dash else []), *parts]
        seconds = 0
        if len(parts) <= 3 and all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers):
            fields = [int(part) for part in parts]
            if dash:
                hours, minutes, rest_s = [*fields, 0, 0][:3]
            elif len(fields) == 3:
                hours, minutes, rest_s = fields
            else:
                hours, (minutes, rest_s) = 0, [*fields, 0][:2]
            # minutes, seconds that follow a larger unit
            leading = [len(fields) == 3 or bool(dash), len(fields) > 1]
            if not (leading[0] and minutes >= 60) and not (leading[1] and rest_s >= 60):
                seconds = ((int(days) if dash else 0) * 24 + hours) * 3600 + minutes * 60 + rest_s
        if not seconds:
            raise InvalidValue(
                "is not a time limit",
                allowed=self.allowed,
                fix="use e.g. 4:00:00 for four hours",
            )
        return Duration(text, seconds)


def add_hosts(parser: OptionParser) -> None:
    """Add the options for the size of a job on several hosts."""
    parser.add_option("--nodes", Integer(1, 10_000), "N", "number of hosts; required")
    parser.add_option(
        "--gpus-per-node",
        Integer(0, 64, "0 (ranks on the CPU) to 64"),
        "N",
        "number of GPUs of each host; required",
    )


def check_required(args: Namespace, *names: str) -> None:
    """Raise ConfigError if one of these options is missing."""
    missing = [f"`--{name}`" for name in names if getattr(args, name.replace("-", "_")) is None]
    if missing:
        raise ConfigError(
            "`{prog}` needs {missing}",
            code="missing-arguments",
            fix="run e.g. `{example}`",
            prog=args.command.prog,
            missing=", ".join(missing),
            example=args.command.example,
        )
