"""Changing keys in a config's text and nothing else in it: comments, order and spelling of all
other lines stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.config.compat.binding import bind_key
from paceline.config.entries import FILE, ConfigEntry, EntryCollector, split_key
from paceline.config.fields import KEYS, SECTIONS, takes
from paceline.config.yaml_read import Dumper, YamlValue, parse_value, parse_yaml, scalar
from paceline.core.errors import ConfigError

_ORDER = list(dict.fromkeys(key.split(".")[0] for key in KEYS)) + [
    one for one in SECTIONS if one not in KEYS
]


@dataclass(frozen=True)
class _Place:
    """A key in the text: the mapping it stands in, its node and its value's, and that of the
    section around it."""

    key: yaml.Node
    value: yaml.Node
    mapping: yaml.MappingNode
    section: _Place | None = None


def edit_yaml(
    text: str, values: Mapping[str, YamlValue], remove: Iterable[str] = ()
) -> tuple[str, bool]:
    """Set keys of a config's text, and take others out.

    Args:
        text: YAML, perhaps empty.
        values: dotted native key → value. Text for a key that takes numbers, lists or mappings is
            read as YAML would read it, and a number stays as it is spelt.
        remove: dotted native keys to take out, which gives them their defaults.

    Returns:
        The new text, and whether all the rest of it is as it was (False: it had to be written anew,
        without comments).

    Raises:
        ConfigError: the text is no YAML mapping, or a key is not known.
    """
    text = text.removeprefix("\ufeff")
    for key in [*values, *remove]:
        if key not in KEYS:
            raise ConfigError(f"unknown key `{key}`", fix="docs/config.md lists all keys")
    if not isinstance(parse_yaml(text, "the config").value, dict | None):
        raise ConfigError(
            "the text is no mapping of keys to values",
            fix="write lines such as `model: Qwen/Qwen2.5-0.5B`",
        )
    kept = True
    for key, value in [*((key, None) for key in remove), *values.items()]:
        wanted, written = (_REMOVED, "") if key not in values else _spelt(key, value)
        expected = _with(_native(text), key, wanted)
        edited = _edited(text, key, None if wanted is _REMOVED else written)
        if edited is None or not _reads_as(edited, expected):
            edited, kept = _anew(expected), False
        text = edited
    return text, kept


def _edited(text: str, key: str, written: str | None) -> str | None:
    """The text with one key set, or taken out (None); None where it holds what PyYAML's own parser,
    which knows the places of things, reads otherwise than libyaml does."""
    try:
        return _remove(text, key) if written is None else _set(text, key, written)
    except (yaml.YAMLError, ValueError, IndexError, RecursionError):
        return None


_REMOVED = object()


def _spelt(key: str, value: Any) -> tuple[Any, str]:
    """The value that is meant, and how to write it on one line."""
    info = KEYS[key]
    if isinstance(value, str):
        stripped = value.strip()
        number = _number(stripped) if takes(info, int, float) else None
        if number is not None:
            return number, stripped
        if stripped in ("true", "false") and takes(info, bool):
            return stripped == "true", stripped
        if stripped[:1] in ("[", "{") and takes(info, list, dict):
            value = parse_value(stripped, key)
    try:
        line = yaml.dump(
            value,
            Dumper=Dumper,
            default_flow_style=True,
            allow_unicode=True,
            width=10**9,
            sort_keys=False,
        )
    except RecursionError:
        raise ConfigError(f"the value of `{key}` is nested too deeply to be a config's") from None
    return value, line.removesuffix("\n").removesuffix("\n...")


def _number(text: str) -> int | float | None:
    try:
        found = scalar(text) if text else None
    except ValueError:  # more digits than Python reads
        return None
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


# -- what the text says
def _native(text: str) -> dict[str, YamlValue]:
    """Native key → value for what is written under such a key; keys of other tools under their own
    names."""
    tree = parse_yaml(text, "the config").value
    walk = EntryCollector(FILE)
    walk.add_tree(tree if isinstance(tree, dict) else {})
    return {bind_key(one).target or one.key: one.value for one in walk.entries}


def _means(path: tuple[str, ...]) -> str | None:
    """The native key that a path in the text sets, under whatever name."""
    meaning = bind_key(ConfigEntry(path, None, FILE))
    target = meaning.target or (meaning.alias.target if meaning.alias else None)
    if target is None or target in KEYS:
        return target
    return next((key for key in KEYS if target.startswith(f"{key}.")), None)


def _with(native: dict[str, YamlValue], key: str, value: Any) -> dict[str, YamlValue]:
    rest = {name: one for name, one in native.items() if _means(split_key(name)) != key}
    return rest if value is _REMOVED else {**rest, key: value}


def _reads_as(text: str, expected: dict[str, YamlValue]) -> bool:
    try:
        found = _native(text)
    except ConfigError:
        return False
    flat = {
        name: one
        for name, one in expected.items()
        if not (isinstance(one, dict) and name in SECTIONS)
    }
    return found == flat


def _anew(native: dict[str, YamlValue]) -> str:
    tree: dict[str, Any] = {}
    for key, value in native.items():
        section, _, name = key.partition(".")
        if name and section in SECTIONS:
            tree.setdefault(section, {})[name] = value
        else:
            tree[key] = value
    return str(yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


# -- places in the text
def _root(text: str) -> yaml.MappingNode | None:
    # its marks count characters; values are not read from it
    found = yaml.compose(text, Loader=yaml.SafeLoader)
    return found if isinstance(found, yaml.MappingNode) else None


def _places(root: yaml.MappingNode, key: str) -> list[_Place]:
    """Every place that sets ``key``."""
    found = []
    for name, value in root.value:
        place = _Place(name, value, root)
        path = split_key(str(name.value))
        if len(path) == 1 and path[0] in SECTIONS and isinstance(value, yaml.MappingNode):
            inner = [(one, (path[0], *str(one[0].value).split("."))) for one in value.value]
            found += [
                _Place(key_node, of_it, value, place)
                for (key_node, of_it), inner_path in inner
                if _means(inner_path) == key
            ]
        elif _means(path) == key:
            found.append(place)
    return found


def _is_native(place: _Place, key: str) -> bool:
    """Whether the place has the key's own name (the section may be left out), and may so be given
    another value."""
    return str(place.key.value).rpartition(".")[2] == key.rpartition(".")[2]


def _end(text: str, place: _Place) -> int:
    """Where the value ends, without what follows it (PyYAML lets a block reach up to the next
    key)."""
    key, value = place.key, place.value
    if value.start_mark.index < key.end_mark.index:  # an alias: the node is that of its anchor
        match = re.compile(r"\s*:[^\n,}#]*").match(text, key.end_mark.index)
        return match.end() if match else key.end_mark.index
    last = value
    while isinstance(last, yaml.CollectionNode) and not last.flow_style and last.value:
        item = last.value[-1]
        last = item[1] if isinstance(item, tuple) else item
        if last.start_mark.index < value.start_mark.index:  # an alias again
            return (
                text.find("\n", value.start_mark.index)
                if "\n" in text[value.start_mark.index :]
                else len(text)
            )
    return last.start_mark.index + len(text[last.start_mark.index : last.end_mark.index].rstrip())


def _line_end(text: str, index: int) -> int:
    """Just after the line that holds the character before ``index``."""
    found = text.find("\n", max(index - 1, 0) if index and text[index - 1] == "\n" else index)
    return len(text) if found < 0 else found + 1


def _set(text: str, key: str, written: str) -> str:
    root = _root(text)
    if root is None:
        return f"{_with_newline(text)}{_as_line(key, written)}"
    places = _places(root, key)
    own = next((one for one in places if _is_native(one, key)), None)
    if own is None or len(places) > 1:
        for _ in places:
            text = _remove_one(text, key, keep=None if own is None else own.key.start_mark.index)
        if own is None:
            return _insert(text, key, written)
        return _set(text, key, written) if len(_places(_root(text) or root, key)) == 1 else text
    colon = text.index(":", own.key.end_mark.index)
    return f"{text[: colon + 1]} {written}{text[max(_end(text, own), colon + 1) :]}"


def _remove(text: str, key: str) -> str:
    root = _root(text)
    for _ in _places(root, key) if root else []:
        text = _remove_one(text, key)
    return text


def _remove_one(text: str, key: str, keep: int | None = None) -> str:
    """Take out the last place that sets ``key``, other than the one that begins at ``keep``."""
    root = _root(text)
    places = [one for one in _places(root, key) if one.key.start_mark.index != keep] if root else []
    if not places:
        return text
    place = places[-1]
    if place.section is not None and len(place.mapping.value) == 1:
        place = place.section  # nothing is left in the section
    if place.mapping.flow_style:
        start, end = place.key.start_mark.index, _end(text, place)
        after = re.compile(r"\s*,\s*").match(text, end)
        before = re.search(r",\s*$", text[:start])
        return (
            text[:start] + text[after.end() :]
            if after
            else text[: before.start() if before else start] + text[end:]
        )
    start = text.rfind("\n", 0, place.key.start_mark.index) + 1
    return text[:start] + text[_line_end(text, _end(text, place)) :]


def _insert(text: str, key: str, written: str) -> str:
    root = _root(text)
    section, _, name = key.rpartition(".")
    if root is None:
        return _set(text, key, written)
    if not section:
        return _insert_into(text, root, name, written)
    inside = next((value for one, value in root.value if one.value == section), None)
    if isinstance(inside, yaml.MappingNode) and inside.value:
        return _insert_into(text, inside, name, written)
    if inside is None:
        return _insert_into(
            text,
            root,
            section,
            f"{{{name}: {written}}}" if root.flow_style else f"\n  {name}: {written}",
        )
    # `lora:` or `lora: {}`
    holder = next(_Place(one, value, root) for one, value in root.value if one.value == section)
    colon = text.index(":", holder.key.end_mark.index)
    return f"{text[: colon + 1]} {{{name}: {written}}}{text[max(_end(text, holder), colon + 1) :]}"


def _insert_into(text: str, mapping: yaml.MappingNode, name: str, written: str) -> str:
    line = f"{name}:{'' if written.startswith(chr(10)) else ' '}{written}"
    if mapping.flow_style:
        end = mapping.end_mark.index - 1
        head = text[:end].rstrip()
        return f"{head}{'' if head.endswith(('{', ',')) else ', '}{line}{text[end:]}"
    rank = _ORDER.index(name) if name in _ORDER and mapping.start_mark.column == 0 else len(_ORDER)
    before = [
        (one, value) for one, value in mapping.value
        if rank == len(_ORDER) or (str(one.value) in _ORDER and _ORDER.index(str(one.value)) < rank)
    ]  # fmt: skip
    indent = " " * mapping.start_mark.column
    if not before:
        at = text.rfind("\n", 0, mapping.value[0][0].start_mark.index) + 1
        return f"{text[:at]}{indent}{line}\n{text[at:]}"
    at = _line_end(text, _end(text, _Place(*before[-1], mapping)))
    return f"{_with_newline(text[:at])}{indent}{line}\n{text[at:]}"


def _as_line(key: str, written: str) -> str:
    section, _, name = key.rpartition(".")
    return f"{section}:\n  {name}: {written}\n" if section else f"{name}: {written}\n"


def _with_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"
