"""Loading a config: defaults < file < overrides, with the keys of other tools, every mistake at
once, and nothing in silence.

The environment plays no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paceline.config.compat.binding import bind_key, hints_of, unsupported_method
from paceline.config.compat.conflicts import resolve_conflicts
from paceline.config.compat.datasets import with_fields
from paceline.config.compat.keys import tool_scores
from paceline.config.compat.merge import RESET, Merge
from paceline.config.compat.parallel.deepspeed import json_notices
from paceline.config.compat.parallel.deepspeed_json import interpret, looks_like_deepspeed
from paceline.config.compat.parallel.strategy import expand
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
    """One thing that is wrong with a config. ``key``: the native key it concerns, ``line``: from 1;
    None where not known."""

    key: str | None
    line: int | None
    what: str
    allowed: str | None
    fix: str | None


class ConfigMistakes(ConfigError):
    """Everything that is wrong with a config, in one message, and one by one in ``mistakes``."""

    mistakes: Sequence[Mistake] = ()


@dataclass(frozen=True)
class Loaded:
    """A config, and what is to be said about how it was read: (``info`` or ``warning``, text)."""

    config: Config
    notices: list[tuple[str, str]] = field(default_factory=list)
    path: Path | None = None

    def with_parallel(self, parallel: Parallel) -> Loaded:
        """The same, where devices and hosts have become known."""
        return replace(self, config=self.config.model_copy(update={"parallel": parallel}))


def load_config(
    path: str | Path | None, overrides: Sequence[str] | Mapping[str, YamlValue] = ()
) -> Loaded:
    """Load a config file (or none) with overrides.

    Args:
        path: a YAML file, or None where the overrides give all that is needed.
        overrides: words of a command line (``key=value``, ``--key value``, ``--key=value``,
            ``--flag``; dotted keys), or a mapping (dotted or nested keys, values as they are). They
            go before the file.

    Raises:
        ConfigError: with the line, the key, the value, and what to write instead; all mistakes in
            one message.
    """
    file = Path(path) if path is not None else None
    return _load(None if file is None else read_config_file(file), file, overrides)


def load_stored(stored: Mapping[str, YamlValue]) -> Config:
    """The config in a checkpoint's ``meta.json``; keys that an older version wrote are read as the
    present ones."""
    try:
        return Config.model_validate(stored)
    except ValidationError:
        return load_config(None, stored).config


def load_text(text: str, name: str) -> Loaded:
    """As :func:`load_config`, of a config that is not in a file; ``name`` is what messages call
    it."""
    return _load(as_config(parse_yaml(text, name), Path(name)), Path(name), ())


def _load(
    document: Document | None, file: Path | None, overrides: Sequence[str] | Mapping[str, YamlValue]
) -> Loaded:
    walks = []
    if document is not None and file is not None:
        check_kind(document.value, file)
    if document is not None:
        walk = EntryCollector(FILE, document.lines)
        walk.tree(document.value)
        walks.append(walk)
    walks.append(_overrides(overrides))
    meanings = [bind_key(entry) for walk in walks for entry in walk.entries]
    foreign = [
        one for one in meanings if one.ignored or one.methods or (one.alias and one.alias.tools)
    ]
    merge = Merge(bool(foreign), tool_scores(one.tools for one in foreign))
    merge.problems.extend(problem for walk in walks for problem in walk.problems)
    for meaning in meanings:
        merge.take(meaning)
    expand(merge, None if file is None else file.parent)
    merge.settle_precedence()
    asking = merge.missing_methods()
    if asking:  # nothing else in such a config is worth a mistake of its own
        raise _error(
            [unsupported_method(asking, hints_of((one.entry for one in meanings), file))], file
        )
    settled = [*resolve_conflicts(merge), *json_notices(merge)]
    if document is not None and file is not None and is_accelerate(document.value):
        named = {one.target for one in merge.winners.values()} | {
            one.target for one in merge.problems if one.target
        }
        if not named & {"model", "dataset"}:
            settings = {
                key: short(one.value)
                for key, one in merge.winners.items()
                if one.value is not RESET
            }
            raise _error([accelerate_problem(file, settings), *merge.problems], file)
    config = _validate(merge, file)
    notices = [*merge.notices(), *settled, *_summary(merge)]
    return Loaded(config, list(dict.fromkeys(notices)), file)


def _overrides(overrides: Sequence[str] | Mapping[str, YamlValue]) -> EntryCollector:
    walk = EntryCollector(OVERRIDE)
    if isinstance(overrides, Mapping):
        walk.tree(overrides)
        return walk
    for key, value, token in parse_tokens([overrides] if isinstance(overrides, str) else overrides):
        walk.add(split_key(key) if "." in key else (key,), value, token=token)
    return walk


def _validate(merge: Merge, file: Path | None) -> Config:
    data = _nested(merge)
    problems = list(merge.problems)
    refused = {problem.target for problem in problems if problem.target}

    def find(key: str) -> ConfigEntry | None:
        winner = merge.winners.get(key) or next(
            (one for name, one in merge.winners.items() if name.startswith(f"{key}.")), None
        )
        return winner.entry if winner and winner.value is not RESET else None

    strict = strict_problems(data, find)
    reported = {id(problem.entry) for problem in strict if problem.entry}
    guesses = [problem.fix for problem in merge.problems]
    problems.extend(strict)
    config = None
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        for problem in explain(error, data, find):
            if problem.entry is None and problem.what.endswith("is missing"):
                key = problem.what.split("`")[1]
                # the same mistake, already reported as a misspelt or refused key
                if key in refused or f"did you mean `{key}`?" in guesses:
                    continue
            if problem.entry is None or id(problem.entry) not in reported:
                problems.append(problem)
    if problems or config is None:
        raise _error(problems, file)
    return config


def _nested(merge: Merge) -> dict[str, YamlValue]:
    """The winners as a nested mapping, shorter paths first."""
    data: dict[str, YamlValue] = {}
    for target, winner in sorted(merge.winners.items(), key=lambda item: item[0].count(".")):
        if winner.value is RESET:
            continue
        *parents, last = target.split(".")
        place = data
        for part in parents:
            inner = place.get(part)
            # `dataset.format=alpaca` is for each of them
            if isinstance(inner, list) and part in ("dataset", "val_dataset"):
                place[part] = [{**with_fields([one], {})[0], last: winner.value} for one in inner]
                break
            if isinstance(inner, str) and part in ("dataset", "val_dataset"):
                inner = {"path": inner}  # `dataset.format=alpaca` beside `dataset: data.jsonl`
            section: dict[str, YamlValue] = dict(inner) if isinstance(inner, dict) else {}
            place[part] = section
            place = section
        else:
            place[last] = winner.value
    return data


def _summary(merge: Merge) -> list[tuple[str, str]]:
    """The lines that stand for many keys at once."""
    out = []
    moved = [entry.key for entry in merge.moved if merge.foreign or entry.section]
    if moved:
        text = "read as keys of train_args, or of the top level"
        out.append(("info", f"{text}: {quoted_names(moved)}"))
    if merge.empty:
        empty = quoted_names(entry.key for entry in merge.empty)
        out.append(("info", f"left empty, so without effect: {empty}"))
    if merge.foreign:
        out.append(
            (
                "info",
                (
                    "what the config leaves out has Paceline's defaults, not those of the tool it"
                    " was written for"
                ),
            )
        )
    return out


def _error(problems: list[Problem], file: Path | None) -> ConfigError:
    def line(problem: Problem) -> int:
        entry = problem.entry
        return 10**9 if entry is None or entry.line is None else entry.line

    ordered = sorted(problems, key=line)
    errors = [
        ConfigMistakes(_stop(_placed(one, file)), allowed=_stop(one.allowed), fix=_stop(one.fix))
        for one in ordered
    ]
    told = [one.paragraph() for one in errors]
    whole = errors[0]
    if len(told) > 1:
        whole = ConfigMistakes(
            f"{len(told)} things in the config are wrong:\n" + "\n".join(f"- {one}" for one in told)
        )
    whole.mistakes = [_mistake(one) for one in ordered]
    return whole


def _mistake(problem: Problem) -> Mistake:
    entry, key = problem.entry, problem.target
    if key is None and entry is not None:
        meaning = bind_key(entry)
        key = meaning.target or (meaning.alias.target if meaning.alias else None)
    return Mistake(
        key or None, entry.line if entry else None, problem.what, problem.allowed, problem.fix
    )


def _stop(text: str | None) -> str:
    """A text that ends in code takes a full stop too, for something follows it."""
    return f"{text}." if text and text.endswith("`") else text or ""


def _placed(problem: Problem, file: Path | None) -> str:
    entry = problem.entry
    if entry is None:
        return f"{file}: {problem.what}" if file is not None else problem.what
    if entry.layer == OVERRIDE or entry.source:
        return f"{entry.place()}: {problem.what}"
    return f"{file} line {entry.line}: {problem.what}" if entry.line else f"{file}: {problem.what}"


def to_yaml(config: Config) -> str:
    """The whole config, defaults and all, as YAML that loads again to an equal config."""
    text = yaml.dump(
        config.model_dump(mode="json"),
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=120,
    )
    return str(text)


def diff_configs(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Every key in which two configs differ, as (dotted key, old value, new value)."""
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
    """Whether a file is a config of Accelerate: it says how processes start."""
    return "distributed_type" in tree or sum(key in tree for key in _ACCELERATE) >= 3


