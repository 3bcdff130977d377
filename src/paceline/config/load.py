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
from paceline.config.compat.binding import bind_key, unsupported_method
from paceline.config.compat.conflicts import resolve_conflicts
from paceline.config.compat.datasets import with_fields
from paceline.config.compat.keys import tool_scores
from paceline.config.compat.merge import RESET, Merge
from paceline.config.compat.parallel.deepspeed import json_notices
from paceline.config.compat.parallel.deepspeed_json import interpret, looks_like_deepspeed
from paceline.config.compat.parallel.strategy import expand
from paceline.config.compat.preference import read_preferences
from paceline.config.entries import (
    FILE,
    OVERRIDE,
    ConfigEntry,
    EntryCollector,
    Problem,
    quoted_names,
    short,
    split_key,
)
from paceline.config.fields import SOURCE_KEYS
from paceline.config.messages import explain, strict_problems
from paceline.config.overrides import parse_tokens
from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.config.yaml_read import (
    Document,
    Dumper,
    YamlValue,
    as_config,
    parse_yaml,
    read_config_file,
)
from paceline.core.errors import ConfigError


@dataclass(frozen=True)
class Mistake:
    """A single error in a config. ``key``: the native key, ``line``: counted from 1; None if
    unknown."""

    key: str | None
    line: int | None
    what: str
    allowed: str | None
    fix: str | None


class ConfigMistakes(ConfigError):
    """All errors in a config, in one message; ``mistakes`` lists them separately."""

    mistakes: Sequence[Mistake] = ()


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
    collectors = [_collect_overrides(overrides)]
    if document is not None and file is not None:
        check_kind(document.value, file)
        collectors.insert(0, EntryCollector(FILE, document.lines))
        collectors[0].add_tree(document.value)
    bindings = [bind_key(entry) for collector in collectors for entry in collector.entries]
    foreign = [
        binding
        for binding in bindings
        if binding.ignored or binding.methods or (binding.alias and binding.alias.tools)
    ]
    merge = Merge(bool(foreign), tool_scores(binding.tools for binding in foreign))
    merge.problems.extend(problem for collector in collectors for problem in collector.problems)
    for binding in bindings:
        merge.add(binding)
    expand(merge, None if file is None else file.parent)
    read_preferences(merge)
    merge.resolve_precedence()
    unsupported = merge.unsupported_methods()
    if unsupported:  # Other errors in such a config would only distract from this one.
        raise _error([unsupported_method(unsupported)], file)
    conflict_notices = [*resolve_conflicts(merge), *json_notices(merge)]
    if document is not None and file is not None and is_accelerate(document.value):
        targets = {*merge.winners, *(problem.target for problem in merge.problems)}
        if not targets & {"model", "dataset"}:
            raise _error([accelerate_problem(file, merge), *merge.problems], file)
    config = _validate(merge, file)
    extensions = [key for collector in collectors for key in collector.extensions]
    summary = _summary(merge, config, extensions)
    notices = [*merge.notices(), *conflict_notices, *summary]
    return Loaded(config, list(dict.fromkeys(notices)), file)


def _collect_overrides(overrides: Sequence[str] | Mapping[str, YamlValue]) -> EntryCollector:
    collector = EntryCollector(OVERRIDE)
    if isinstance(overrides, Mapping):
        collector.add_tree(overrides)
        return collector
    for key, value, token in parse_tokens([overrides] if isinstance(overrides, str) else overrides):
        collector.add(split_key(key) if "." in key else (key,), value, token=token)
    return collector


def _validate(merge: Merge, file: Path | None) -> Config:
    data = _nested(merge)

    def find(key: str) -> ConfigEntry | None:
        winner = merge.winners.get(key) or next(
            (winner for name, winner in merge.winners.items() if name.startswith(f"{key}.")), None
        )
        return winner.entry if winner and winner.value is not RESET else None

    strict = strict_problems(data, find)
    problems = [*merge.problems, *strict]
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        reported = {id(problem.entry) for problem in strict if problem.entry}
        refused = {problem.target for problem in merge.problems if problem.target}
        guesses = [problem.fix for problem in merge.problems]
        for problem in explain(error, data, find):
            if problem.entry is None and problem.what.endswith("is missing"):
                key = problem.what.split("`")[1]
                # Already reported as a misspelt or rejected key.
                if key in refused or f"did you mean `{key}`?" in guesses:
                    continue
            if problem.entry is None or id(problem.entry) not in reported:
                problems.append(problem)
        raise _error(problems, file) from None
    if problems:
        raise _error(problems, file)
    return config


def _nested(merge: Merge) -> dict[str, YamlValue]:
    """Return the winning values as a nested mapping, with shorter paths applied first."""
    data: dict[str, YamlValue] = {}
    for target, winner in sorted(merge.winners.items(), key=lambda item: item[0].count(".")):
        if winner.value is RESET:
            continue
        *parents, last = target.split(".")
        parent = data
        for part in parents:
            inner = parent.get(part)
            # `dataset.format=alpaca` applies to each source of a list.
            if isinstance(inner, list) and part in SOURCE_KEYS:
                sources = with_fields(inner, {})
                parent[part] = [{**source, last: winner.value} for source in sources]
                break
            if isinstance(inner, str) and part in SOURCE_KEYS:
                inner = {"path": inner}  # `dataset.format=alpaca` and `dataset: data.jsonl`
            section: dict[str, YamlValue] = dict(inner) if isinstance(inner, dict) else {}
            parent[part] = section
            parent = section
        else:
            parent[last] = winner.value
    return data


