"""`paceline data stats`: the figures of a config's dataset as a table, as JSON, and as a page."""

import json
import sys
from argparse import Namespace
from pathlib import Path

from paceline.commands.options import (
    OptionParser,
    OutputFile,
    add_config,
    config_and_overrides,
    print_notices,
)
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.core.files import write_atomic

_DEFAULT_MODEL = "builtin:qwen2-tiny"


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--output", type=OutputFile("an HTML file"), metavar="FILE", help="page with charts"
    )
    parser.example = "paceline data stats examples/demo.yaml --output stats.html"


def run(args: Namespace) -> int:
    """Prepare the data, print its figures, and write the page."""
    from paceline.config.load import load_config
    from paceline.data.stats import dataset_stats
    from paceline.data.stats_view import render_page, table
    from paceline.models.builtin import resolve_model
    from paceline.models.positions import fit_length

    loaded = fit_length(load_config(*_with_model(*config_and_overrides(args))))
    result, prepared = dataset_stats(loaded.config, resolve_model)
    print_notices([*loaded.notices, *prepared.notices])
    if args.output is not None:
        write_atomic(args.output, render_page(result))
        print(f"written: {args.output}", file=sys.stderr)
    print(json.dumps(result) if args.json else table(result))
    return EXIT_DONE


def _with_model(path: Path | None, overrides: list[str]) -> tuple[Path | None, list[str]]:
    """The config and its overrides, with a default model where neither names one: only its
    tokenizer is used."""
    if path is None and not overrides:
        raise ConfigError(
            "no dataset is given",
            allowed="paceline data stats CONFIG.yaml, or dataset=FILE",
            fix="name one",
        )
    values = dict(override.partition("=")[::2] for override in reversed(overrides))
    if path is not None or "model" in values:
        return path, overrides
    model = values.get("tokenizer", _DEFAULT_MODEL)
    print(f"no model is given: tokens are those of {model}", file=sys.stderr)
    return path, [*overrides, f"model={model}"]
