"""Merge the entries of a config into one value for each native key: conversion, disagreement, and
precedence (file < overrides)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from paceline.config.compat.binding import KeyBinding, unknown_key
from paceline.config.compat.conversion import (
    Notice,
    UnsupportedValue,
    as_bool,
    as_number,
    is_off,
)
from paceline.config.compat.keys import DATA_KEYS, Alias, alias_tables, named_method, tool_names
from paceline.config.entries import FILE, OVERRIDE, ConfigEntry, Problem, short
from paceline.config.fields import KEYS, MAPPINGS, literals, takes, takes_none

#: The value of a key that an override resets to its default.
RESET: Any = object()
#: Shared keys for which command-line text is also read in the other tools' form, as `dataset=a,b`.
_COMMAND_LINE_FORMS = ("dataset", "val_dataset", "lora.target_modules", "lora.modules_to_save")


@dataclass(eq=False)
class Assignment:
    """A value for a native key (dotted), or for a name with ``_`` in front, which is resolved
    later."""

    target: str
    value: Any
    entry: ConfigEntry
    weak: bool = False


@dataclass(eq=False)
class SourceLine:
    """A key of another tool, what it sets, and the notices about it.

    ``notices`` come from the conversion of its value, ``resolved`` from its resolution together
    with other keys.
    """

    binding: KeyBinding
    assigned: list[Assignment]
    notices: tuple[Notice, ...] = ()
    resolved: list[Notice] = field(default_factory=list)


class Merge:
    """Collects entries; ``winners`` then holds the value of each target."""

    def __init__(self, foreign: bool, scores: dict[str, int]) -> None:
        self.foreign, self.scores = foreign, scores
        self.assigned: list[Assignment] = []
        self.lines: list[SourceLine] = []
        self.problems: list[Problem] = []
        self.moved: list[ConfigEntry] = []
        self.empty: list[ConfigEntry] = []
        self.winners: dict[str, Assignment] = {}
        self.methods: list[KeyBinding] = []
        self.overridden: list[Problem] = []
        # Values of a DeepSpeed JSON, which the config overrides.
        self.below_file: list[Assignment] = []

    def add(self, binding: KeyBinding) -> None:
        """Add one entry: convert its value, or record why it has no effect or is an error."""
        entry, alias, ignored = binding.entry, binding.alias, binding.ignored
        if binding.methods:
            self.methods.append(binding)
            if entry.name not in DATA_KEYS:
                return
        if binding.target is not None:
            self._add_native(binding, binding.target)
        elif alias is None and ignored is None:
            self.problems.append(unknown_key(entry))
        elif entry.value is None:
            self._add_empty(entry, alias.target if alias else "")
        elif alias is not None:
            self._convert(binding, alias)
        elif ignored is not None:
            is_silent = ignored.level == "warning" and is_off(entry.value)
            notices = () if is_silent else ((ignored.level, ignored.reason),)
            self.lines.append(SourceLine(binding, [], notices))

    def _add_native(self, binding: KeyBinding, target: str) -> None:
        entry = binding.entry
        if entry.value is None and target in KEYS and not takes_none(KEYS[target]):
            self._add_empty(entry, target)
            return
        tables = alias_tables()
        shared = tables.shared.get(target)
        if self.foreign or (entry.token and target in _COMMAND_LINE_FORMS):
            shared = tables.shared_if_foreign.get(target, shared)
        if shared is not None and entry.value is not None:
            binding.alias = shared
            self._convert(binding, shared)
        else:
            self._assign(Assignment(target, entry.value, entry))
        if binding.moved:
            self.moved.append(entry)

    def _add_empty(self, entry: ConfigEntry, target: str) -> None:
        """Reset the target to its default if an override is empty; an empty key of a file has no
        effect."""
        if target and entry.layer == OVERRIDE:
            self._assign(Assignment(target, RESET, entry))
        else:
            self.empty.append(entry)

    def _convert(self, binding: KeyBinding, alias: Alias) -> None:
        entry, target = binding.entry, alias.target
        try:
            result = alias.convert(entry.value)
        except UnsupportedValue as error:
            self.problems.append(
                Problem(f"{entry.shown()}: {error.why}", entry, fix=error.fix, target=target)
            )
            return
        assigned = [
            *(Assignment(key, value, entry) for key, value in result.sets.items()),
            *(Assignment(key, value, entry, weak=True) for key, value in result.weak.items()),
        ]
        leaves = [leaf for assignment in assigned for leaf in self._assign(assignment)]
        values = {key: short(value) for key, value in (result.sets | result.weak).items()}
        is_unchanged = binding.target is not None and values == {target: short(entry.value)}
        if result.notices or not is_unchanged:
            self.lines.append(SourceLine(binding, leaves, result.notices))

    def add_assignment(self, assignment: Assignment) -> None:
        """Record a value for a native key that no free mapping has."""
        self.assigned.append(assignment)

    def _assign(self, assignment: Assignment) -> list[Assignment]:
        """Record an assignment. A free mapping is split by key, so that overrides merge into
        it."""
        target, value = assignment.target, assignment.value
        is_free = any(target == key or target.startswith(f"{key}.") for key in MAPPINGS)
        if is_free and isinstance(value, dict) and value:
            parts = [
                Assignment(f"{target}.{key}", item, assignment.entry, assignment.weak)
                for key, item in value.items()
            ]
            return [leaf for part in parts for leaf in self._assign(part)]
        assignment.value = _without_quotes(target, value)
        self.assigned.append(assignment)
        return [assignment]

    def resolve_precedence(self) -> None:
        """Fill ``winners``: an override before the file, a strong value before a weak one. Two
        strong values that disagree are a problem."""
        by_target: dict[str, list[Assignment]] = {}
        for assignment in self.assigned:
            by_target.setdefault(assignment.target, []).append(assignment)
        for target, assignments in by_target.items():
            layer = max(assignment.entry.layer for assignment in assignments)
            top = [assignment for assignment in assignments if assignment.entry.layer == layer]
            strong = [assignment for assignment in top if not assignment.weak]
            self.winners[target] = (strong or top)[0]
            if layer >= FILE:
                self._check_agreement(strong)
        self.drop_overridden_problems()

    def drop_overridden_problems(self) -> None:
        """Move the problems of keys that an override sets from ``problems`` to ``overridden``."""
        self.overridden += [problem for problem in self.problems if self._is_overridden(problem)]
        self.problems = [problem for problem in self.problems if problem not in self.overridden]

    def _check_agreement(self, assignments: list[Assignment]) -> None:
        for other in assignments[1:]:
            if not _same_setting(other.target, assignments[0].value, other.value):
                sets = f"both set `{other.target.lstrip('_')}`"
                self.add_disagreement(assignments[0].entry, other.entry, f": {sets}")
                return

    def add_disagreement(
        self, first: ConfigEntry, second: ConfigEntry, why: str, target: str | None = None
    ) -> None:
        """Record the problem that two entries disagree; ``why`` is added to the message."""
        shown = " and ".join(f"{entry.shown()} ({entry.place()})" for entry in (first, second))
        what = f"{shown} disagree{why}"
        self.problems.append(Problem(what, second, fix="keep one of the two", target=target))

    def _is_overridden(self, problem: Problem) -> bool:
        winner = self.winners.get(problem.target) if problem.target else None
        return (
            problem.entry is not None
            and winner is not None
            and winner.entry.layer > problem.entry.layer
        )

    def unsupported_methods(self) -> list[KeyBinding]:
        """Return the keys that request an unsupported training method. Requires resolved
        precedence.

        A config that sets its task may have settings of another method, which have no effect. A
        key that names its method (`rl: dpo`) is only overridden by a task on the command line.
        """
        task = self.winners.get("task")
        if task is not None and task.entry.name == "pretraining_dataset":
            task = None  # The data do not tell how axolotl trains on them.
        unsupported = []
        for binding in self.methods:
            entry = binding.entry
            is_named = named_method(entry.name, entry.value) is not None
            if (
                task is None
                or task.value is RESET
                or (is_named and task.entry.layer <= entry.layer)
            ):
                unsupported.append(binding)
            elif entry.name not in DATA_KEYS:
                methods = ", ".join(binding.methods)
                text = f"it is a setting of {methods}, and the config sets {task.entry.shown()}"
                self.lines.append(SourceLine(binding, [], (("warning", text),)))
        return unsupported

    def layer_of(self, target: str) -> int | None:
        winner = self.winners.get(target)
        return None if winner is None else winner.entry.layer

    def value_of(self, target: str) -> Any:
        winner = self.winners.get(target)
        return None if winner is None or winner.value is RESET else winner.value

    def set_winner(self, target: str, value: Any, by: Assignment) -> None:
        """Let the key of ``by`` set a target, after precedence is resolved."""
        self.winners[target] = Assignment(target, value, by.entry)

    def is_overridden(self, target: str, by: Assignment) -> bool:
        """Return whether another key with higher precedence sets the target."""
        layer = self.layer_of(target)
        return layer is not None and layer > by.entry.layer

    def attempt(self, act: "Action", by: Assignment) -> Notice | None:
        """Apply an action. An unsupported value becomes a problem."""
        try:
            return act(self, by)
        except UnsupportedValue as error:
            what = f"{by.entry.shown()}: {error.why}"
            self.problems.append(Problem(what, by.entry, fix=error.fix))
            return None

    def notices(self) -> list[Notice]:
        """Return one notice for each key of another tool, in the order of the config."""
        lines = sorted(
            self.lines, key=lambda line: (line.binding.entry.layer, line.binding.entry.line or 0)
        )
        notices = [self._notice(line) for line in lines]
        for problem in self.overridden:
            if problem.entry and problem.target:
                winner = self.winners[problem.target].entry.shown()
                notices.append(("info", f"{problem.entry.shown()} is overridden by {winner}"))
        return notices

    def _notice(self, line: SourceLine) -> Notice:
        entry, tools = line.binding.entry, line.binding.tools
        subject = entry.shown()
        if tools and line.binding.target is None:
            subject += f" ({tool_names(tools, self.scores)})"
        layers = [self.layer_of(assigned.target) for assigned in line.assigned]
        if layers and all(layer is not None and layer > entry.layer for layer in layers):
            winner = self.winners[line.assigned[0].target].entry
            return "info", f"{subject} is overridden by the command line: {winner.shown()}"
        notices = [*line.notices, *line.resolved]
        level = "warning" if any(level == "warning" for level, _ in notices) else "info"
        text = "; ".join(text for _, text in notices)
        native = [assigned for assigned in line.assigned if not assigned.target.startswith("_")]
        effective = [assigned for assigned in native if not self._has_lost(assigned)]
        if native and not effective:
            winner = self.winners[native[0].target].entry
            return "info", f"{subject} is overridden by {winner.shown()}"
        if effective:
            sets = ", ".join(
                f"`{assigned.target}: {short(assigned.value)}`" for assigned in effective
            )
            return level, f"{subject} is read as {sets}" + (f"; {text}" if text else "")
        if line.resolved and level == "info":
            return level, f"{subject} {text}"
        if level == "warning":
            return level, f"{subject} has no effect: {text}"
        return level, f"{subject} is ignored: {text or 'Paceline behaves the same without it'}"

    def _has_lost(self, assigned: Assignment) -> bool:
        winner = self.winners[assigned.target]
        return winner.entry is not assigned.entry and not _agree(winner.value, assigned.value)


#: ``_`` targets whose value is a number.
_NUMBERS = (
    "_max_samples", "_num_processes", "_batch_size", "_cosine_min_lr", "_cosine_min_lr_rate",
    "_embedding_lr_scale", "_trainable_layers",
)  # fmt: skip


def _without_quotes(target: str, value: Any) -> Any:
    """Return true, false or the number that text stands for, if the target takes it and no text."""
    if not isinstance(value, str):
        return value
    if target in _NUMBERS:
        return as_number(value)
    if target.startswith("_"):
        return as_bool(value)
    info = KEYS.get(target)
    if info is None or takes(info, str) or value in literals(info):
        return value
    value = as_bool(value) if takes(info, bool) else value
    return as_number(value) if takes(info, int, float) else value


#: Applies a ``_`` target to the winners, and returns the notice about it.
Action = Callable[[Merge, Assignment], Notice]


def _agree(first: Any, second: Any) -> bool:
    """Return whether two values are equal, without treating true as 1."""
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def _same_setting(target: str, first: Any, second: Any) -> bool:
    """Return whether two values of a native key mean the same, such as true and ``full``."""
    if _agree(first, second):
        return True
    info = KEYS.get(target)
    if info is None or not {type(first), type(second)} <= {bool, int, float, str}:
        return False
    field_type: Any = Annotated[info.annotation, info]
    adapter: TypeAdapter[Any] = TypeAdapter(field_type)
    try:
        return _agree(adapter.validate_python(first), adapter.validate_python(second))
    except ValidationError:
        return False
