"""`paceline data preview`: the first rows of a dataset as the model will see them."""

import json
from argparse import Namespace

from paceline.commands.options import (
    OptionParser,
    WholeNumber,
    add_config,
    config_and_overrides,
    print_notices,
)
from paceline.core.errors import EXIT_DONE


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_argument("--rows", type=WholeNumber(), metavar="N", help="number of rows")
    parser.example = "paceline data preview examples/demo.yaml --rows 3"


def run(args: Namespace) -> int:
    """Print the rows."""
    from paceline.config.load import load_config
    from paceline.models.positions import fit_length
    from paceline.tasks.preview import as_text, preview

    loaded = fit_length(load_config(*config_and_overrides(args)))
    settings = {} if args.rows is None else {"rows": args.rows}
    result = preview(loaded.config, **settings)
    print_notices([*loaded.notices, *result["notices"]])
    print(json.dumps(result, ensure_ascii=False) if args.json else as_text(result))
    return EXIT_DONE
