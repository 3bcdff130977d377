"""Entries to one value for each native key: conversion, disagreement, precedence (file <
overrides)."""

from dataclasses import dataclass, field
from typing import Any

from paceline.config.compat.binding import KeyBinding, unknown_key
from paceline.config.compat.conversion import Conversion, UnsupportedValue, is_off
from paceline.config.compat.keys import DATA_KEYS, alias_tables, named_method, tool_names
from paceline.config.entries import FILE, OVERRIDE, ConfigEntry, Problem, short
from paceline.config.fields import FREE, KEYS, takes_none

#: the value of a key that an override empties: the default
RESET: Any = object()
#: shared keys of which an override in words takes the foreign form too, as `dataset=a,b`
_IN_WORDS = ("dataset", "val_dataset", "lora.target_modules", "lora.modules_to_save")


@dataclass(eq=False)
class Assignment:
    """A value for a native key (dotted; a name with ``_`` in front is settled later)."""

    target: str
    value: Any
    entry: ConfigEntry
    weak: bool = False


@dataclass(eq=False)
class SourceLine:
    """What is said about one foreign key, once all is settled."""

    meaning: KeyBinding
    assigned: list[Assignment]
    says: tuple[tuple[str, str], ...]
    settled: list[tuple[str, str]] = field(default_factory=list)


