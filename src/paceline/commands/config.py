"""`paceline config`: explain the keys of a config."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, TypedDict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.commands.options import AnyText, OptionParser
from paceline.commands.reports import print_report
from paceline.core.errors import EXIT_DONE, ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic import JsonValue
    from pydantic.fields import FieldInfo


class KeyHelp(TypedDict):
    """What a key of the config means.

    Args:
        type: values that are accepted, with their range.
        default: None also if ``required``.
        spellings: names of the key in other tools, by tool.
    """

    key: str
    type: str
    required: bool
    default: JsonValue
    meaning: str
    spellings: dict[str, list[str]]


class KeyHelps(TypedDict):
    """What several keys mean."""

    keys: list[KeyHelp]


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "key",
        AnyText("a key or a section"),
        "KEY",
        "key, also as another tool spells it",
        nargs="?",
    )
    parser.add_option(
        "--search", AnyText("a word", may_be_empty=False), "WORD", "list the keys about a word"
    )
    parser.example = "paceline config lora.rank"


def run(args: Namespace) -> int:
    """Explain a key, or list the keys of a section, about a word, or all."""
    if args.key is not None and args.search is not None:
        raise ConfigError(
            "KEY and `--search` cannot be combined", code="key-and-search", fix="remove one of them"
        )
    if args.search is not None:
        keys = [key for key in explain_keys() if _is_about(key, args.search)]
    else:
        keys = explain_keys() if args.key is None else find_keys(args.key)
    if args.key is not None and len(keys) == 1:
        print_report(args, keys[0], _detail)
    else:
        print_report(args, KeyHelps(keys=keys), _overview)
    return EXIT_DONE


def find_keys(name: str) -> list[KeyHelp]:
    """Return the key of this name, which may lack its section or be another tool's; or the keys of
    the section of this name.

    Raises:
        ConfigError: there is none.
    """
    from paceline.config.compat.keys import ignored_of

    keys = explain_keys()
    for matches in (
        [key for key in keys if key["key"] == name],
        [key for key in keys if key["key"].startswith(f"{name}.")],
        [key for key in keys if key["key"].rpartition(".")[2] == name],
        [key for key in keys if any(name in names for names in key["spellings"].values())],
    ):
        if matches:
            return matches
    ignored = ignored_of(name)
    raise ConfigError(
        "`{name}` is not a key of the config{why}",
        code="unknown-config-key",
        fix=did_you_mean(name, [key["key"] for key in keys])
        or f"search with `paceline config --search {name}`",
        name=name,
        why=f"; it is ignored: {ignored.reason}" if ignored else "",
    )


def explain_keys() -> list[KeyHelp]:
    """Return the help of all keys, in the order of the schema."""
    from paceline.config.fields import KEYS
    from paceline.config.schema.data import DatasetSource

    spellings = _spellings()
    fields = {
        **KEYS,
        **{f"dataset.{key}": info for key, info in DatasetSource.model_fields.items()},
    }
    return [_explain(key, info, spellings.get(key, {})) for key, info in fields.items()]


def _explain(key: str, info: FieldInfo, spellings: dict[str, list[str]]) -> KeyHelp:
    from pydantic_core import to_jsonable_python

    from paceline.config.fields import describe

    is_required = info.is_required()
    default = None if is_required else info.get_default(call_default_factory=True)
    return {
        "key": key,
        "type": describe(info),
        "required": is_required,
        "default": to_jsonable_python(default),
        "meaning": " ".join((info.description or "").split()),
        "spellings": spellings,
    }


def _spellings() -> dict[str, dict[str, list[str]]]:
    """Return the names of other tools for each key: ``{key: {tool: names}}``."""
    from paceline.config.compat.keys import TOOLS, alias_tables

    spellings: dict[str, dict[str, list[str]]] = {}
    for name, alias in alias_tables().aliases.items():
        for letter in alias.tools if alias.target and name != alias.target else "":
            of_key = spellings.setdefault(alias.target, {})
            of_key.setdefault(TOOLS[letter], []).append(name)
    return spellings


def _is_about(key: KeyHelp, word: str) -> bool:
    names = [name for names in key["spellings"].values() for name in names]
    return any(word.lower() in text.lower() for text in (key["key"], key["meaning"], *names))


def _detail(key: KeyHelp) -> Group:
    from paceline.config.entries import short

    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("type", Text(key["type"]))
    rows.add_row("default", Text("required" if key["required"] else short(key["default"])))
    rows.add_row("meaning", Text(key["meaning"]))
    for tool, names in key["spellings"].items():
        rows.add_row(tool, Text(", ".join(names)))
    return Group(Text(key["key"], style="bold"), rows)


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].removesuffix(".")


def _overview(helps: KeyHelps) -> Table | Text:
    from paceline.config.entries import short

    if not helps["keys"]:
        return Text("no key")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", overflow="fold")
    table.add_column("default", overflow="fold")
    table.add_column("meaning", overflow="fold", ratio=1)
    for key in helps["keys"]:
        default = "required" if key["required"] else short(key["default"])
        table.add_row(Text(key["key"]), Text(default), Text(_first_sentence(key["meaning"])))
    return table
