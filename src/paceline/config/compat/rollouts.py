"""Read configs of other tools for reinforcement learning with rewards: their rewards and settings
become the list ``rewards`` and the section ``grpo``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NotRequired, TypedDict

from paceline.config.compat.binding import KeyBinding
from paceline.config.compat.conversion import is_off, read_table
from paceline.config.compat.keys import DATA_KEYS, named_method
from paceline.config.compat.merge import Merge
from paceline.config.entries import Notice, Problem, as_number, short
from paceline.config.settings import Assignment
from paceline.config.yaml_read import YamlValue
from paceline.core.texts import UserText

_FIX = "remove the key, or train this file with the tool it was written for"
_Sets = Mapping[str, YamlValue]


class _IgnoredGroup(TypedDict):
    level: str
    reason: str
    keys: str


class _RefusedRewards(TypedDict):
    reason: str
    names: str


class _OptionKey(TypedDict):
    reward: str
    option: str
    place: NotRequired[int]


class _OpenR1(TypedDict):
    rewards: dict[str, dict[str, YamlValue]]
    defaults: list[str]
    keys: str


class _Switch(TypedDict):
    value: YamlValue
    sets: dict[str, YamlValue]


class _RolloutTables(TypedDict):
    """The content of ``rollouts.yaml``, where comments explain the fields."""

    keys: dict[str, str]
    server: str
    switches: dict[str, _Switch]
    functions: str
    weights: str
    models: str
    options: dict[str, _OptionKey]
    rewards: dict[str, dict[str, YamlValue]]
    open_r1: _OpenR1
    refused_rewards: list[_RefusedRewards]
    ignored: list[_IgnoredGroup]
    neutral: dict[str, list[YamlValue]]
    refused: dict[str, str]


@cache
def _tables() -> _RolloutTables:
    tables: _RolloutTables = read_table("rollouts.yaml")
    return tables


def description_with_rewards(key: str) -> tuple[str, str] | None:
    """Return (how it is read, reason) of a key for the documentation, or None for a key that is an
    error unless its value turns it off."""
    tables = _tables()
    if key in tables["keys"]:
        return f"`{tables['keys'][key]}`", "with `task: grpo` or `rloo`"
    if key in tables["server"].split():
        return "`grpo.vllm_server_base_url`", "with `task: grpo` or `rloo`"
    if key in tables["switches"]:
        names = ", ".join(f"`{name}`" for name in tables["switches"][key]["sets"])
        return names, "with `task: grpo` or `rloo`"
    if key in " ".join(tables[part] for part in ("functions", "weights", "models")).split():
        return "`rewards`", "with `task: grpo` or `rloo`"
    if key in tables["options"]:
        return "`rewards`", f"of the reward `{tables['options'][key]['reward']}`"
    if (ignored := _ignored(key)) is not None:
        return ignored
    return ("refused", tables["refused"][key]) if key in tables["refused"] else None


def _ignored(key: str) -> Notice | None:
    for group in _tables()["ignored"]:
        if key in group["keys"].split():
            return group["level"], group["reason"]
    return ("info", "`grpo.engine` determines what generates") if key.startswith("vllm_") else None


class RolloutReader:
    """Converts the keys of reinforcement learning for a task."""

    def __init__(self, merge: Merge, task: str) -> None:
        self.merge, self.task = merge, task
        self.tables = _tables()
        # The keys that make up the rewards and the address of a server, by name.
        self.parts: dict[str, KeyBinding] = {}
        own = self.tables["open_r1"]["keys"].split()
        known = [*merge.lines, *merge.methods]
        #: A key that only Open-R1 has, or None if the config is not one of Open-R1.
        self.open_r1_key = next((each for each in known if each.entry.name in own), None)
        self.address: dict[str, KeyBinding] = {}

    def read(self, chosen_by: KeyBinding | None = None) -> None:
        """Convert all keys. ``chosen_by``: the first one, if the keys have determined the task."""
        bindings, self.merge.methods = self.merge.methods, []
        for binding in [*bindings, *self._take_unknown(), *self._take_sampling()]:
            notices: list[Notice] = []
            if binding is chosen_by:
                text = f"these keys belong to {self.task}, so the task is `{self.task}`"
                notices.append(("info", text))
            name, value = binding.entry.name, binding.entry.value
            if name == "trl" and isinstance(value, Mapping):
                for key, item in value.items():
                    entry = replace(binding.entry, path=("trl", str(key)), value=item)
                    self._read_key(str(key), replace(binding, entry=entry), [])
            elif name not in DATA_KEYS:
                self._read_key(name, binding, notices)
        self._read_rewards()
        self._read_address()

    def _take_unknown(self) -> list[KeyBinding]:
        """Return the keys that are unknown because other methods have no such key."""
        problems = [
            problem
            for problem in self.merge.problems
            if problem.what.code == "unknown-key"
            and problem.entry is not None
            and len(problem.entry.path) == 1
            and self._knows(problem.entry.name)
        ]
        self.merge.problems = [each for each in self.merge.problems if each not in problems]
        return [KeyBinding(problem.entry) for problem in problems if problem.entry is not None]

    def _take_sampling(self) -> list[KeyBinding]:
        """Return the keys that other methods ignore because they generate nothing in training."""
        names = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
        lines = [
            each
            for each in self.merge.lines
            if each.ignored
            and (
                each.entry.name in names
                or (each.entry.name.startswith("vllm_") and self._knows(each.entry.name))
            )
        ]
        self.merge.lines = [line for line in self.merge.lines if line not in lines]
        return lines

    def _knows(self, name: str) -> bool:
        """Return whether a key has an effect on a run that generates completions."""
        tables = self.tables
        return name in {*tables["keys"], *tables["switches"], *tables["server"].split()}

    def _read_key(self, name: str, binding: KeyBinding, notices: list[Notice]) -> None:
        keys = self._names("functions") + self._names("weights") + self._names("models")
        if name in self.tables["options"] or (name in keys and not is_off(binding.entry.value)):
            self.parts[name] = replace(binding, notices=notices)
            return
        if name in self.tables["server"].split() and binding.entry.value is not None:
            self.address[name] = replace(binding, notices=notices)
            return
        sets = self._convert(name, binding, notices)
        if sets is not None:
            self._set(binding, sets, notices)

    def _convert(self, name: str, binding: KeyBinding, notices: list[Notice]) -> _Sets | None:
        """Return what a key sets, and add the notices about it; None if it is refused."""
        value = binding.entry.value
        if named_method(name, value) is not None:
            return {"task": self.task}
        if name in self.tables["keys"]:
            if name == "max_tool_calling_iterations" and isinstance(value, int):
                value += 1  # the model writes a turn after the last calls
            target = self.tables["keys"][name]
            return {target: _first(value) if target.startswith("grpo.vllm_") else value}
        if name in self.tables["switches"]:
            switch = self.tables["switches"][name]
            return switch["sets"] if value == switch["value"] else {}
        if (ignored := _ignored(name)) is not None:
            notices.append(ignored)
        elif not is_off(value) and value not in self.tables["neutral"].get(name, []):
            reason = self.tables["refused"].get(name)
            text = f"it is not supported with `task: {self.task}`"
            self._refuse(binding, text + (f": {reason}" if reason else ""))
            return None
        return {}

    def _read_rewards(self) -> None:
        """Set ``rewards``, in the order in which TRL's weights refer to them: models come first."""
        sources = [self.parts[name] for name in self._names("models") if name in self.parts]
        entries: list[dict[str, YamlValue] | None] = [
            {"model": str(model)} for each in sources for model in _as_list(each.entry.value)
        ]
        functions = self.parts.get(self.tables["functions"])
        if functions is not None:
            sources.append(functions)
            names = _as_list(functions.entry.value)
            entries += [self._reward(str(name), functions) for name in names]
        elif self.open_r1_key is not None and not sources and not self._has_rewards():
            entries = self._default_rewards(self.open_r1_key)
            sources.append(self.open_r1_key)
        weights = self.parts.get(self.tables["weights"])
        if sources and weights is not None and None not in entries:
            self._add_weights([each for each in entries if each], weights)
        accepted = [entry for entry in entries if entry]
        assigned = [Assignment("rewards", accepted, sources[-1].entry)] if accepted else []
        self.merge.assigned += assigned
        for name, binding in self.parts.items():
            option = self.tables["options"].get(name)
            is_used = option is None or any(
                entry.get("name") == option["reward"] for entry in accepted
            )
            unused = "it belongs to a reward that the config does not name"
            notices: list[Notice] = [] if is_used else [("info", unused)]
            self.merge.report(binding, assigned if is_used else [], [*binding.notices, *notices])

    def _has_rewards(self) -> bool:
        return any(each.target.split(".")[0] == "rewards" for each in self.merge.assigned)

    def _default_rewards(self, source: KeyBinding) -> list[dict[str, YamlValue] | None]:
        """Return the rewards of a config of Open-R1 that names none."""
        names = self.tables["open_r1"]["defaults"]
        self.parts["reward_funcs"] = KeyBinding(
            source.entry,
            notices=[
                (
                    "warning",
                    "configs of Open-R1 without `reward_funcs` have its default"
                    f" rewards: {', '.join(names)}",
                )
            ],
        )
        return [self._reward(name, source) for name in names]

    def _read_address(self) -> None:
        """Set the address of a server from its host and its port. A host on which TRL's server
        listens at all addresses is this one."""
        if not self.address:
            return
        host, port = (
            _first(self.address[name].entry.value) if name in self.address else default
            for name, default in (("vllm_server_host", "localhost"), ("vllm_server_port", 8000))
        )
        host = "localhost" if host == "0.0.0.0" else host
        bindings = list(self.address.values())
        address = f"http://{host}:{port}"
        assigned = [Assignment("grpo.vllm_server_base_url", address, bindings[-1].entry)]
        self.merge.assigned += assigned
        for binding in bindings:
            self.merge.report(binding, assigned, binding.notices)

    def _names(self, part: str) -> list[str]:
        """Return the names of keys that a field of the table lists."""
        return str(self.tables[part]).split()  # type: ignore[literal-required]

    def _reward(self, name: str, binding: KeyBinding) -> dict[str, YamlValue] | None:
        """Return the entry for a value of ``reward_funcs``; None if it is refused."""
        if name in self.tables["rewards"]:
            entry = dict(self.tables["rewards"][name])
            if not self._is_of_swift():
                entry.update(self.tables["open_r1"]["rewards"].get(name, {}))
            return self._with_options(entry)
        for group in self.tables["refused_rewards"]:
            if name in group["names"].split():
                self._refuse(binding, f"`{name}`: {group['reason']}")
                return None
        location, _, function = name.rpartition(".")
        if re.fullmatch(r"[\w.]+", location) and function.isidentifier():
            return {"function": f"{location}:{function}"}
        known = ", ".join(self.tables["rewards"])
        self._refuse(binding, f"`{name}` is not a known reward; known are {known}")
        return None

    def _is_of_swift(self) -> bool:
        """Return whether a key shows that the config is one of ms-swift, not of Open-R1."""
        names = {assigned.entry.name for assigned in self.merge.assigned}
        is_of_swift = bool(names & {"rlhf_type", "model", "model_type", "tuner_type"})
        return is_of_swift and self.open_r1_key is None

    def _with_options(self, entry: dict[str, YamlValue]) -> dict[str, YamlValue]:
        """Set the options of a built-in reward that the config has as keys of their own."""
        for key, option in self.tables["options"].items():
            if key not in self.parts or option["reward"] != entry["name"]:
                continue
            value = self.parts[key].entry.value
            if "place" in option:
                pair = entry[option["option"]]
                assert isinstance(pair, list)
                value = [value if place == option["place"] else x for place, x in enumerate(pair)]
            entry[option["option"]] = value
        return entry

    def _add_weights(self, entries: list[dict[str, YamlValue]], binding: KeyBinding) -> None:
        weights = [as_number(weight) for weight in _as_list(binding.entry.value)]
        if len(weights) != len(entries):
            why = f"it has {len(weights)} weights for {len(entries)} rewards"
            self._refuse(binding, why)
            return
        for entry, weight in zip(entries, weights, strict=True):
            entry["weight"] = weight

    def _set(self, binding: KeyBinding, sets: _Sets, notices: Sequence[Notice]) -> None:
        assigned = [Assignment(*item, binding.entry) for item in sets.items()]
        self.merge.assigned += assigned
        self.merge.report(binding, assigned, notices)

    def _refuse(self, binding: KeyBinding, why: str) -> None:
        shown = f"{binding.entry.shown()} ({short(binding.entry.value)})"
        what = UserText("{shown}: {why}", code="unsupported-value", shown=shown, why=why)
        self.merge.problems.append(Problem(what, binding.entry, fix=_FIX))


def _first(value: YamlValue) -> YamlValue:
    """Return a value, or the first one of a list: ms-swift may name several servers."""
    return value[0] if isinstance(value, list) and value else value


def _as_list(value: YamlValue) -> list[YamlValue]:
    if isinstance(value, str):
        return list(value.replace(",", " ").split())
    return list(value) if isinstance(value, list) else [value]
