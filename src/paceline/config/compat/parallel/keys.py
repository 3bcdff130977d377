"""The keys of other tools that choose a strategy, taken out of the merge to be read together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.compat.merge import Assignment, Merge, SourceLine
from paceline.config.entries import FILE, ConfigEntry, Problem
from paceline.config.yaml_read import YamlValue

#: A DeepSpeed JSON is overridden by the config: defaults < JSON < config file < overrides.
BELOW_FILE = FILE - 1


_NAMES = (
    "_deepspeed", "_deepspeed_config", "_fsdp", "_fsdp_config", "_fsdp_version", "_fsdp_setting",
    "_distributed_type", "_num_processes", "_hsdp",
)  # fmt: skip


@dataclass
class StrategyKeys:
    """The winning value of each ``_`` name, and the lines of the keys they come from."""

    merge: Merge
    base: Path | None
    by_name: dict[str, Assignment] = field(default_factory=dict)
    # of `_fsdp_setting`, all of the winning layer
    settings: list[Assignment] = field(default_factory=list)

    def value(self, name: str) -> Any:
        assigned = self.by_name.get(name)
        return None if assigned is None else assigned.value

    def line(self, entry: ConfigEntry) -> SourceLine | None:
        return next((line for line in self.merge.lines if line.binding.entry is entry), None)

    def assign(
        self,
        by: ConfigEntry,
        target: str,
        value: Any,
        weak: bool = False,
        entry: ConfigEntry | None = None,
    ) -> None:
        """Let the key ``by`` set ``target``. ``entry``: where the value lies, if not in the key
        itself."""
        assigned = Assignment(target, value, entry or by, weak)
        self.merge.assigned.append(assigned)
        line = self.line(by)
        if line is not None:
            line.assigned.append(assigned)

    def say(self, by: ConfigEntry, text: str, level: str = "info") -> None:
        line = self.line(by)
        if line is not None and text:
            line.notices = (*line.notices, (level, text))

    def refuse(
        self,
        by: ConfigEntry,
        why: str,
        fix: str | None = None,
        target: str | None = "parallel.mode",
    ) -> None:
        self.merge.problems.append(Problem(f"{by.shown()}: {why}", by, fix=fix, target=target))

    def native(self, target: str) -> Assignment | None:
        """What sets a key of Paceline so far: an override before the file."""
        found = [one for one in self.merge.assigned if one.target == target]
        strong = [one for one in found if not one.weak] or found
        return max(strong, key=lambda one: one.entry.layer, default=None)

    def number(self, target: str, default: int = 1) -> int:
        assigned = self.native(target)
        value = None if assigned is None else assigned.value
        return (
            value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0
            else default
        )

    def overridden(self, by: ConfigEntry, mode: str) -> bool:
        """Whether an override of `parallel.mode` takes the strategy from the key ``by``."""
        native = self.native("parallel.mode")
        return (
            native is not None
            and native.entry.layer > by.layer
            and not native.weak
            and native.value != mode
        )

    def set_strategy(self, by: ConfigEntry, settings: Mapping[str, YamlValue]) -> None:
        """Let ``by`` set `parallel.mode` and what belongs to it, or the mode alone where an
        override takes its place."""
        for key, value in settings.items():
            if key == "mode" or not self.overridden(by, str(settings["mode"])):
                self.assign(by, f"parallel.{key}", value)
        native = self.native("parallel.mode")
        if self.overridden(by, str(settings["mode"])) and native is not None:
            self.say(by, f"its strategy is overridden by {native.entry.shown()}")


def take_keys(merge: Merge, base: Path | None) -> StrategyKeys:
    """Take the ``_`` names out of the merge."""
    keys = StrategyKeys(merge, base)
    for name in _NAMES:
        found = [one for one in merge.assigned if one.target == name]
        if not found:
            continue
        layer = max(one.entry.layer for one in found)
        top = [one for one in found if one.entry.layer == layer]
        keys.by_name[name] = top[0]
        if name == "_fsdp_setting":
            keys.settings = top
        elif any(one.value != top[0].value for one in top):
            a, b = top[0].entry, next(one for one in top if one.value != top[0].value).entry
            what = f"{a.shown()} ({a.place()}) and {b.shown()} ({b.place()}) disagree"
            merge.problems.append(Problem(what, b, fix="keep one of the two"))
        for line in merge.lines:
            taken = [one for one in line.assigned if one in found]
            if taken:
                line.assigned = [one for one in line.assigned if one not in found]
                if taken[0] not in top:
                    line.notices = (
                        *line.notices,
                        ("info", f"is overridden by {top[0].entry.shown()}"),
                    )
        merge.assigned = [one for one in merge.assigned if one not in found]
    return keys


def num_ranks(keys: StrategyKeys) -> int | None:
    """The number of ranks on all hosts, if the config gives it."""
    per_host = keys.number("parallel.num_gpus", 0)
    return per_host * keys.number("parallel.nnodes") if per_host else None