def check_kind(tree: Mapping[str, YamlValue], file: Path) -> None:
    """Raise ConfigError for a file that cannot be a config of a run, whatever the overrides are."""
    if looks_like_deepspeed(tree):
        stage = interpret(tree).stage
        kind = "a DeepSpeed config" + (f" (ZeRO stage {stage})" if stage is not None else "")
        raise ConfigError(
            f"{file} is {kind}, not a config of a run: it has no model and no dataset",
            fix=(
                f"name it in your config as `deepspeed: {file}`, or pass it beside the config: "
                f"`paceline sft CONFIG.yaml --deepspeed {file}`"
            ),
        )
    if any(
        "_component_" in str(key) or (isinstance(value, Mapping) and "_component_" in value)
        for key, value in tree.items()
    ):
        raise ConfigError(
            f"{file} is a config of torchtune (it has `_component_`), whose keys Paceline does not"
            " read",
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
            f"{file} is an FSDP config, not a config of a run: it has no model and no dataset",
            fix=f"name it in your config as `fsdp: {file}`, or set `parallel.mode: zero3`",
        )


def accelerate_problem(file: Path, settings: Mapping[str, YamlValue]) -> Problem:
    """The mistake in passing a config of Accelerate without a model and data.

    Args:
        settings: what its keys are read as, by dotted key of Paceline.
    """
    lines = "; ".join(f"`{key}: {value}`" for key, value in settings.items())
    return Problem(
        "this is a config of Accelerate: it says how processes start, and names no model and no"
        " dataset" + (f". It is read as {lines}" if lines else ""),
        fix=(
            f"pass the model and the dataset with it (`paceline sft {file} model=... dataset=...`),"
            " or copy its keys into your own config"
        ),
    )
