"""Change keys in the text of a config without changing comments, order and spelling of other
lines."""

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

_ORDER = list(dict.fromkeys(key.split(".")[0] for key in KEYS))


@dataclass(frozen=True)
class _Place:
    """A key in the text: its node, the node of its value, its mapping, and its section."""

    key: yaml.Node
    value: yaml.Node
    mapping: yaml.MappingNode
    section: _Place | None = None


def edit_yaml(
    text: str, values: Mapping[str, YamlValue], remove: Iterable[str] = ()
) -> tuple[str, bool]:
    """Set keys in the text of a config, and remove others.

    Args:
        text: YAML, possibly empty.
        values: dotted native key → value. Text for a key that accepts numbers, lists or mappings
            is parsed as YAML, and the spelling of a number is preserved.
        remove: dotted native keys to remove, which resets them to their defaults.

    Returns:
        The new text, and whether the rest of it is unchanged (False: it had to be rewritten
        without comments).

    Raises:
        ConfigError: the text is not a YAML mapping, or a key is unknown.
    """
    text = text.removeprefix("\ufeff")
    for key in [*values, *remove]:
        if key not in KEYS:
            raise ConfigError(
                "`{name}` is not a key of the config",
                code="unknown-config-key",
                fix="`paceline config` lists all keys",
                name=key,
            )
    if not isinstance(parse_yaml(text, "the config").value, dict | None):
        raise ConfigError(
            "expected a mapping of keys to values",
            code="not-a-mapping",
            fix="write lines such as `model: Qwen/Qwen2.5-0.5B`",
        )
    rest_is_unchanged = True
    for key, value in [*((key, None) for key in remove), *values.items()]:
        native = _native(text)
        expected = {name: old for name, old in native.items() if _target(split_key(name)) != key}
        written = None
        if key in values:
            expected[key], written = _spell(key, value)
        edited = _edited(text, key, written)
        if edited is None or not _reads_as(edited, expected):
            edited, rest_is_unchanged = _rewritten(expected), False
        text = edited
    return text, rest_is_unchanged


def _edited(text: str, key: str, written: str | None) -> str | None:
    """Return the text with one key set, or removed (``written`` is None).

    Returns None for text that PyYAML's own parser, which reports positions, reads differently from
    libyaml.
    """
    try:
        return _remove(text, key) if written is None else _set(text, key, written)
    except (yaml.YAMLError, ValueError, IndexError, RecursionError):
        return None


def _spell(key: str, value: Any) -> tuple[Any, str]:
    """Return the value that is meant, and its spelling on one line."""
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
        raise ConfigError(
            "the value of `{key}` is nested too deeply", code="nested-too-deeply", key=key
        ) from None
    return value, line.removesuffix("\n").removesuffix("\n...")


def _number(text: str) -> int | float | None:
    try:
        number = scalar(text) if text else None
    except ValueError:  # more digits than Python accepts
        return None
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


# -- the content of the text
def _native(text: str) -> dict[str, YamlValue]:
    """Return the values by native key; other tools' keys without one keep their names."""
    tree = parse_yaml(text, "the config").value
    collector = EntryCollector(FILE)
    collector.add_tree(tree if isinstance(tree, dict) else {})
    return {bind_key(entry).target or entry.key: entry.value for entry in collector.entries}


def _target(path: tuple[str, ...]) -> str | None:
    """Return the native key that a path in the text sets, under any of its names."""
    target = bind_key(ConfigEntry(path, None, FILE)).native_key
    if target is None or target in KEYS:
        return target
    return next((key for key in KEYS if target.startswith(f"{key}.")), None)


def _reads_as(text: str, expected: dict[str, YamlValue]) -> bool:
    try:
        actual = _native(text)
    except ConfigError:
        return False
    return actual == {
        name: value
        for name, value in expected.items()
        if not (isinstance(value, dict) and name in SECTIONS)
    }


def _rewritten(native: dict[str, YamlValue]) -> str:
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
    # Only the marks of its nodes are used, which count characters.
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return root if isinstance(root, yaml.MappingNode) else None


