"""Figures of `facts.py` about sizes and wording. Each function counts one figure; its docstring
says what exactly is counted."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter

from fact_sources import Source, read_files

_ELLIPSIS = re.compile(r"\b(that of|those of|of which)\b", re.IGNORECASE)
#: An entry of `Args` whose text begins with "of", for one name or several.
_ARGS_ENTRY_OF = re.compile(r"^ +[\w*]+(, [\w*]+)*: of\b", re.MULTILINE)
LONG_FUNCTION = 80


def source_lines(source: Source) -> int:
    """Lines of the Python files of `src`, blank ones included."""
    return sum(len(file.lines) for file in source.files.values())


def source_statements(source: Source) -> int:
    """Statements (`ast.stmt`) of the Python files of `src`, definitions and docstrings included."""
    return sum(len(list(file.nodes(ast.stmt))) for file in source.files.values())


def docstring_percent(source: Source) -> float:
    """Share of the lines of `src` that belong to a docstring, in percent."""
    lines = sum(
        (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
        for file in source.files.values()
        for docstring in file.docstrings()
    )
    return round(100 * lines / source_lines(source), 2)


def benchmark_lines(source: Source) -> int:
    """Lines of the Python files of `benchmarks`."""
    files = read_files(source.root / "benchmarks")
    return sum(len(file.lines) for file in files.values())


def elliptic_lines(source: Source) -> int:
    """Lines of the Python files of `src` with "that of", "those of" or "of which" in any case: in
    docstrings, comments, and also in messages, descriptions of config keys and code."""
    return sum(
        _ELLIPSIS.search(line) is not None for file in source.files.values() for line in file.lines
    )


def args_entries_of(source: Source) -> int:
    """Lines of docstrings with the form `name: of …` or `name, name: of …`."""
    return sum(
        len(_ARGS_ENTRY_OF.findall(docstring.value))
        for file in source.files.values()
        for docstring in file.docstrings()
        if isinstance(docstring.value, str)
    )


def median_function_lines(source: Source) -> float:
    """Median length of all functions of `src`, methods and nested functions included, in lines from
    `def` to the last one, with the docstring and without decorators."""
    return statistics.median(_function_lengths(source))


def long_functions(source: Source) -> int:
    """Functions longer than 80 lines, counted as in `median_function_lines`."""
    return sum(length > LONG_FUNCTION for length in _function_lengths(source))


def _function_lengths(source: Source) -> list[int]:
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for file in source.files.values()
        for node in file.functions()
    ]


def duplicate_classes(source: Source) -> int:
    """Names of classes that are defined more than once in `src`, with their leading underscore."""
    names = Counter(node.name for file in source.files.values() for node in file.classes())
    return sum(count > 1 for count in names.values())


def asserted_lists_of_words(source: Source) -> int:
    """How many of `words.yaml` and a test that compares `messages.txt` exist in the tests."""
    folder = source.root / "tests" / "structure"
    has_assertion = any(
        "SNAPSHOT" in ast.unparse(node)
        for name, file in source.tests.items()
        if name.startswith("structure/test_")
        for node in file.nodes(ast.Assert)
    )
    return (folder / "words.yaml").exists() + has_assertion


def missing_paths_in_docs(source: Source) -> int:
    """Paths of Python files in `docs` and CONTRIBUTING.md that do not exist."""
    return len(list_missing_paths(source))


def list_missing_paths(source: Source) -> list[str]:
    """Return `page: path` for each text in backquotes that has a folder and ends with `.py`, if
    neither the checkout nor `src/paceline`, `tests` or `benchmarks` has such a file. Words in
    capitals stand for any name; paths of torch do not count."""
    bases = [source.root, *(source.root / name for name in ("src/paceline", "tests", "benchmarks"))]
    missing = []
    for page in (*sorted((source.root / "docs").rglob("*.md")), source.root / "CONTRIBUTING.md"):
        for path in re.findall(r"`([\w./]+/\w+\.py)`", page.read_text(encoding="utf-8")):
            pattern = re.sub(r"[A-Z]{2,}", "*", path.removeprefix("./")).lstrip("/")
            if not path.startswith("torch/") and not any(any(base.glob(pattern)) for base in bases):
                missing.append(f"{page.relative_to(source.root)}: {path}")
    return missing
