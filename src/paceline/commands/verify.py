"""`paceline verify`: certify that the parallel modes agree and cost what was estimated."""

import json
from argparse import Namespace

from paceline.commands.options import (
    AnyPath,
    Integer,
    OptionParser,
    Text,
    add_config,
    load_fitted_config,
)

_WIDTH = 100


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--modes",
        type=Text("comma-separated names, all, or hybrid"),
        metavar="NAME,...",
        help="parallel modes (default: all that this config supports)",
    )
    parser.add_argument(
        "--world-size",
        type=Integer(2),
        metavar="N",
        help="number of ranks (default: number of GPUs, or 4 on the CPU)",
    )
    parser.add_argument(
        "--steps", type=Integer(1), default=20, metavar="N", help="number of steps of each mode"
    )
    parser.add_argument(
        "--output",
        type=AnyPath("a folder, also of a finished run"),
        metavar="DIR",
        help="folder to write verify.json and verify.html to",
    )
    parser.example = "paceline verify examples/demo.yaml --modes ddp,zero3 --world-size 2"


def run(args: Namespace) -> int:
    """Print the certificate. Exit code 1: a mode exceeded a bound or failed; 2: a requested mode is
    not supported."""
    from paceline.verify.run import VerifyOptions, verify

    options = VerifyOptions(args.modes, args.world_size, args.steps, args.output)
    result = verify(load_fitted_config(args), options)
    if result.certificate is not None and args.json:
        print(json.dumps(result.certificate, indent=2))
    elif result.certificate is not None:
        from rich.console import Console

        from paceline.verify.table import certificate_table

        Console(width=_WIDTH, highlight=False).print(certificate_table(result.certificate))
    return result.exit_code
