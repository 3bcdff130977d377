"""The keys of other tools that choose a strategy, taken out of the merge to be read together."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.compat.binding import KeyBinding
from paceline.config.compat.merge import Merge
from paceline.config.compat.notices import overridden_remark
from paceline.config.entries import FILE, ConfigEntry, as_number
from paceline.config.settings import Assignment
from paceline.config.yaml_read import YamlValue

#: The config overrides a DeepSpeed JSON: defaults < JSON < config file < overrides.
BELOW_FILE = FILE - 1
_NAMES = (
    "_deepspeed", "_deepspeed_config", "_fsdp", "_fsdp_config", "_fsdp_version", "_fsdp_setting",
    "_distributed_type", "_num_processes", "_hsdp", "_activation_offload",
)  # fmt: skip


def nested_entry(
    by: ConfigEntry, name: str, value: Any, source: str, layer: int = BELOW_FILE
) -> ConfigEntry:
    """Return the entry of a value in ``source``, the file or mapping that the key ``by`` gives."""
    return replace(by, path=(name,), value=value, layer=layer, source=source, token="")


@dataclass
class StrategyKeys:
    """The winning value of each ``_`` name, and the lines of the keys they come from.

    ``settings``: all values of ``_fsdp_setting`` in the winning layer.
    """

    merge: Merge
    base: Path | None
    by_name: dict[str, Assignment] = field(default_factory=dict)
    settings: list[Assignment] = field(default_factory=list)

    def value(self, name: str) -> Any:
        assigned = self.by_name.get(name)
        return None if assigned is None else assigned.value

    def line(self, entry: ConfigEntry) -> KeyBinding | None:
        return next((line for line in self.merge.lines if line.entry is entry), None)

    def assign(
        self, by: ConfigEntry, target: str, value: Any, entry: ConfigEntry | None = None
    ) -> None:
        """Let the key ``by`` set ``target``. ``entry``: where the value is, if not in the key
        itself."""
        assigned = Assignment(target, value, entry or by)
        self.merge.assigned.append(assigned)
        line = self.line(by)
        if line is not None:
            line.assigned.append(assigned)
        if entry is not None:
            self.merge.below_file.append(Assignment(target, value, entry))

    def add_notice(self, by: ConfigEntry, text: str, level: str = "info") -> None:
        """Add a notice to the line of the key ``by``, unless the text is empty."""
        line = self.line(by)
        if line is not None and text:
            line.notices.append((level, text))

    def native(self, target: str) -> Assignment | None:
        """Return what sets a native key so far, except weakly: an override before the file."""
        assigned = [item for item in self.merge.assigned if item.target == target and not item.weak]
        return max(assigned, key=lambda item: item.entry.layer, default=None)

    def number(self, target: str, default: int = 1) -> int:
        """Return the value of a native key if it is a positive integer, else the default."""
        assigned = self.native(target)
        value = None if assigned is None else as_number(assigned.value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        return default

    def has_axis_sizes(self) -> bool:
        """Return whether the config sets the number of replicas or of shards."""
        axes = ("parallel.data", "parallel.shard")
        return any(self.native(target) is not None for target in axes)

    def overriding_mode(self, by: ConfigEntry, mode: object) -> Assignment | None:
        """Return the override of `parallel.mode` that replaces the strategy of the key ``by``."""
        native = self.native("parallel.mode")
        if native is None or native.entry.layer <= by.layer or native.value == mode:
            return None
        return native

    def set_strategy(self, by: ConfigEntry, settings: Mapping[str, YamlValue]) -> None:
        """Let ``by`` set `parallel.mode` and its settings, or only the mode if an override replaces
        it."""
        for key, value in settings.items():
            if key == "mode" or not self.overriding_mode(by, settings["mode"]):
                self.assign(by, f"parallel.{key}", value)
        override = self.overriding_mode(by, settings["mode"])
        if override is not None:
            self.add_notice(by, f"its strategy is overridden by {override.entry.shown()}")


def take_keys(merge: Merge, base: Path | None) -> StrategyKeys:
    """Take the ``_`` names out of the merge."""
    keys = StrategyKeys(merge, base)
    for name in _NAMES:
        assigned = [item for item in merge.assigned if item.target == name]
        if not assigned:
            continue
        layer = max(item.entry.layer for item in assigned)
        top = [item for item in assigned if item.entry.layer == layer]
        keys.by_name[name] = top[0]
        others = [item for item in top if item.value != top[0].value]
        if name == "_fsdp_setting":
            keys.settings = top
        elif others:
            merge.add_disagreement(top[0].entry, others[0].entry, "")
        for line in merge.lines:
            taken = [item for item in line.assigned if item in assigned]
            line.assigned = [item for item in line.assigned if item not in assigned]
            if taken and taken[0] not in top:
                line.notices.append(("info", overridden_remark(top[0].entry)))
        merge.assigned = [item for item in merge.assigned if item not in assigned]
    return keys


def num_ranks(keys: StrategyKeys) -> int | None:
    """Return the number of ranks on all hosts, if the config sets it."""
    per_host = keys.number("parallel.num_gpus", 0)
    return per_host * keys.number("parallel.nnodes") if per_host else None
