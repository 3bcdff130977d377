"""`paceline export`: write the merged model of a run."""

import contextlib
import json
import sys
from argparse import Namespace

from paceline.commands.options import AnyPath, OptionParser, Text
from paceline.core.errors import EXIT_DONE


def add_arguments(parser: OptionParser) -> None:
    parser.add_argument("run_dir", type=AnyPath("its output_dir"), metavar="RUN", help="run")
    parser.add_argument(
        "--merge", action="store_true", help="merge the adapter into the weights of the base model"
    )
    parser.add_argument(
        "--output",
        type=Text("a folder that does not exist yet"),
        metavar="DIR",
        help="folder to write the model to (default: RUN/exported)",
    )
    parser.add_argument(
        "--dtype",
        type=Text("auto, float32, bfloat16, float16"),
        default="auto",
        metavar="DTYPE",
        help="data type of the written weights",
    )
    parser.example = "paceline export output/demo --merge --output merged"


def run(args: Namespace) -> int:
    """Write the model, and print its folder."""
    from paceline.inference.export import export

    with contextlib.redirect_stdout(sys.stderr):
        folder = export(args.run_dir, merge=args.merge, output=args.output, dtype=args.dtype)
    print(json.dumps({"path": str(folder)}) if args.json else f"wrote {folder}")
    return EXIT_DONE
