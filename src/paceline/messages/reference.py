"""Generate the catalogue of codes and its pages: ``codes.json`` beside this file, and in ``docs/``
errors.md and zh/errors.md.

``python -m paceline.messages.reference`` writes them; with ``--check`` it exits with 1 if they are
stale.
"""

import json
import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paceline.messages.catalogue import CODES, CodeEntry, cause_of, chinese
from paceline.messages.collect import collect

_DOCS = Path(__file__).resolve().parents[3] / "docs"


def codes_json(entries: dict[str, CodeEntry]) -> str:
    """Return the text of codes.json, with one line for each code."""
    lines = (
        f"{json.dumps(code)}: {json.dumps(entry, ensure_ascii=False)}"
        for code, entry in entries.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def page(entries: dict[str, CodeEntry], template: str) -> str:
    """Return the text of a page with every code."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["prose"] = _prose
    by_kind = sorted(entries.items(), key=lambda item: (_ORDER.index(item[1]["kind"]), item[0]))
    groups = {kind: dict(items) for kind, items in groupby(by_kind, lambda item: item[1]["kind"])}
    return environment.get_template(template).render(
        groups=groups, chinese=chinese(), cause_of=cause_of
    )


_ORDER = ("usage", "run", "stopped", "notice")


def _prose(text: str) -> str:
    """Return a template as a sentence of a page."""
    line = " ".join(text.split()).replace("<", "\\<").replace("*", "\\*")
    period = "。" if re.search("[一-鿿]", line) else "."
    return line if line.endswith((".", "?", "!", ":", "…", "。", "？")) else f"{line}{period}"


def main(arguments: Sequence[str]) -> str | None:
    """Write the files, or with ``--check`` only compare them. Return an error message if some are
    stale."""
    entries = collect()
    texts = {
        CODES: codes_json(entries),
        _DOCS / "errors.md": page(entries, "errors.md.jinja"),
        _DOCS / "zh" / "errors.md": page(entries, "errors_zh.md.jinja"),
    }
    if "--check" in arguments:
        stale = [
            path.name
            for path, text in texts.items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        names = ", ".join(stale)
        return f"stale: {names}; run python -m paceline.messages.reference" if stale else None
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
