"""`paceline data stats`: show the statistics of a dataset as a table, as JSON, or as a page."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from paceline.commands.options import (
    OptionParser,
    OutputFile,
    add_config,
    config_and_overrides,
    load_fitted_config,
    print_notices,
)
from paceline.commands.reports import write_output
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.core.log import Notice

if TYPE_CHECKING:
    from paceline.config.schema import Config

_DEFAULT_MODEL = "builtin:qwen2-tiny"


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--output", OutputFile("an HTML file"), "FILE", "HTML page with charts to write"
    )
    parser.add_flag(
        "--near-duplicates", "also search for similar samples (needs datasketch, extra `data`)"
    )
    parser.add_flag("--languages", "also identify the languages (needs py3langid, extra `data`)")
    parser.example = "paceline data stats examples/demo.yaml --output stats.html"


def run(args: Namespace) -> int:
    """Prepare the data, print its statistics, and write the page."""
    from paceline.data.sources.kinds import classifies_images

    _add_default_model(args)
    loaded = load_fitted_config(args)
    config = loaded.config
    has_images = config.task == "classify" and classifies_images(config)
    if has_images or config.task == "recommend":
        result, notices, text, page = _without_tokens(args, config, has_images)
    else:
        result, notices, text, page = _with_tokens(args, config)
    print_notices([*loaded.notices, *notices])
    if args.output is not None:
        write_output(args.output, page)
    print(json.dumps(result) if args.json else text)
    return EXIT_DONE


#: The figures, messages, and the figures as text and as a page.
_Shown = tuple[Any, list[Notice], str, str]


def _with_tokens(args: Namespace, config: Config) -> _Shown:
    from paceline.data.stats.dataset import dataset_stats
    from paceline.data.stats.text import render_page, table
    from paceline.models.builtin import resolve_model
    from paceline.models.kinds import reads_images

    result, prepared = dataset_stats(
        config,
        resolve_model,
        near_duplicates=args.near_duplicates,
        languages=args.languages,
        has_images=reads_images(config),
    )
    return result, prepared.notices, table(result), render_page(result)


def _without_tokens(args: Namespace, config: Config, has_images: bool) -> _Shown:
    from paceline.data.stats.other import click_stats, image_stats
    from paceline.data.stats.text import click_facts, fact_table, image_facts, render_facts

    options = (("near_duplicates", "--near-duplicates"), ("languages", "--languages"))
    for name, option in options:
        if getattr(args, name):
            raise ConfigError(
                "`{option}` is not supported with `task: {task}` and this dataset: it has no texts",
                code="no-texts",
                fix="leave the option out",
                option=option,
                task=config.task,
            )
    if has_images:
        images, notices = image_stats(config)
        facts = image_facts(images)
        return images, notices, fact_table(facts), render_facts(images, facts)
    clicks, notices = click_stats(config)
    facts = click_facts(clicks)
    return clicks, notices, fact_table(facts), render_facts(clicks, facts)


def _add_default_model(args: Namespace) -> None:
    """Without a config file, add an override for the model if there is none: only its tokenizer is
    used."""
    path, overrides = config_and_overrides(args)
    if path is None and not overrides:
        raise ConfigError(
            "`paceline data stats` needs a dataset",
            code="missing-dataset",
            allowed="paceline data stats CONFIG.yaml, or dataset=FILE",
            fix="set one",
        )
    values = dict(override.partition("=")[::2] for override in reversed(overrides))
    if path is None and "model" not in values:
        model = values.get("tokenizer", _DEFAULT_MODEL)
        print(
            f"no model is set: tokens are counted with {model}'s tokenizer",
            file=sys.stderr,
        )
        args.config_tokens = [*overrides, f"model={model}"]