def _places(text: str, key: str) -> list[_Place]:
    """Return every place that sets ``key``."""
    root, places = _root(text), []
    if root is None:
        return []
    for name, value in root.value:
        place = _Place(name, value, root)
        path = split_key(str(name.value))
        if len(path) == 1 and path[0] in SECTIONS and isinstance(value, yaml.MappingNode):
            places += [
                _Place(key_node, value_node, value, place)
                for key_node, value_node in value.value
                if _target((path[0], *str(key_node.value).split("."))) == key
            ]
        elif _target(path) == key:
            places.append(place)
    return places


def _is_native(place: _Place, key: str) -> bool:
    """Return whether the place uses the key's native name (with or without its section), so that
    its value can be replaced."""
    return str(place.key.value).rpartition(".")[2] == key.rpartition(".")[2]


def _end(text: str, place: _Place) -> int:
    """Return where the value ends. PyYAML extends a block up to the next key."""
    key, value = place.key, place.value
    if value.start_mark.index < key.end_mark.index:  # an alias: the node is its anchor's node
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
    """Return the position after the line with the character before ``index``."""
    end = text.find("\n", max(index - 1, 0) if index and text[index - 1] == "\n" else index)
    return len(text) if end < 0 else end + 1


def _set(text: str, key: str, written: str) -> str:
    places = _places(text, key)
    native = next((place for place in places if _is_native(place, key)), None)
    if native is None or len(places) > 1:
        keep = None if native is None else native.key.start_mark.index
        text = _remove(text, key, keep)
        if native is None:
            return _insert(text, key, written)
        return _set(text, key, written) if len(_places(text, key)) == 1 else text
    colon = text.index(":", native.key.end_mark.index)
    return f"{text[: colon + 1]} {written}{text[max(_end(text, native), colon + 1) :]}"


def _remove(text: str, key: str, keep: int | None = None) -> str:
    """Remove all places that set ``key``, except the one that begins at ``keep``."""
    for _ in _places(text, key):
        text = _remove_last(text, key, keep)
    return text


def _remove_last(text: str, key: str, keep: int | None) -> str:
    places = [place for place in _places(text, key) if place.key.start_mark.index != keep]
    if not places:
        return text
    place = places[-1]
    if place.section is not None and len(place.mapping.value) == 1:
        place = place.section  # The section would be empty.
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
        line = f"{section}:\n  {name}: {written}" if section else f"{name}: {written}"
        return f"{_with_newline(text)}{line}\n"
    if not section:
        return _insert_into(text, root, name, written)
    place = next(
        (_Place(node, value, root) for node, value in root.value if node.value == section), None
    )
    if place is None:
        value = f"{{{name}: {written}}}" if root.flow_style else f"\n  {name}: {written}"
        return _insert_into(text, root, section, value)
    if isinstance(place.value, yaml.MappingNode) and place.value.value:
        return _insert_into(text, place.value, name, written)
    # `lora:` or `lora: {}`
    colon = text.index(":", place.key.end_mark.index)
    return f"{text[: colon + 1]} {{{name}: {written}}}{text[max(_end(text, place), colon + 1) :]}"


def _insert_into(text: str, mapping: yaml.MappingNode, name: str, written: str) -> str:
    line = f"{name}:{'' if written.startswith(chr(10)) else ' '}{written}"
    if mapping.flow_style:
        end = mapping.end_mark.index - 1
        head = text[:end].rstrip()
        return f"{head}{'' if head.endswith(('{', ',')) else ', '}{line}{text[end:]}"
    rank = _ORDER.index(name) if name in _ORDER and mapping.start_mark.column == 0 else len(_ORDER)
    before = [
        (node, value)
        for node, value in mapping.value
        if rank == len(_ORDER) or str(node.value) in _ORDER[:rank]
    ]
    indent = " " * mapping.start_mark.column
    if not before:
        at = text.rfind("\n", 0, mapping.value[0][0].start_mark.index) + 1
        return f"{text[:at]}{indent}{line}\n{text[at:]}"
    at = _line_end(text, _end(text, _Place(*before[-1], mapping)))
    return f"{_with_newline(text[:at])}{indent}{line}\n{text[at:]}"


def _with_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"
