"""Write ``table.md`` from the results."""

from collections import Counter
from typing import Any

from cases import Result

ORDER = ("ok", "failed", "timeout", "skipped")


def make_table(results: list[Result], headline: str) -> str:
    """Return the results as Markdown: the counts of each section, and a table per section."""
    lines = [f"# {headline}", "", *_summary(results)]
    for section in dict.fromkeys(result.section for result in results):
        lines += ["", f"## {section}", ""]
        lines += ["| case | status | seconds | figures or reason |", "|---|---|---:|---|"]
        for result in results:
            if result.section == section:
                text = result.reason if result.status != "ok" else figures_text(result.figures)
                lines.append(
                    f"| {_cell(result.name)} | {result.status} | {result.seconds:.1f} |"
                    f" {_cell(text)} |"
                )
    return "\n".join(lines) + "\n"


def _summary(results: list[Result]) -> list[str]:
    lines = ["| section | " + " | ".join(ORDER) + " |", "|---|" + "---:|" * len(ORDER)]
    for section in dict.fromkeys(result.section for result in results):
        counts = Counter(result.status for result in results if result.section == section)
        lines.append(f"| {section} | " + " | ".join(str(counts[name]) for name in ORDER) + " |")
    return lines


def figures_text(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {_value_text(value)}" for name, value in figures.items())


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + figures_text(value) + "}"
    return str(value)


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
