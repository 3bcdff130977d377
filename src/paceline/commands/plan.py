"""`paceline plan`: estimate memory, traffic and time of each parallel mode."""

import json
import sys
from argparse import Namespace

from paceline.commands.options import (
    Integer,
    OptionParser,
    Text,
    add_config,
    load_fitted_config,
    print_notices,
)
from paceline.core.errors import EXIT_DONE

_WIDTH = 100  # columns, unless a terminal has its own width


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--world-size",
        type=Integer(),
        metavar="N",
        help="number of ranks (default: number of devices of this machine)",
    )
    parser.add_argument(
        "--device-memory",
        type=Text("a size, such as 80GB or 24GiB"),
        metavar="SIZE",
        help="memory of each device (default: that of this machine's devices)",
    )
    parser.add_argument(
        "--device",
        type=Text("a name of the device table, such as H100"),
        metavar="NAME",
        help="device to plan for (default: this machine's devices)",
    )
    parser.example = "paceline plan examples/demo.yaml --world-size 8 --device-memory 80GB"


def run(args: Namespace) -> int:
    """Print the plan."""
    from paceline.planner.api import make_plan

    loaded = load_fitted_config(args)
    print_notices(loaded.notices)
    plan = make_plan(loaded.config, args.world_size, args.device_memory, args.device)
    if args.json:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        from rich.console import Console

        from paceline.planner.table import plan_table

        width = None if sys.stdout.isatty() else _WIDTH
        Console(width=width, highlight=False, soft_wrap=False).print(plan_table(plan))
    return EXIT_DONE
