"""Show the statistics of a dataset as text and as a page."""

from pathlib import Path

from paceline.core.files import human_bytes
from paceline.core.formatting import counted, printable
from paceline.core.report import DataFigures
from paceline.data.stats.dataset import ClassCount, DatasetStats
from paceline.data.stats.other import ClickStats, ImageStats

HEADS = ("max_length", "longer samples", "share", "dropped", "tokens lost", "share")
SOURCE_HEADS = ("source", "samples", "tokens", "share", "with loss")
_BAR_WIDTH = 40
_LANGUAGES_SHOWN = 8
_CLASSES_SHOWN = 10
_LABEL_WIDTH = 11


def facts(result: DatasetStats) -> list[tuple[str, str]]:
    """Return the statistics above the plots as pairs of label and value."""
    lengths, repeats, vocabulary = result["lengths"], result["duplicates"], result["vocabulary"]
    samples = f"{result['samples']:,}"
    if result["sequences"] > result["samples"]:
        samples += f" pairs with {result['sequences']:,} sequences, whose lengths are counted"
    if result["overlong"] == "cut into samples":
        samples += ", documents counted before they are cut"
    if result["held_out"]:
        samples += f", {result['held_out']:,} of them held out for validation"
    similar, languages = result["near_duplicates"], result["languages"]
    rows = [
        ("samples", samples),
        ("tokens", _tokens(result)),
        (
            "length",
            (
                f"mean {lengths['mean']:,.1f}, median {lengths['p50']:,}, 99 % at most"
                f" {lengths['p99']:,}, {lengths['min']:,} to {lengths['max']:,}"
            ),
        ),
        (
            "duplicates",
            (
                f"{repeats['samples']:,} ({100 * repeats['share']:.2f} %) have the same tokens as"
                " an earlier sample"
            ),
        ),
        (
            "vocabulary",
            (
                f"{vocabulary['used']:,} of {vocabulary['size']:,} tokens are used"
                f" ({100 * vocabulary['coverage']:.1f} %)"
            ),
        ),
    ]
    if result["classes"] is not None:
        rows.insert(1, ("classes", class_text(result["classes"])))
    if similar is not None:
        text = (
            f"{similar['samples']:,} ({100 * similar['share']:.2f} %) are similar to an earlier"
            f" sample (Jaccard index of at least {similar['threshold']:g}), in"
            f" {counted(similar['groups'], 'group')}"
        )
        rows.append(("similar", text))
    if languages is not None:
        parts = [
            f"{each['language']} {100 * each['share']:.1f} %"
            for each in languages[:_LANGUAGES_SHOWN]
        ]
        rest = sum(each["samples"] for each in languages[_LANGUAGES_SHOWN:])
        if rest:
            parts.append(f"others {100 * rest / result['samples']:.1f} %")
        rows.append(("languages", ", ".join(parts)))
    return rows


def _tokens(result: DatasetStats) -> str:
    text = f"{result['tokens']:,}"
    if result["task"] in ("classify", "reward"):  # no token has a loss
        return text
    return f"{text}, {result['label_tokens']:,} with loss"


def class_text(classes: list[ClassCount]) -> str:
    """Return the most frequent classes with their shares."""
    shown = [
        f"{each['label']} {each['samples']:,} ({100 * each['share']:.1f} %)"
        for each in classes[:_CLASSES_SHOWN]
    ]
    rest = len(classes) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")


def image_facts(result: ImageStats) -> list[tuple[str, str]]:
    """Return the statistics of images as pairs of label and value."""
    width, height = result["width"], result["height"]
    modes = ", ".join(f"{mode} {count:,}" for mode, count in result["modes"].items())
    rows = [
        ("images", f"{result['samples']:,}"),
        ("classes", f"{len(result['classes']):,}: {class_text(result['classes'])}"),
        ("width", f"{width['min']:,.0f} to {width['max']:,.0f} pixels, mean {width['mean']:,.1f}"),
        (
            "height",
            f"{height['min']:,.0f} to {height['max']:,.0f} pixels, mean {height['mean']:,.1f}",
        ),
        ("modes", modes),
        ("duplicates", f"{result['duplicates']:,} have the same content as an earlier image"),
        ("files", _row_text(result["rows"])),
    ]
    if (size := result["size_bytes"]) is not None:
        text = f"{human_bytes(int(size['min']))} to {human_bytes(int(size['max']))}"
        rows.insert(5, ("size", f"{text}, mean {human_bytes(int(size['mean']))}"))
    return rows


