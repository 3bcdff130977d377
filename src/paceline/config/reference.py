"""Generate pages of ``docs/``: config.md and config/, the same in zh/, config.schema.json and
keys-of-other-tools.md.

``python -m paceline.config.reference`` writes them; with ``--check`` it exits with 1 if they are
stale.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class SectionPage:
    """A page with the keys of a section.

    Args:
        name: name of the file.
        text: what the section is for.
        summary: the same in the list of pages.
        fields: the keys by name.
        prefix: prefix of the names in anchors.
        described: prefix of the names in the Chinese descriptions.
    """

    name: str
    title: str
    text: str
    summary: str
    fields: Mapping[str, FieldInfo]
    prefix: str = ""
    described: str = ""


def english_pages() -> dict[str, str]:
    """Return the texts of docs/config.md and the pages in docs/config/, by their paths."""
    top = "These keys are at the top level of a file."
    source = "If a path or hub id is not sufficient, `dataset` and `val_dataset` accept a mapping"
    source += " with these keys, or a list of them."
    pages = [
        _top_level_page("Top level", top, "the model, the task, the data, folders"),
        *(
            _section_page(name, section, str(section.__doc__).splitlines()[0])
            for name, section in SECTIONS.items()
        ),
        _source_page("A source of samples", source, "keys of a mapping in `dataset`"),
    ]
    texts = {f"config/{page.name}.md": _render("config_section", page=page) for page in pages}
    texts["config/other-tools.md"] = _other_tools()
    return {"config.md": _render("config", pages=pages), **texts}


def chinese_pages() -> dict[str, str]:
    """Return the texts of docs/zh/config.md and the pages in docs/zh/config/, by their paths."""
    texts = chinese()
    source = (
        "如果只写路径或 hub id 不够，`dataset` 和 `val_dataset` 还可以写成包含这些配置项的映射，"
    )
    source += "或由映射组成的列表。"
    pages = [
        _top_level_page("顶层", "这些配置项写在文件的顶层。", "模型、任务、数据和文件夹"),
        *(_section_page(name, section, texts[name]) for name, section in SECTIONS.items()),
        _source_page("数据源", source, "`dataset` 中映射的配置项"),
    ]
    rendered = {
        f"zh/config/{page.name}.md": _render("config_section_zh", page=page, texts=texts)
        for page in pages
    }
    return {"zh/config.md": _render("config_zh", pages=pages), **rendered}


def _top_level_page(title: str, text: str, summary: str) -> SectionPage:
    fields = {key: info for key, info in KEYS.items() if "." not in key}
    return SectionPage("top-level", title, text, summary, fields)


def _section_page(name: str, section: type[BaseModel], text: str) -> SectionPage:
    fields, prefix = section.model_fields, f"{name}."
    return SectionPage(name, f"`{name}`", text, text, fields, prefix, prefix)


def _source_page(title: str, text: str, summary: str) -> SectionPage:
    fields = DatasetSource.model_fields
    return SectionPage("source", title, text, summary, fields, "dataset.", "dataset.")


def _render(template: str, **values: object) -> str:
    return _environment().get_template(f"{template}.md.jinja").render(**values)


def _other_tools() -> str:
    """Return the text of docs/config/other-tools.md."""
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
    return _render(
        "config_other_tools",
        mapped=sorted((mapped | sections).items()),
        shared=sorted((tables.shared | tables.shared_if_foreign).items()),
        ignored=ignored,
        methods=unsupported,
        refused=refused,
    )


def by_tool() -> str:
    """Return the text of docs/keys-of-other-tools.md: every key of each tool and how it is read."""
    tools = {tool: dict(sorted(_keys_of(letter).items())) for letter, tool in TOOLS.items()}
    return _render("keys_of_other_tools", tools=tools)


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
        **{folder / name: text for name, text in (english_pages() | chinese_pages()).items()},
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
