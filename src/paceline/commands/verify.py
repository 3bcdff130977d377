"""`paceline verify`: certify that the parallel modes agree and cost what was estimated."""

import json
from argparse import Namespace

from paceline.commands.options import (
    AnyPath,
    OptionParser,
    Text,
    WholeNumber,
    add_config,
    config_and_overrides,
)

_WIDTH = 100


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--modes",
        type=Text("names with commas, all, or hybrid"),
        metavar="NAME,...",
        help="parallel modes; default: all that this config supports",
    )
    parser.add_argument(
        "--world-size",
        type=WholeNumber(2),
        metavar="N",
        help="number of ranks; default: the GPUs of this machine, else 4 on the CPU",
    )
    parser.add_argument(
        "--steps", type=WholeNumber(1), default=20, metavar="N", help="steps of each mode"
    )
    parser.add_argument(
        "--output",
        type=AnyPath("a folder, which may be that of a finished run"),
        metavar="DIR",
        help="folder for verify.json and verify.html",
    )
    parser.example = "paceline verify examples/demo.yaml --modes ddp,zero3 --world-size 2"


def run(args: Namespace) -> int:
    """Print the certificate. Exit code 1: a mode exceeded a bound, or failed; 2: a mode that was
    requested was refused."""
    from paceline.config.load import load_config
    from paceline.models.positions import fit_length
    from paceline.verify.run import VerifyOptions, verify

    loaded = fit_length(load_config(*config_and_overrides(args)))
    result = verify(loaded, VerifyOptions(args.modes, args.world_size, args.steps, args.output))
    if result.certificate is not None and args.json:
        print(json.dumps(result.certificate, indent=2))
    elif result.certificate is not None:
        from rich.console import Console

        from paceline.verify.table import certificate_table

        Console(width=_WIDTH, highlight=False).print(certificate_table(result.certificate))
    return result.exit_code