class Merge:
    """Takes entries one by one; ``winners`` then holds what each target is set to."""

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
        # values of a DeepSpeed JSON, which give way to the config
        self.below_file: list[Assignment] = []

    # -- one entry
    def take(self, meaning: KeyBinding) -> None:
        entry = meaning.entry
        if meaning.methods:
            self.methods.append(meaning)
        if meaning.methods and entry.name not in DATA_KEYS:
            return
        if meaning.target is not None:
            self._native(meaning, meaning.target)
        elif meaning.alias is None and meaning.ignored is None:
            self.problems.append(unknown_key(entry))
        elif entry.value is None:
            if meaning.alias and meaning.alias.target and entry.layer == OVERRIDE:
                self._assign(Assignment(meaning.alias.target, RESET, entry))
            else:
                self.empty.append(entry)
        elif meaning.alias is not None:
            self._convert(meaning, meaning.alias.convert, meaning.alias.target)
        elif meaning.ignored is not None:
            ignored = meaning.ignored
            is_silent = ignored.level == "warning" and is_off(entry.value)
            says = () if is_silent else ((ignored.level, ignored.reason),)
            self.lines.append(SourceLine(meaning, [], says))

    def _native(self, meaning: KeyBinding, target: str) -> None:
        entry = meaning.entry
        if entry.value is None and target in KEYS and not takes_none(KEYS[target]):
            if entry.layer == OVERRIDE:
                self._assign(Assignment(target, RESET, entry))
            else:
                self.empty.append(entry)
            return
        shared = alias_tables().shared.get(target)
        if shared is None and (self.foreign or (entry.token and target in _IN_WORDS)):
            shared = alias_tables().shared_if_foreign.get(target)
        if shared is not None and entry.value is not None:
            meaning.alias = shared
            self._convert(meaning, shared.convert, target)
        else:
            self._assign(Assignment(target, entry.value, entry))
        if meaning.moved:
            self.moved.append(entry)

    def _convert(self, meaning: KeyBinding, convert: Any, target: str) -> None:
        entry = meaning.entry
        try:
            out: Conversion = convert(entry.value)
        except UnsupportedValue as refused:
            self.problems.append(
                Problem(f"{entry.shown()}: {refused.why}", entry, fix=refused.fix, target=target)
            )
            return
        wanted = [Assignment(key, value, entry) for key, value in out.sets.items()]
        wanted += [Assignment(key, value, entry, weak=True) for key, value in out.weak.items()]
        made = [part for one in wanted for part in self._assign(one)]
        values = {key: short(value) for key, value in (out.sets | out.weak).items()}
        as_written = (
            meaning.target is not None and not out.says and values == {target: short(entry.value)}
        )
        if not as_written:
            self.lines.append(SourceLine(meaning, made, out.says))

    def _assign(self, one: Assignment) -> list[Assignment]:
        """Keep an assignment; a free mapping becomes one for each of its keys, so that overrides
        merge into it."""
        free = next(
            (key for key in FREE if one.target == key or one.target.startswith(f"{key}.")), None
        )
        if free is not None and isinstance(one.value, dict) and one.value:
            parts = [
                Assignment(f"{one.target}.{key}", value, one.entry, one.weak)
                for key, value in one.value.items()
            ]
            return [leaf for part in parts for leaf in self._assign(part)]
        self.assigned.append(one)
        return [one]

    # -- all entries
    def settle_precedence(self) -> None:
        """Fill ``winners``: an override before the file, a strong value before a weak one; two that
        disagree are a problem."""
        by_target: dict[str, list[Assignment]] = {}
        for one in self.assigned:
            by_target.setdefault(one.target, []).append(one)
        for target, several in by_target.items():
            layer = max(one.entry.layer for one in several)
            same_layer = [one for one in several if one.entry.layer == layer]
            strong = [one for one in same_layer if not one.weak] or same_layer
            self.winners[target] = strong[0]
            for layer_number in (FILE, OVERRIDE):
                self._check_agreement(
                    target,
                    [one for one in several if one.entry.layer == layer_number and not one.weak],
                    layer,
                )
        self.drop_overridden_problems()

    def drop_overridden_problems(self) -> None:
        """Move the problems of keys that an override sets anew from ``problems`` to
        ``overridden``."""
        self.overridden += [one for one in self.problems if self._overridden(one)]
        self.problems = [one for one in self.problems if one not in self.overridden]

    def _check_agreement(self, target: str, several: list[Assignment], winning: int) -> None:
        if not several or several[0].entry.layer < winning:
            return  # an override settles it
        first = several[0]
        for other in several[1:]:
            if not _agree(first.value, other.value):
                a, b = first.entry, other.entry
                name = target.lstrip("_")
                what = (
                    f"{a.shown()} ({a.place()}) and {b.shown()} ({b.place()}) disagree: both set"
                    f" `{name}`"
                )
                self.problems.append(Problem(what, b, fix="keep one of the two"))
                return

    def _overridden(self, problem: Problem) -> bool:
        winner = self.winners.get(problem.target) if problem.target else None
        return (
            problem.entry is not None
            and winner is not None
            and winner.entry.layer > problem.entry.layer
        )

    def missing_methods(self) -> list[KeyBinding]:
        """The keys that ask for a training method that Paceline does not have; to be called once
        precedence is settled.

        A config that names its task may keep settings of another method, which then have no effect.
        A key that names its method (`rl: dpo`) gives way to a task on the command line only.
        """
        task = self.winners.get("task")
        asking = []
        for meaning in self.methods:
            entry = meaning.entry
            is_named = named_method(entry.name, entry.value) is not None
            if (
                task is None
                or task.value is RESET
                or (is_named and task.entry.layer <= entry.layer)
            ):
                asking.append(meaning)
            elif entry.name not in DATA_KEYS:
                words = (
                    f"it is a setting of another training method ({', '.join(meaning.methods)})"
                    f" than {task.entry.shown()}"
                )
                self.lines.append(SourceLine(meaning, [], (("warning", words),)))
        return asking

    def layer_of(self, target: str) -> int | None:
        winner = self.winners.get(target)
        return None if winner is None else winner.entry.layer

    def value_of(self, target: str) -> Any:
        winner = self.winners.get(target)
        return None if winner is None or winner.value is RESET else winner.value

    # -- words
    def notices(self) -> list[tuple[str, str]]:
        """One line for each foreign key, in the order written."""
        order = sorted(
            self.lines, key=lambda line: (line.meaning.entry.layer, line.meaning.entry.line or 0)
        )
        out = [self._words(line) for line in order]
        given_way = [
            (problem.entry, self.winners[problem.target])
            for problem in self.overridden
            if problem.target
        ]
        out += [
            ("info", f"{entry.shown()} gives way to {winner.entry.shown()}")
            for entry, winner in given_way
            if entry
        ]
        return [one for one in out if one is not None]

    def _words(self, line: SourceLine) -> tuple[str, str] | None:
        entry = line.meaning.entry
        tools = (
            tool_names(line.meaning.tools, self.scores)
            if line.meaning.tools and line.meaning.target is None
            else ""
        )
        head = entry.shown() + (f" ({tools})" if tools else "")
        real = [one for one in line.assigned if not one.target.startswith("_")]
        beaten = [
            one
            for one in line.assigned
            if (layer := self.layer_of(one.target)) is not None and layer > entry.layer
        ]
        if line.assigned and len(beaten) == len(line.assigned):
            name = beaten[0].target
            return (
                "info",
                f"{head} gives way to the command line: {self.winners[name].entry.shown()}",
            )
        says = [*line.says, *line.settled]
        level = "warning" if any(one == "warning" for one, _ in says) else "info"
        words = "; ".join(text for _, text in says)
        lost = [one for one in real if self._lost(one)]
        if lost and len(lost) == len(real):
            return "info", f"{head} gives way to {self.winners[lost[0].target].entry.shown()}"
        shown = [one for one in real if one not in lost]
        if shown:
            sets = ", ".join(f"`{one.target}: {short(one.value)}`" for one in shown)
            return level, f"{head} is read as {sets}" + (f"; {words}" if words else "")
        if line.settled and level == "info":
            return level, f"{head} {words}"
        if level == "warning":
            return level, f"{head} has no effect here: {words}"
        return level, f"{head} is ignored: {words or 'that is how it is here'}"

    def _lost(self, one: Assignment) -> bool:
        winner = self.winners[one.target]
        return winner.entry is not one.entry and not _agree(winner.value, one.value)


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    return bool(one == other)
