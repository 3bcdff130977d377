"""Load a config: defaults < file < overrides, with the keys of other tools.

All mistakes are reported at once, and each converted or ignored key gets a notice. Environment
variables are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paceline.config.chosen import open_text, without_chosen
from paceline.config.entries import FILE, OVERRIDE, EntryCollector, quoted_names, split_key
from paceline.config.messages import config_error, explain, strict_problems
from paceline.config.overrides import parse_tokens
from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.config.settings import Settings, read_native
from paceline.config.yaml_read import (
    Document,
    Dumper,
    YamlValue,
    as_config,
    parse_yaml,
    read_config_file,
)
from paceline.core.texts import UserText


@dataclass(frozen=True)
class Loaded:
    """A config and the notices about how it was read: (``info`` or ``warning``, text)."""

    config: Config
    notices: list[tuple[str, str]] = field(default_factory=list)
    path: Path | None = None

    def with_notice(self, level: str, text: str) -> Loaded:
        """Return a copy with another notice."""
        return replace(self, notices=[*self.notices, (level, text)])

    def with_parallel(self, parallel: Parallel) -> Loaded:
        """Return a copy with another ``parallel`` section, once devices and hosts are known."""
        return replace(self, config=self.config.model_copy(update={"parallel": parallel}))


def load_config(
    path: str | Path | None, overrides: Sequence[str] | Mapping[str, YamlValue] = ()
) -> Loaded:
    """Load a config file (or none) with overrides.

    Args:
        path: a YAML file, or None if the overrides are a complete config.
        overrides: command-line arguments (``key=value``, ``--key value``, ``--key=value``,
            ``--flag``; dotted keys), or a mapping (dotted or nested keys, values as they are). They
            take precedence over the file.

    Raises:
        ConfigError: with the line, the key, the value, and what to write instead; all mistakes in
            one message.
    """
    if path is None:
        return _load(None, None, overrides)
    document, chosen = without_chosen(read_config_file(Path(path)), Path(path))
    loaded = _load(document, Path(path), overrides)
    return loaded if not chosen else loaded.with_notice("info", open_text(chosen))


def load_stored(stored: Mapping[str, YamlValue]) -> Config:
    """Load the config in a checkpoint's ``meta.json``, including one with keys of an older
    version."""
    try:
        return Config.model_validate(stored)
    except ValidationError:
        return load_config(None, stored).config


def load_text(text: str, name: str) -> Loaded:
    """Load a config from text, as :func:`load_config` does from a file. Messages call it
    ``name``."""
    return _load(as_config(parse_yaml(text, name), Path(name)), Path(name), ())


def _load(
    document: Document | None, file: Path | None, overrides: Sequence[str] | Mapping[str, YamlValue]
) -> Loaded:
    collector = _collect(document, overrides)
    settings = read_native(collector)
    if settings is None:
        from paceline.config.compat.translate import translate

        settings = translate(collector, {} if document is None else document.value, file)
    config = _validate(settings, file)
    notices = [*settings.notices(), *_summary(settings, config, collector.extensions)]
    return Loaded(config, list(dict.fromkeys(notices)), file)


def _collect(
    document: Document | None, overrides: Sequence[str] | Mapping[str, YamlValue]
) -> EntryCollector:
    collector = EntryCollector(FILE)
    if document is not None:
        collector.lines = document.lines
        collector.add_tree(document.value)
    collector.layer, collector.lines = OVERRIDE, {}
    if isinstance(overrides, Mapping):
        collector.add_tree(overrides)
        return collector
    for key, value, token in parse_tokens([overrides] if isinstance(overrides, str) else overrides):
        collector.add(split_key(key) if "." in key else (key,), value, token=token)
    return collector


def _validate(settings: Settings, file: Path | None) -> Config:
    data = settings.nested()
    strict = strict_problems(data, settings.find)
    problems = [*settings.problems, *strict]
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        reported = {id(problem.entry) for problem in strict if problem.entry}
        refused = {problem.target for problem in settings.problems if problem.target}
        suggested = {problem.suggestion for problem in settings.problems}
        for problem in explain(error, data, settings.find):
            if problem.code == "missing-key" and problem.target in refused | suggested:
                continue  # It is already reported as a misspelt or rejected key.
            if problem.entry is None or id(problem.entry) not in reported:
                problems.append(problem)
        raise config_error(problems, file, settings.key_of) from None
    if problems:
        raise config_error(problems, file, settings.key_of)
    return config


def _summary(settings: Settings, config: Config, extensions: list[str]) -> list[tuple[str, str]]:
    """Return the notices that cover several keys."""
    texts = []
    args = config.train_args
    if extensions:
        texts.append(
            UserText(
                "not read, as keys with anchors: {names}",
                code="anchor-keys-not-read",
                names=quoted_names(extensions),
            )
        )
    if args.save_total_limit == 1 and (args.save_best or args.load_best_model_at_end):
        best = "save_best" if args.save_best else "load_best_model_at_end"
        texts.append(
            UserText(
                "`save_total_limit: 1` keeps the latest checkpoint and `{best}: true` the best one,"
                " so there may be two",
                code="latest-and-best-checkpoint",
                best=best,
            )
        )
    moved = [entry.key for entry in settings.moved if settings.is_foreign or entry.section]
    if moved:
        texts.append(
            UserText(
                "read as keys of train_args or of the top level: {names}",
                code="keys-moved",
                names=quoted_names(moved),
            )
        )
    if settings.empty:
        empty = quoted_names(entry.key for entry in settings.empty)
        texts.append(
            UserText("keys without a value are ignored: {names}", code="keys-empty", names=empty)
        )
    if settings.is_foreign:
        texts.append(
            UserText(
                "keys that the config does not set have Paceline's defaults, not the defaults of"
                " the tool it was written for",
                code="defaults-of-paceline",
            )
        )
    return [("info", text) for text in texts]


def to_yaml(config: Config) -> str:
    """Return the full config, including defaults, as YAML that loads to an equal config."""
    return dump_yaml(config.model_dump(mode="json"))


def own_keys(config: Config) -> dict[str, YamlValue]:
    """Return the keys that a config sets, also at their defaults: `mode: auto` does not choose
    values for them."""
    return config.model_dump(mode="json", exclude_unset=True)


def find_changed_keys(config: Mapping[str, YamlValue]) -> YamlValue:
    """Return the keys of a full config that differ from their defaults."""
    keys: YamlValue = Config.model_validate(config).model_dump(mode="json", exclude_defaults=True)
    return keys


def dump_yaml(value: YamlValue) -> str:
    """Return a value as YAML, with the keys in their order."""
    text = yaml.dump(
        value,
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=120,
    )
    return str(text)


def diff_configs(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Return every key in which two configs differ, as (dotted key, old value, new value)."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = [*before, *(key for key in after if key not in before)]
    return [
        (key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    ]


def _flat(tree: Mapping[str, YamlValue], prefix: str = "") -> dict[str, YamlValue]:
    out: dict[str, YamlValue] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            out.update(_flat(value, f"{name}."))
        else:
            out[name] = value
    return out
