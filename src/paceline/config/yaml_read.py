"""Read YAML safely, with the line of every key. Only plain values are built: no tag can create an
object."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from paceline.core.errors import ConfigError, did_you_mean

KeyPath = tuple[str | int, ...]
#: A value of a YAML or JSON file whose keys are not known beforehand.
YamlValue: TypeAlias = (
    "str | int | float | bool | Sequence[YamlValue] | Mapping[str, YamlValue] | None"
)

_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_MAX_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"
_BOOLS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(SafeLoader):  # type: ignore[misc]
    """Only its composer is used: text to nodes with line numbers. Values are made by
    :class:`_Builder`."""


class Dumper(yaml.SafeDumper):
    """Quotes every text that :func:`parse_yaml` would otherwise read as a number."""


for _kind in (_Loader, Dumper):
    # YAML 1.1 reads `1e-4` as text; nobody who writes it in a config means that.
    _kind.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


@dataclass
class Document:
    """A parsed file: its value, and the line (from 1) of every key and list item, by path."""

    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)


#: Names of data files end with these. A config may be JSON.
_DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")


def read_config_file(path: Path) -> Document:
    """Read and parse a config file.

    Raises:
        ConfigError: the file is not there, a folder, not UTF-8, not valid YAML, or empty.
    """
    if not path.exists():
        raise missing_file(path)
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
        hint = (
            f"give a file, such as {path / inside[0]}" if inside else "give the path of a YAML file"
        )
        raise ConfigError(
            "{path} is a folder, not a config file", code="config-is-folder", fix=hint, path=path
        )
    if path.suffix in _DATA_SUFFIXES:
        raise ConfigError(
            "{path} is a data file, not a config",
            code="config-is-data-file",
            fix="name it as the data: dataset={path}",
            path=path,
        )
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            "{path} cannot be read: {reason}",
            code="config-unreadable",
            fix="check the file's permissions",
            path=path,
            reason=error.strerror,
        ) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            "{path} is not UTF-8 text: byte 0x{raw} on line {line} does not fit",
            code="config-not-utf8",
            fix="save it as UTF-8",
            path=path,
            raw=f"{raw[error.start]:02x}",
            line=line,
        ) from None
    return as_config(parse_yaml(text, str(path)), path)


def as_config(document: Document, path: Path) -> Document:
    """Return the document if it is a mapping.

    Raises:
        ConfigError: it is empty or not a mapping.
    """
    if document.value is None:
        raise ConfigError(
            "{path} is empty",
            code="config-empty",
            fix="write at least `model:` and `dataset:` into it; `paceline config` lists all keys",
            path=path,
        )
    if not isinstance(document.value, dict):
        raise ConfigError(
            "{path} holds {kind_of}, not keys with values",
            code="config-without-keys",
            allowed="lines such as `model: Qwen/Qwen2.5-0.5B`",
            path=path,
            kind_of=kind_of(document.value),
        )
    return document


def missing_file(path: Path) -> ConfigError:
    """Return the error for a config file that does not exist, with similar file names."""
    folder = path.parent
    if not folder.is_dir():
        return ConfigError(
            "there is no config file {path}: the folder {folder} does not exist",
            code="config-folder-missing",
            fix="check the path",
            path=path,
            folder=folder,
        )
    near = sorted(
        file.name
        for file in folder.iterdir()
        if file.suffix in (".yaml", ".yml") and file.is_file() and file.name[0] != "."
    )
    if not near:
        return ConfigError(
            "there is no config file {path}, and no *.yaml in {resolve}",
            code="config-file-missing",
            fix="check the path",
            path=path,
            resolve=folder.resolve(),
        )
    guess = did_you_mean(path.name, near, form=str(folder / "{}"))
    listed = ", ".join(near[:8]) + (f" and {len(near) - 8} more" if len(near) > 8 else "")
    return ConfigError(
        "there is no config file {path}",
        code="missing-file",
        fix="{guess} In {resolve} there are: {listed}",
        path=path,
        guess=guess,
        resolve=folder.resolve(),
        listed=listed,
    )


def parse_yaml(text: str, name: str) -> Document:
    """Parse YAML text into plain values (mappings, lists, text, numbers, true/false, null) with
    line numbers.

    Raises:
        ConfigError: with line and column where the text is not YAML, where a key stands twice in
            one mapping, or where a tag asks for an object.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is None:
            return Document(None)
        builder = _Builder(name)
        return Document(builder.build(node, ()), builder.lines)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, name) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            "{name} is not valid YAML: {split}",
            code="invalid-character-in-yaml",
            fix="remove that character",
            name=name,
            split=" ".join(str(error).split()),
        ) from None
    except RecursionError:
        raise ConfigError(
            "{name} is nested too deeply to be a config", code="config-nested-too-deeply", name=name
        ) from None


def parse_value(text: str, name: str) -> Any:
    """Parse a value of the command line: a YAML scalar, or a flow list or mapping (``[a, b]``,
    ``{x: 1}``)."""
    stripped = text.strip()
    if stripped[:1] in ("[", "{", '"', "'"):
        try:
            return parse_yaml(stripped, name).value
        except ConfigError:
            if stripped[0] in "[{":
                raise
            return text
    return scalar(stripped) if stripped else None


def scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) YAML scalar."""
    loader = _Loader("")
    try:
        tag = str(loader.resolve(yaml.ScalarNode, text, (True, False)))
    finally:
        loader.dispose()
    return _plain(tag, text)


def _syntax_error(error: yaml.MarkedYAMLError, text: str, name: str) -> ConfigError:
    lines = text.splitlines()
    mark = error.problem_mark or error.context_mark
    if mark is not None and mark.line >= len(lines) and error.context_mark is not None:
        mark = error.context_mark  # the file ended: what was left open says more than its end
    if mark is None or mark.line >= len(lines):
        return ConfigError(
            "{name} is not valid YAML: {problem}",
            code="unclosed-in-yaml",
            fix="close what was opened",
            name=name,
            problem=error.problem or error.context,
        )
    place = f"{name} line {mark.line + 1}, column {mark.column + 1}"
    shown = lines[mark.line].rstrip()
    if "\t" in shown[: mark.column + 1]:
        return ConfigError(
            "{place}: a tab; YAML indents with spaces only",
            code="tab-in-yaml",
            fix="put spaces in the place of the tab",
            place=place,
        )
    if "single document" in str(error.context):
        return ConfigError(
            "{place}: a second document begins (`---`)",
            code="several-documents-in-yaml",
            fix="keep one config in a file",
            place=place,
        )
    problem = str(error.problem or error.context or "cannot be read")
    return ConfigError(
        "{place}: not valid YAML ({problem}): `{shown}`",
        code="invalid-yaml",
        fix="check the colon, the indentation and the quotes on this line and the one above",
        place=place,
        problem=problem,
        shown=shown.strip()[:80],
    )


class _Builder:
    """Builds plain values from nodes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[KeyPath, int] = {}
        self.open: set[int] = set()
        self.count = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > _MAX_VALUES:
            raise ConfigError(
                "{name} has more than {max_values} values: not a config",
                code="too-many-values",
                fix="check its anchors (`&`, `*`)",
                name=self.name,
                max_values=f"{_MAX_VALUES:,}",
            )
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self.open:
            raise ConfigError(
                "{place}: an anchor refers to itself",
                code="anchor-refers-to-itself",
                fix="write the value out",
                place=self._place(node),
            )
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                self._check_tag(node, "map")
                return self._mapping(node, path)
            assert isinstance(node, yaml.SequenceNode)
            self._check_tag(node, "seq")
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self.open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, YamlValue]:
        out: dict[str, YamlValue] = {}
        first: dict[str, int] = {}
        merged: dict[str, YamlValue] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{_TAG}merge":
                merged.update(self._merge(value_node, path))
                continue
            key = self._key(key_node)
            if key in first:
                raise ConfigError(
                    "{name} line {line}: the key `{key}` stands twice, first on line {first}",
                    code="repeated-key",
                    fix="keep one of the two",
                    name=self.name,
                    line=line,
                    key=key,
                    first=first[key],
                )
            first[key] = line
            self.lines[(*path, key)] = line
            out[key] = self.build(value_node, (*path, key))
        return {**merged, **out} if merged else out

    def _merge(self, node: yaml.Node, path: KeyPath) -> dict[str, YamlValue]:
        parts = list(reversed(node.value)) if isinstance(node, yaml.SequenceNode) else [node]
        out: dict[str, YamlValue] = {}
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                raise ConfigError(
                    "{place}: `<<` takes a mapping",
                    code="invalid-merge-in-yaml",
                    fix="refer to an anchor that is a mapping",
                    place=self._place(part),
                )
            out.update(self.build(part, path))
        return out

    def _key(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            self._check_tag(node, "str", "int", "float", "bool", "null", "timestamp", "value")
            return str(node.value)
        raise ConfigError(
            "{place}: a key that is a list or a mapping",
            code="complex-key-in-yaml",
            allowed="a word as a key, then a colon",
            place=self._place(node),
        )

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        self._check_tag(node, "str", "int", "float", "bool", "null", "timestamp", "value", "merge")
        try:
            return _plain(str(node.tag), str(node.value))
        except ValueError:
            raise ConfigError(
                "{place}: `{node}` does not fit its tag `{tag}`",
                code="invalid-tag-in-yaml",
                place=self._place(node),
                node=node.value,
                tag=node.tag,
            ) from None

    def _check_tag(self, node: yaml.Node, *allowed: str) -> None:
        tag = str(node.tag)
        if tag.startswith(_TAG) and tag[len(_TAG) :] in allowed:
            return
        shown = tag.replace(_TAG, "!!")
        raise ConfigError(
            "{place}: the YAML tag `{shown}` is refused: tags build objects and run code; a config"
            " is data only",
            code="tag-refused",
            allowed="text, numbers, true/false, null, lists and mappings",
            fix="remove the tag and write the plain value",
            place=self._place(node),
            shown=shown,
        )

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name} line {node.start_mark.line + 1}"


def _plain(tag: str, text: str) -> Any:
    kind = tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return _BOOLS[text.lower()] if text.lower() in _BOOLS else bool(int(text))
    # With a colon it is a base-60 number in YAML 1.1, but text is meant.
    if ":" not in text and kind == "int":
        digits = text.replace("_", "")
        return int(digits, 0) if re.match(r"^[-+]?0[xb]", digits) else int(digits)
    if ":" not in text and kind == "float":
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text  # includes dates


def kind_of(value: object) -> str:
    """Describe the type of a value."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else type(value).__name__
