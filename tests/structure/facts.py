"""Count how the code is structured and worded, from the syntax tree.

    python tests/structure/facts.py           # a table: each figure now, its limit, its target
    python tests/structure/facts.py --json    # the figures as JSON
    python tests/structure/facts.py --write   # lower the limits in facts.json to the figures
    python tests/structure/facts.py --output FILE    # also write the figures and all versions
    python tests/structure/facts.py --list folder_cycles    # what was counted, where a list helps

What a figure counts is the docstring of the function with its name, in `fact_structure.py`,
`fact_run.py` and `fact_text.py`. `test_facts.py` holds the limits of `facts.json`. A limit only
falls: `--write` never raises one.
"""

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable, Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import fact_run as run
import fact_structure as structure
import fact_text as text
from fact_sources import CHECKOUT, Source

LIMITS = Path(__file__).with_name("facts.json")
Figure = Callable[[Source], float]

#: The figures, by what they are about.
SECTIONS: dict[str, tuple[Figure, ...]] = {
    "strategy": (
        structure.old_strategy_modules,
        structure.strategy_abstract_methods,
        structure.runtime_checkable,
        structure.strategy_probes,
    ),
    "core and catalogue": (
        structure.core_imports_catalogue,
        structure.catalogue_texts_in_core,
        structure.server_texts,
        structure.mode_comparisons,
        structure.planner_mode_comparisons,
        structure.folder_cycles,
        structure.strategy_folder_cycles,
        structure.private_imports,
    ),
    "plan": (
        run.superfluous_records,
        run.records_of_a_run,
        run.nonlocal_statements,
        run.long_signatures,
        run.callback_registrations,
        run.unsupported_modes_in_launch,
    ),
    "native keys": (
        run.files_of_native_load,
        run.compat_files_of_native_load,
        run.compat_imports_of_native_load,
        run.parsed_messages,
        run.tests_matching_messages,
        run.tests_matching_codes,
    ),
    "kinds of samples": (
        run.sample_fields,
        run.encoded_fields,
        run.chunk_fields,
        run.token_datasets,
        run.token_writers,
        run.orders,
    ),
    "failures": (run.modules_with_error_patterns,),
    "sizes": (
        text.source_lines,
        text.source_statements,
        text.docstring_percent,
        text.benchmark_lines,
        text.median_function_lines,
        text.long_functions,
    ),
    "words": (
        text.duplicate_classes,
        text.elliptic_lines,
        text.args_entries_of,
        text.asserted_lists_of_words,
        text.missing_paths_in_docs,
    ),
}
FIGURES = {figure.__name__: figure for figures in SECTIONS.values() for figure in figures}
#: Figures that change with every commit: their limit is an upper bound with a slack, and they may
#: be below it.
SIZES = {"source_lines", "source_statements", "benchmark_lines", "docstring_percent"}
_SLACK = 1.01
_LISTS: dict[str, Callable[[Source], Iterable[object]]] = {
    "core_imports_catalogue": structure.list_catalogue_imports,
    "folder_cycles": structure.list_folder_cycles,
    "records_of_a_run": run.list_records,
    "files_of_native_load": run.list_files_of_native_load,
    "modules_with_error_patterns": run.list_modules_with_error_patterns,
    "missing_paths_in_docs": text.list_missing_paths,
}


class Limit(TypedDict):
    """The limit of a figure and what it should become; None if it has none."""

    limit: float | None
    target: float | None


def read_limits() -> dict[str, Limit]:
    limits: dict[str, Limit] = json.loads(LIMITS.read_text(encoding="utf-8"))
    return limits


def count_figures(source: Source) -> dict[str, float]:
    return {name: figure(source) for name, figure in FIGURES.items()}


def lowered(limits: dict[str, Limit], figures: dict[str, float]) -> dict[str, Limit]:
    """Return the limits with those lowered that are higher than their figure."""
    return {
        name: {**each, "limit": _lower_limit(name, each["limit"], figures[name])}
        for name, each in limits.items()
    }


def _lower_limit(name: str, limit: float | None, figure: float) -> float | None:
    if limit is None or name == "docstring_percent":
        return limit
    return min(limit, math.ceil(figure * _SLACK) if name in SIZES else figure)


def as_table(figures: dict[str, float], limits: dict[str, Limit]) -> str:
    rows = [("", "now", "limit", "target")]
    for section, members in SECTIONS.items():
        rows.append((section, "", "", ""))
        for name in (figure.__name__ for figure in members):
            each = limits[name]
            values = (figures[name], each["limit"], each["target"])
            rows.append(
                (f"  {name}", *("–" if value is None else f"{value:,}" for value in values))
            )
    width = max(len(row[0]) for row in rows)
    return "\n".join(
        f"{row[0]:<{width}}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows
    )


def _write_result(path: Path, figures: dict[str, float]) -> None:
    versions = {name: version(name) for name in ("torch", "transformers")}
    result = {
        "date": str(date.today()),
        "versions": {"python": platform.python_version(), **versions},
        "figures": figures,
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--write", action="store_true", help="lower the limits in facts.json")
    parser.add_argument("--list", choices=_LISTS, help="print what a figure counts")
    parser.add_argument("--root", type=Path, help="another checkout to count in")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all figures")
    args = parser.parse_args()
    source = Source(args.root.resolve()) if args.root else CHECKOUT
    if args.list:
        items: list[Any] = sorted(_LISTS[args.list](source), key=str)
        print(*items, sep="\n")
        return 0
    figures, limits = count_figures(source), read_limits()
    if args.output:
        _write_result(args.output, figures)
    if args.write:
        text = json.dumps(lowered(limits, figures), indent=2)
        LIMITS.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2) if args.json else as_table(figures, read_limits()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
