"""Generate pages of ``docs/``: config.md, zh/config.md, config.schema.json and
keys-of-other-tools.md.

``python -m paceline.config.reference`` writes them; with ``--check`` it exits with 1 if they are
stale.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.config.compat.keys import (
    TOOLS,
    alias_tables,
    ignored_tables,
    method_tables,
    task_of_method,
)
from paceline.config.compat.preference import description
from paceline.config.compat.rollouts import description_with_rewards
from paceline.config.entries import quoted_names, short
from paceline.config.fields import CHINESE, KEYS, SECTIONS, chinese, describe
from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource


def markdown() -> str:
    """Return the text of docs/config.md."""
    tables = alias_tables()
    ignored: dict[tuple[str, str], list[str]] = {}
    for key, entry in ignored_tables().keys.items():
        ignored.setdefault((entry.level, entry.reason), []).append(key)
    for prefix, entry in ignored_tables().prefixes.items():
        ignored.setdefault((entry.level, entry.reason), []).append(f"{prefix}*")
    for key, alias in tables.aliases.items():
        if not alias.target:
            ignored.setdefault(("by value", alias.meaning), []).append(key)
    refused: dict[tuple[str, ...], list[str]] = {}
    for key, (_, methods) in method_tables().keys.items():
        if _description(key) is None:
            refused.setdefault(methods, []).append(key)
    known = method_tables().methods.items()
    unsupported = {name: text for name, text in known if task_of_method(name) is None}
    mapped = {key: alias for key, alias in tables.aliases.items() if alias.target}
    sections = {key: alias for key, alias in tables.sections.items() if alias.target}
    return (
        _environment()
        .get_template("config.md.jinja")
        .render(
            _schema(),
            mapped=sorted((mapped | sections).items()),
            shared=sorted((tables.shared | tables.shared_if_foreign).items()),
            ignored=ignored,
            methods=unsupported,
            refused=refused,
        )
    )


def chinese_markdown() -> str:
    """Return the text of docs/zh/config.md."""
    return _environment().get_template("config_zh.md.jinja").render(_schema(), texts=chinese())


class _Schema(TypedDict):
    """The keys of the config, by section, and the keys of a source of data."""

    top_level: dict[str, FieldInfo]
    sections: Mapping[str, type[BaseModel]]
    source: Mapping[str, FieldInfo]


def _schema() -> _Schema:
    return {
        "top_level": {key: info for key, info in KEYS.items() if "." not in key},
        "sections": SECTIONS,
        "source": DatasetSource.model_fields,
    }


def by_tool() -> str:
    """Return the text of docs/keys-of-other-tools.md: every key of each tool and how it is read."""
    tools = {tool: dict(sorted(_keys_of(letter).items())) for letter, tool in TOOLS.items()}
    return _environment().get_template("keys_of_other_tools.md.jinja").render(tools=tools)


def _keys_of(letter: str) -> dict[str, tuple[str, str]]:
    """Return (how it is read, conversion or reason) for each key of a tool."""
    rows = {}
    for key, alias in (alias_tables().aliases | alias_tables().sections).items():
        if letter in alias.tools:
            rows[key] = (f"`{alias.target}`" if alias.target else "by value", alias.meaning)
    for key, ignored in ignored_tables().keys.items():
        if letter in ignored.tools:
            rows[key] = (ignored.level, ignored.reason)
    for key, (tools, methods) in method_tables().keys.items():
        if letter in tools:
            refused = ("refused", f"a setting of {', '.join(methods)}")
            rows[key] = _description(key) or refused
    return rows


def _description(key: str) -> tuple[str, str] | None:
    """Return (how it is read, reason) of a key that only some training methods read."""
    read = [each for each in (description(key), description_with_rewards(key)) if each is not None]
    targets = [each for each in read if each[0].startswith("`")]
    if len(targets) < 2:
        return next(iter([*targets, *read]), None)
    return " or ".join(target for target, _ in targets), "; ".join(text for _, text in targets)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cell": _cell,
        "takes": lambda info: _cell(describe(info)),
        "takes_zh": lambda info: _spaced(_cell(describe(info, CHINESE))),
        "default_value": _default,
        "tools": lambda letters: ", ".join(TOOLS[letter] for letter in letters),
        "quoted": quoted_names,
    }
    return environment


def schema_json() -> str:
    """Return the text of docs/config.schema.json (JSON Schema, draft 2020-12)."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= Config.model_json_schema() | {"title": "Paceline config"}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _cell(text: str | None) -> str:
    """Format text for a cell of a Markdown table."""
    return " ".join((text or "").split()).replace("|", "\\|")


def _spaced(text: str) -> str:
    """Put a space between Chinese characters and code."""
    return re.sub("(?<=[\u4e00-\u9fff])(?=`)|(?<=`)(?=[\u4e00-\u9fff])", " ", text)


def _default(info: FieldInfo, required: str = "required") -> str:
    if info.is_required():
        return required
    return _cell(f"`{short(info.get_default(call_default_factory=True))}`")


def main(arguments: Sequence[str]) -> str | None:
    """Write the files, or with ``--check`` only compare them. Return an error message if some are
    stale."""
    folder = Path(__file__).resolve().parents[3] / "docs"
    texts = {
        folder / "config.md": markdown(),
        folder / "zh" / "config.md": chinese_markdown(),
        folder / "config.schema.json": schema_json(),
        folder / "keys-of-other-tools.md": by_tool(),
    }
    if "--check" in arguments:
        stale = [
            str(path.relative_to(folder))
            for path, text in texts.items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        return (
            f"stale: {', '.join(stale)}; run python -m paceline.config.reference" if stale else None
        )
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
