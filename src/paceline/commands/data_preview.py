"""`paceline data preview`: show the first rows of a dataset as the model sees them."""

import json
from argparse import Namespace

from paceline.commands.options import (
    Integer,
    OptionParser,
    add_config,
    load_fitted_config,
    print_notices,
)
from paceline.core.errors import EXIT_DONE
from paceline.core.texts import notice_record, with_translations


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option("--rows", Integer(), "N", "number of rows")
    parser.example = "paceline data preview examples/demo.yaml --rows 3"


def run(args: Namespace) -> int:
    """Print the rows."""
    from paceline.tasks.preview import as_text, preview

    loaded = load_fitted_config(args)
    settings = {} if args.rows is None else {"rows": args.rows}
    result = preview(loaded.config, **settings)
    print_notices([*loaded.notices, *result["notices"]])
    notices = [notice_record(level, text) for level, text in result["notices"]]
    record = with_translations({**result, "notices": notices})
    print(json.dumps(record, ensure_ascii=False) if args.json else as_text(result))
    return EXIT_DONE
