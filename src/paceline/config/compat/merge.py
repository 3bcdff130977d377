"""Merge the keys of other tools into one value for each native key, and report how each was
read."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from paceline.config.compat.binding import KeyBinding, bind_key, unknown_key
from paceline.config.compat.conversion import UnsupportedValue, is_off
from paceline.config.compat.keys import DATA_KEYS, Alias, alias_tables, named_method, tool_names
from paceline.config.compat.notices import (
    NOT_NEEDED,
    key_ignored,
    key_read_as,
    key_remark,
    key_without_effect,
    keys_ignored,
    overridden_by_command_line,
    read_as_remark,
    remark,
    shown_settings,
)
from paceline.config.entries import ConfigEntry, Notice, Problem, as_bool, as_number, short
from paceline.config.settings import RESET, Assignment, Settings, agree, overridden_text
from paceline.core.texts import UserText, join_texts

#: Shared keys for which command-line text is also read in the other tools' form, as `dataset=a,b`.
_COMMAND_LINE_FORMS = ("dataset", "val_dataset", "lora.target_modules", "lora.modules_to_save")


class Merge(Settings):
    """The settings of a config with keys of other tools. ``scores``: the number of keys that each
    tool knows."""

    def __init__(self, foreign: bool, scores: Counter[str]) -> None:
        super().__init__()
        self.is_foreign, self.scores = foreign, scores
        # The keys to report.
        self.lines: list[KeyBinding] = []
        self.methods: list[KeyBinding] = []
        self.overridden: list[Problem] = []
        # Values of a DeepSpeed JSON, which the config overrides.
        self.below_file: list[Assignment] = []

    def report(
        self, binding: KeyBinding, assigned: list[Assignment], notices: Iterable[Notice] = ()
    ) -> None:
        """Record what a key sets, to be reported with notices about it."""
        binding.assigned, binding.notices = assigned, [*notices]
        self.lines.append(binding)

    def add_binding(self, binding: KeyBinding) -> None:
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
            self.add_empty(entry, alias.target if alias else "")
        elif alias is not None:
            self._convert(binding, alias)
        elif ignored is not None:
            is_silent = ignored.level == "warning" and is_off(entry.value)
            self.report(binding, [], [] if is_silent else [(ignored.level, ignored.reason)])

    def _add_native(self, binding: KeyBinding, target: str) -> None:
        entry = binding.entry
        tables = alias_tables()
        shared = tables.shared.get(target)
        if self.is_foreign or (entry.token and target in _COMMAND_LINE_FORMS):
            shared = tables.shared_if_foreign.get(target, shared)
        if shared is None or entry.value is None:
            self.add(entry, target)
            return
        binding.alias = shared
        self._convert(binding, shared)
        if not entry.key.startswith(target):
            self.moved.append(entry)

    def _convert(self, binding: KeyBinding, alias: Alias) -> None:
        entry, target = binding.entry, alias.target
        try:
            result = alias.convert(entry.value)
        except UnsupportedValue as error:
            self.refuse(entry, error.why, error.fix, target)
            return
        assigned = [
            Assignment(key, _plain(key, value), entry, is_weak)
            for sets, is_weak in ((result.sets, alias.is_weak), (result.weak, True))
            for key, value in sets.items()
        ]
        leaves = [leaf for assignment in assigned for leaf in self.assign(assignment)]
        values = {key: short(value) for key, value in (result.sets | result.weak).items()}
        is_unchanged = binding.target is not None and values == {target: short(entry.value)}
        if result.notices or not is_unchanged:
            self.report(binding, leaves, result.notices)

    def refuse(
        self, entry: ConfigEntry, why: str, fix: str | None, target: str | None = None
    ) -> None:
        """Record the problem that a value is not supported."""
        what = UserText("{shown}: {why}", code="unsupported-value", shown=entry.shown(), why=why)
        self.problems.append(Problem(what, entry, fix=fix, target=target))

    def resolve_precedence(self) -> None:
        super().resolve_precedence()
        self.drop_overridden_problems()

    def drop_overridden_problems(self) -> None:
        """Move the problems of keys that an override sets from ``problems`` to ``overridden``."""
        self.overridden += [
            problem for problem in self.problems if self.is_overridden(problem.target, problem)
        ]
        self.problems = [problem for problem in self.problems if problem not in self.overridden]

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
                text = UserText(
                    "it is a setting of {methods}, and the config sets {task}",
                    code="setting-of-another-method",
                    methods=methods,
                    task=task.entry.shown(),
                )
                self.report(binding, [], [("warning", text)])
        return unsupported

    def layer_of(self, target: str | None) -> int | None:
        winner = self.winners.get(target or "")
        return None if winner is None else winner.entry.layer

    def is_overridden(self, target: str | None, by: Assignment | Problem) -> bool:
        """Return whether another key with higher precedence sets the target."""
        layer = self.layer_of(target)
        return by.entry is not None and layer is not None and layer > by.entry.layer

    def yields_to(self, target: str, by: Assignment) -> bool:
        """Return whether a key of the same or of higher precedence sets the target."""
        layer = self.layer_of(target)
        return layer is not None and layer >= by.entry.layer

    def read_as(self, target: str, value: Any, by: Assignment, more: str = "") -> Notice:
        """Let the key of ``by`` set a target, and return the notice about it, which ends with
        ``more``."""
        self.set_winner(target, value, by)
        return "info", read_as_remark(target, value, more)

    def attempt(self, act: "Action", by: Assignment) -> Notice | None:
        """Apply an action. An unsupported value becomes a problem."""
        try:
            return act(self, by)
        except UnsupportedValue as error:
            self.refuse(by.entry, error.why, error.fix)
            return None

    def key_of(self, entry: ConfigEntry) -> str | None:
        return bind_key(entry).native_key

    def is_reported(self, entry: ConfigEntry) -> bool:
        return any(line.entry is entry for line in self.lines)

    def enables_lora(self, entry: ConfigEntry) -> bool:
        trains_lora = max(self.scores[tool] for tool in "slu") > max(
            self.scores["a"], self.scores["t"]
        )
        is_foreign_key = entry.name.split(".")[-1].startswith(("lora_", "target_modules"))
        return self.is_foreign and is_foreign_key and trains_lora

    def notices(self) -> list[Notice]:
        """Return one notice for each key of another tool, in the order of the config, and one for
        all keys that are not needed."""
        lines = sorted(self.lines, key=lambda line: (line.entry.layer, line.entry.line or 0))
        notices, unneeded = [], list[KeyBinding]()
        for line in lines:
            if (notice := self._notice(line)) is None:
                unneeded.append(line)
            else:
                notices.append(notice)
        notices += self._notices_of_unneeded(unneeded)
        for problem in self.overridden:
            if problem.entry and problem.target:
                winner = self.winners[problem.target].entry
                notices.append(("info", overridden_text(problem.entry.shown(), winner)))
        return [*notices, *self.general_notices]

    def _notices_of_unneeded(self, lines: list[KeyBinding]) -> list[Notice]:
        if len(lines) == 1:
            text = lines[0].notices[0][1] if lines[0].notices else NOT_NEEDED
            return [("info", key_ignored(self._subject(lines[0]), remark(text)))]
        return [("info", keys_ignored([line.entry.shown() for line in lines]))] if lines else []

    def _subject(self, line: KeyBinding) -> str:
        has_tools = line.tools and line.target is None
        tools = f" ({tool_names(line.tools, self.scores)})" if has_tools else ""
        return f"{line.entry.shown()}{tools}"

    def _notice(self, line: KeyBinding) -> Notice | None:
        """Return the notice about a key, or None if Paceline behaves the same without it."""
        entry, subject = line.entry, self._subject(line)
        layers = [self.layer_of(assigned.target) for assigned in line.assigned]
        if layers and all(layer is not None and layer > entry.layer for layer in layers):
            winner = self.winners[line.assigned[0].target].entry
            return "info", overridden_by_command_line(subject, winner)
        notices = [*line.notices, *line.resolved]
        level = "warning" if any(level == "warning" for level, _ in notices) else "info"
        text = join_texts(remark(text) for _, text in notices if text)
        native = [assigned for assigned in line.assigned if not assigned.target.startswith("_")]
        effective = [assigned for assigned in native if not self._has_lost(assigned)]
        if native and not effective:
            winner = self.winners[native[0].target].entry
            return "info", overridden_text(subject, winner)
        if effective:
            settings = {assigned.target: assigned.value for assigned in effective}
            return level, key_read_as(subject, shown_settings(settings), text)
        if line.resolved and level == "info":
            return level, key_remark(subject, text)
        if level == "warning":
            return level, key_without_effect(subject, text)
        return None

    def _has_lost(self, assigned: Assignment) -> bool:
        winner = self.winners[assigned.target]
        return winner.entry is not assigned.entry and not agree(winner.value, assigned.value)


#: ``_`` targets whose value is a number.
_NUMBERS = (
    "_max_samples", "_num_processes", "_batch_size", "_cosine_min_lr", "_cosine_min_lr_rate",
    "_embedding_lr_scale", "_trainable_layers",
)  # fmt: skip


def _plain(target: str, value: Any) -> Any:
    """Return true, false or the number that text stands for, for a ``_`` target."""
    if not target.startswith("_") or not isinstance(value, str):
        return value
    return as_number(value) if target in _NUMBERS else as_bool(value)


#: Applies a ``_`` target to the winners, and returns the notice about it.
Action = Callable[[Merge, Assignment], Notice]
