"""`paceline watch`: follow a run from another terminal."""

import sys
from argparse import Namespace

from paceline.commands.options import AnyPath, OptionParser


def add_arguments(parser: OptionParser) -> None:
    parser.add_option("run_dir", AnyPath("its output_dir"), "RUN", "run")
    parser.add_flag("--once", "print the current state, and exit")
    parser.example = "paceline watch output/demo"


def run(args: Namespace) -> int:
    """Print the events of the run until it ends."""
    from paceline.observe.watch import watch

    return watch(args.run_dir, sys.stderr if args.json else sys.stdout, once=args.once)
