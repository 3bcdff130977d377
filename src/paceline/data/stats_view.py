"""The figures of a dataset as text and as a page; :mod:`paceline.data.stats` computes them."""

from pathlib import Path

from paceline.core.formatting import counted, printable
from paceline.data.stats import DatasetStats

HEADS = ("max_length", "longer samples", "share", "left out", "tokens lost", "share")
_BAR_WIDTH = 40


def facts(result: DatasetStats) -> list[tuple[str, str]]:
    """The figures that are shown above the plots, as pairs of label and value."""
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
        (
            "length",
            (
                f"mean {lengths['mean']:,.1f}, median {lengths['p50']:,}, 99 % at most"
                f" {lengths['p99']:,}, {spread}"
            ),
        ),
        (
            "duplicates",
            (
                f"{repeats['samples']:,} ({100 * repeats['share']:.2f} %) repeat an earlier sample,"
                " token for token"
            ),
        ),
        (
            "vocabulary",
            (
                f"{words['used']:,} of {words['size']:,} tokens are used"
                f" ({100 * words['coverage']:.1f} %)"
            ),
        ),
    ]


def limit_rows(result: DatasetStats) -> list[list[str]]:
    """One row for each `max_length`, with the columns of :data:`HEADS`."""
    return [
        [
            f"{limit['max_length']:,}"
            + (" (config)" if limit["max_length"] == result["max_length"] else ""),
            f"{limit['samples_cut']:,}",
            f"{100 * limit['share_cut']:.2f} %",
            f"{limit['samples_left_out']:,}",
            f"{limit['tokens_lost']:,}",
            f"{100 * limit['share_lost']:.2f} %",
        ]
        for limit in result["limits"]
    ]


def overlong_text(result: DatasetStats) -> str:
    """What happens to a sample that is too long."""
    outcomes = {"truncate": "is truncated", "drop": "is left out"}
    return (
        "A sample longer than max_length"
        f" {outcomes.get(result['overlong'], 'is ' + result['overlong'])}."
    )


def table(result: DatasetStats) -> str:
    """The figures for a terminal."""
    lines = [f"{label:<11} {value}" for label, value in facts(result)]
    for sample in result["duplicates"]["most_repeated"]:
        text = printable(sample["text"])
        lines.append(f"            {counted(sample['times'], 'time')}: {text}")
    highest = max(bin_["samples"] for bin_ in result["histogram"])
    lines += ["", "tokens, samples"]
    for bin_ in result["histogram"]:
        bar = "█" * round(_BAR_WIDTH * bin_["samples"] / highest)
        ends = f"{bin_['from']:>8,}–{bin_['to'] - 1:<8,}"
        lines.append(f"{ends} {bin_['samples']:>9,}  {bar}".rstrip())
    lines += ["", overlong_text(result), ""]
    rows = [list(HEADS), *limit_rows(result)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines += [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(lines)


def render_page(result: DatasetStats) -> str:
    """The figures as one HTML page, which opens offline."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, keep_trailing_newline=True
    )
    return environment.get_template("stats.html.jinja").render(
        stats=result,
        facts=facts(result),
        heads=HEADS,
        limit_rows=limit_rows(result),
        overlong_text=overlong_text(result),
    )