def _summary(merge: Merge, config: Config, extensions: list[str]) -> list[tuple[str, str]]:
    """Return the notices that cover several keys."""
    texts = []
    args = config.train_args
    if extensions:
        texts.append(f"not read, as keys with anchors: {quoted_names(extensions)}")
    if args.save_total_limit == 1 and (args.save_best or args.load_best_model_at_end):
        best = "save_best" if args.save_best else "load_best_model_at_end"
        texts.append(
            f"`save_total_limit: 1` keeps the latest checkpoint and `{best}: true` the best one, so"
            " there may be two"
        )
    moved = [entry.key for entry in merge.moved if merge.foreign or entry.section]
    if moved:
        texts.append(f"read as keys of train_args or of the top level: {quoted_names(moved)}")
    if merge.empty:
        empty = quoted_names(entry.key for entry in merge.empty)
        texts.append(f"keys without a value are ignored: {empty}")
    if merge.foreign:
        texts.append(
            "keys that the config does not set have Paceline's defaults, not those of the tool it"
            " was written for"
        )
    return [("info", text) for text in texts]


def _error(problems: list[Problem], file: Path | None) -> ConfigError:
    def line(problem: Problem) -> int:
        entry = problem.entry
        return 10**9 if entry is None or entry.line is None else entry.line

    ordered = sorted(problems, key=line)
    errors = [
        ConfigMistakes(
            _end_sentence(_with_place(problem, file)),
            allowed=_end_sentence(problem.allowed),
            fix=_end_sentence(problem.fix),
        )
        for problem in ordered
    ]
    error = errors[0]
    if len(errors) > 1:
        paragraphs = "\n".join(f"- {error.paragraph()}" for error in errors)
        error = ConfigMistakes(f"the config has {len(errors)} errors:\n{paragraphs}")
    error.mistakes = [_mistake(problem) for problem in ordered]
    return error


def _mistake(problem: Problem) -> Mistake:
    entry, key = problem.entry, problem.target
    if key is None and entry is not None:
        binding = bind_key(entry)
        key = binding.target or (binding.alias.target if binding.alias else None)
    return Mistake(
        key or None, entry.line if entry else None, problem.what, problem.allowed, problem.fix
    )


def _end_sentence(text: str | None) -> str:
    """Return the text with a period if it ends in code, because another sentence follows."""
    return f"{text}." if text and text.endswith("`") else text or ""


def _with_place(problem: Problem, file: Path | None) -> str:
    entry = problem.entry
    if entry is None:
        return f"{file}: {problem.what}" if file is not None else problem.what
    if entry.layer == OVERRIDE or entry.source:
        return f"{entry.place()}: {problem.what}"
    return f"{file} line {entry.line}: {problem.what}" if entry.line else f"{file}: {problem.what}"


def to_yaml(config: Config) -> str:
    """Return the full config, including defaults, as YAML that loads to an equal config."""
    return dump_yaml(config.model_dump(mode="json"))


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


_ACCELERATE = (
    "compute_environment", "distributed_type", "downcast_bf16", "main_training_function",
    "num_machines", "num_processes", "rdzv_backend", "same_network",
)  # fmt: skip


def is_accelerate(tree: Mapping[str, YamlValue]) -> bool:
    """Return whether a file is an Accelerate config, which describes how to start processes."""
    return "distributed_type" in tree or sum(key in tree for key in _ACCELERATE) >= 3


def check_kind(tree: Mapping[str, YamlValue], file: Path) -> None:
    """Raise ConfigError for a file that cannot be a training config, regardless of overrides."""
    if looks_like_deepspeed(tree):
        stage = interpret(tree).stage
        kind = "a DeepSpeed config" + (f" (ZeRO stage {stage})" if stage is not None else "")
        raise ConfigError(
            f"{file} is {kind}, not a training config: it has no model and no dataset",
            fix=(
                f"set `deepspeed: {file}` in your config, or pass it with the config: "
                f"`paceline sft CONFIG.yaml --deepspeed {file}`"
            ),
        )
    if ("provider" in tree and "gpu" in tree) or {"gpu", "gpu_count", "secrets"} <= tree.keys():
        raise ConfigError(
            f"{file} is a config of axolotl for a provider of GPUs, not a training config",
            fix="pass the training config, and start Paceline on the machine itself",
        )
    if any(
        "_component_" in str(key) or (isinstance(value, Mapping) and "_component_" in value)
        for key, value in tree.items()
    ):
        raise ConfigError(
            f"{file} is a torchtune config (it has `_component_`), which is not supported",
            allowed=(
                "a config of Paceline, LLaMA-Factory, ms-swift, axolotl, TRL or alignment-handbook"
            ),
            fix=(
                "write a config with `model: FOLDER_OR_HUB_ID` and `dataset: ...` (docs/config.md),"
                " or use torchtune"
            ),
        )
    rest = [key for key in tree if not key.startswith(("_", "fsdp"))]
    if not rest and any(key.startswith("fsdp") for key in tree):
        raise ConfigError(
            f"{file} is an FSDP config, not a training config: it has no model and no dataset",
            fix=f"set `fsdp: {file}` in your config, or set `parallel.mode: zero3`",
        )


def accelerate_problem(file: Path, merge: Merge) -> Problem:
    """Describe an Accelerate config that is passed without a model and a dataset."""
    settings = "; ".join(
        f"`{key}: {short(winner.value)}`"
        for key, winner in merge.winners.items()
        if winner.value is not RESET
    )
    return Problem(
        "this is an Accelerate config: it describes how to start processes, and has no model and"
        " no dataset" + (f". It is read as {settings}" if settings else ""),
        fix=(
            f"pass the model and the dataset with it (`paceline sft {file} model=... dataset=...`),"
            " or copy its keys into your own config"
        ),
    )
