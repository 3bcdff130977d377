"""`paceline data stats`: show the statistics of a dataset as a table, as JSON, or as a page."""

import json
import sys
from argparse import Namespace

from paceline.commands.options import (
    OptionParser,
    OutputFile,
    add_config,
    config_and_overrides,
    load_fitted_config,
    print_notices,
    write_output,
)
from paceline.core.errors import EXIT_DONE, ConfigError

_DEFAULT_MODEL = "builtin:qwen2-tiny"


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--output",
        type=OutputFile("an HTML file"),
        metavar="FILE",
        help="HTML page with charts to write",
    )
    parser.add_argument(
        "--near-duplicates",
        action="store_true",
        help="also search for similar samples (needs datasketch, extra `data`)",
    )
    parser.add_argument(
        "--languages",
        action="store_true",
        help="also identify the languages (needs py3langid, extra `data`)",
    )
    parser.example = "paceline data stats examples/demo.yaml --output stats.html"


def run(args: Namespace) -> int:
    """Prepare the data, print its statistics, and write the page."""
    from paceline.data.stats.dataset import dataset_stats
    from paceline.data.stats.text import render_page, table
    from paceline.models.builtin import resolve_model
    from paceline.models.kinds import reads_images

    _add_default_model(args)
    loaded = load_fitted_config(args)
    result, prepared = dataset_stats(
        loaded.config,
        resolve_model,
        near_duplicates=args.near_duplicates,
        languages=args.languages,
        has_images=reads_images(loaded.config),
    )
    print_notices([*loaded.notices, *prepared.notices])
    if args.output is not None:
        write_output(args.output, render_page(result))
    print(json.dumps(result) if args.json else table(result))
    return EXIT_DONE


def _add_default_model(args: Namespace) -> None:
    """Without a config file, add an override for the model if there is none: only its tokenizer is
    used."""
    path, overrides = config_and_overrides(args)
    if path is None and not overrides:
        raise ConfigError(
            "`paceline data stats` needs a dataset",
            allowed="paceline data stats CONFIG.yaml, or dataset=FILE",
            fix="set one",
        )
    values = dict(override.partition("=")[::2] for override in reversed(overrides))
    if path is None and "model" not in values:
        model = values.get("tokenizer", _DEFAULT_MODEL)
        print(f"no model is set: the tokens are those of {model}", file=sys.stderr)
        args.config_tokens = [*overrides, f"model={model}"]
