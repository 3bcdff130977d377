"""`paceline data stats`: the figures of a config's dataset as a table, as JSON, and as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from paceline.commands.data import shown
from paceline.config.load import load_config
from paceline.config.overrides import split_cli
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.core.files import write_atomic
from paceline.core.formatting import counted

_MODEL = "builtin:qwen2-tiny"
_BAR = 40


def show_stats(tokens: list[str], output: str | None, as_json: bool) -> int:
    """Read the config, prepare its data, print its figures, write the page. Returns the exit code.

    Raises:
        ConfigError: everything that can be wrong with the config or the data; a page that could not
            be written.
    """
    page = Path(output).expanduser() if output is not None else None
    if page is not None and (not output or page.is_dir() or not page.absolute().parent.is_dir()):
        raise ConfigError(
            f"`--output {output}` cannot be written",
            allowed="a file in a folder that exists",
            fix="name an HTML file",
        )
    path, overrides = split_cli(tokens)
    if path is None and not overrides:
        raise ConfigError(
            "no dataset is given",
            allowed="paceline data stats CONFIG.yaml, or dataset=FILE",
            fix="name one",
        )
    if path is None and not any(one.partition("=")[0] == "model" for one in overrides):
        named = next(
            (one.partition("=")[2] for one in overrides if one.startswith("tokenizer=")), _MODEL
        )
        overrides = [*overrides, f"model={named}"]
        print(f"no model is given: tokens are those of {named}", file=sys.stderr)
    from paceline.data.stats import dataset_stats
    from paceline.models.positions import fit_length

    loaded = fit_length(load_config(path, overrides))

    figures, prepared = dataset_stats(loaded.config)
    for level, text in [*loaded.notices, *prepared.notices]:
        print(f"{'warning: ' if level == 'warning' else ''}{text}", file=sys.stderr)
    result = {"dataset": ", ".join(one.path for one in loaded.config.sources()), **figures}
    if page is not None:
        from paceline.commands.data_page import render

        write_atomic(page, render(result))
        print(f"written: {page}", file=sys.stderr)
    print(json.dumps(result) if as_json else table(result))
    return EXIT_DONE


def facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that stand above the plots, as pairs of label and value."""
    lengths, repeats, words = result["lengths"], result["duplicates"], result["vocabulary"]
    held = f", {result['held_out']:,} of them held out for validation" if result["held_out"] else ""
    uncut = (
        ", each document as one, before it is cut"
        if result["overlong"] == "cut into samples"
        else ""
    )
    spread = f"{lengths['min']:,} to {lengths['max']:,}"
    return [
        ("samples", f"{result['samples']:,}{uncut}{held}"),
        ("tokens", f"{result['tokens']:,}, {result['label_tokens']:,} with loss"),
        ("length", f"mean {lengths['mean']:,.1f}, median {lengths['p50']:,}, 99 % at most {lengths['p99']:,}, {spread}"),
        ("duplicates", f"{repeats['samples']:,} ({100 * repeats['share']:.2f} %) repeat an earlier sample, token for token"),
        ("vocabulary", f"{words['used']:,} of {words['size']:,} tokens are used ({100 * words['coverage']:.1f} %)"),
    ]  # fmt: skip


def limit_rows(result: dict[str, Any]) -> list[list[str]]:
    """One row a `max_length`: limit, samples cut, their share, left out whole, tokens lost, their
    share."""
    return [
        [
            f"{one['max_length']:,}"
            + (" (config)" if one["max_length"] == result["max_length"] else ""),
            f"{one['samples_cut']:,}",
            f"{100 * one['share_cut']:.2f} %",
            f"{one['samples_left_out']:,}",
            f"{one['tokens_lost']:,}",
            f"{100 * one['share_lost']:.2f} %",
        ]
        for one in result["limits"]
    ]


def overlong_text(result: dict[str, Any]) -> str:
    """What becomes of a sample that is too long, for a person."""
    words = {"truncate": "is truncated", "drop": "is left out"}
    return (
        "A sample longer than max_length"
        f" {words.get(result['overlong'], 'is ' + result['overlong'])}."
    )


HEADS = ("max_length", "longer samples", "share", "left out", "tokens lost", "share")


def table(result: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [f"{label:<11} {value}" for label, value in facts(result)]
    for one in result["duplicates"]["most_repeated"]:
        lines.append(f"            {counted(one['times'], 'time')}: {shown(one['text'])}")
    most = max(one["samples"] for one in result["histogram"])
    lines += ["", "tokens, samples"]
    for one in result["histogram"]:
        bar = "█" * round(_BAR * one["samples"] / most)
        lines.append(f"{one['from']:>8,}–{one['to'] - 1:<8,} {one['samples']:>9,}  {bar}".rstrip())
    lines += ["", overlong_text(result), ""]
    rows = [list(HEADS), *limit_rows(result)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADS))]
    lines += [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(lines)