def click_facts(result: ClickStats) -> list[tuple[str, str]]:
    """Return the statistics of a click log as pairs of label and value."""
    rows = [
        ("rows", _row_text(result["rows"])),
        ("clicks", f"{100 * result['clicks']:.2f} % of the rows"),
    ]
    for name, values in result["dense"].items():
        text = f"{values['min']:,.4g} to {values['max']:,.4g}, mean {values['mean']:,.4g}"
        rows.append((name, text))
    for table in result["tables"]:
        text = f"{table['used']:,} of {table['rows']:,} rows of the table are used"
        rows.append((table["name"], text))
    return rows


def _row_text(rows: DataFigures) -> str:
    dropped = rows["dropped"]
    text = f"{rows['read']:,} read, {rows['kept']:,} kept, {sum(dropped.values()):,} dropped"
    reasons = "; ".join(f"{reason}: {count:,}" for reason, count in dropped.items())
    return f"{text} ({reasons})" if reasons else text


def fact_table(facts: list[tuple[str, str]]) -> str:
    """Return pairs of label and value as text for a terminal."""
    width = max(_LABEL_WIDTH, *(len(label) for label, _ in facts))
    return "\n".join(f"{label:<{width}} {value}" for label, value in facts)


def source_rows(result: DatasetStats) -> list[list[str]]:
    """Return one row for each source, with the columns of :data:`SOURCE_HEADS`, if there are
    several."""
    sources = result["sources"]
    if len(sources) < 2:
        return []
    return [
        [
            source["dataset"],
            f"{source['samples']:,}",
            f"{source['tokens']:,}",
            f"{100 * source['tokens'] / result['tokens']:.1f} %",
            f"{source['label_tokens']:,}",
        ]
        for source in sources
    ]


def limit_rows(result: DatasetStats) -> list[list[str]]:
    """Return one row for each `max_length`, with the columns of :data:`HEADS`."""
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
    """Describe the handling of samples that are too long."""
    outcomes = {"truncate": "truncated", "drop": "dropped"}
    outcome = outcomes.get(result["overlong"], result["overlong"])
    return f"A sample longer than max_length is {outcome}."


def table(result: DatasetStats) -> str:
    """Return the statistics as text for a terminal."""
    lines = [fact_table(facts(result))]
    for sample in result["duplicates"]["most_repeated"]:
        text = printable(sample["text"])
        lines.append(f"            {counted(sample['times'], 'time')}: {text}")
    for group in (result["near_duplicates"] or {"largest": []})["largest"]:
        lines.append(f"            {group['size']:,} similar samples:")
        lines += [f"              {printable(text)}" for text in group["texts"]]
    if sources := source_rows(result):
        lines += ["", *_aligned([list(SOURCE_HEADS), *sources])]
    highest = max(bin_["samples"] for bin_ in result["histogram"])
    lines += ["", "tokens, samples"]
    for bin_ in result["histogram"]:
        bar = "█" * round(_BAR_WIDTH * bin_["samples"] / highest)
        ends = f"{bin_['from']:>8,}–{bin_['to'] - 1:<8,}"
        lines.append(f"{ends} {bin_['samples']:>9,}  {bar}".rstrip())
    lines += ["", overlong_text(result), ""]
    lines += _aligned([list(HEADS), *limit_rows(result)])
    return "\n".join(lines)


def _aligned(rows: list[list[str]]) -> list[str]:
    """Return the rows as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def render_page(result: DatasetStats) -> str:
    """Return the statistics as one HTML page that can be opened offline."""
    return _render(
        stats=result,
        facts=facts(result),
        heads=HEADS,
        limit_rows=limit_rows(result),
        source_heads=SOURCE_HEADS,
        source_rows=source_rows(result),
        overlong_text=overlong_text(result),
    )


def render_facts(result: ImageStats | ClickStats, facts: list[tuple[str, str]]) -> str:
    """Return statistics without tokens as one HTML page that can be opened offline."""
    return _render(stats={"dataset": result["dataset"]}, facts=facts)


def _render(**values: object) -> str:
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, keep_trailing_newline=True
    )
    return environment.get_template("page.html.jinja").render(**values)
