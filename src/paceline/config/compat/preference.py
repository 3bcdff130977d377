"""Read configs of other tools for preference training: which task they request, and their keys.

Most configs of TRL do not name their method, because the script that reads them chooses the
trainer. The method is then the only one that has most of the keys.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, TypedDict

from paceline.config.compat.binding import KeyBinding, likely_methods
from paceline.config.compat.conversion import is_off, read_table
from paceline.config.compat.keys import DATA_KEYS, named_method
from paceline.config.compat.merge import Merge, SourceLine
from paceline.config.entries import Notice, Problem, short
from paceline.config.schema.tasks import ANSWER_TASKS
from paceline.config.settings import Assignment
from paceline.config.yaml_read import YamlValue

_DIFFERENT_MEAN: Notice = (
    "warning",
    "the cross entropy is averaged over the tokens of a batch, not over its answers",
)
_PACKED_PAIRS: Notice = (
    "warning",
    "the batch size counts samples, and the answers of a micro-batch share a row without padding",
)
_PADDED: Notice = ("info", "the texts of a micro-batch are padded, with the same results")
_FIX = "remove the key, or train this file with the tool it was written for"


class _IgnoredKeys(TypedDict):
    level: str
    reason: str
    keys: str


class _Tables(TypedDict):
    """The content of ``preference.yaml``, where comments explain the fields."""

    tasks: dict[str, dict[str, str]]
    keys: dict[str, str]
    cross_entropy_weights: str
    losses: str
    reference_models: str
    ignored: list[_IgnoredKeys]
    refused: dict[str, str]


@cache
def _tables() -> _Tables:
    tables: _Tables = read_table("preference.yaml")
    return tables


def read_preferences(merge: Merge) -> None:
    """Choose the task of a config with keys of preference training, and convert these keys. Called
    before precedence is resolved. Does nothing if the config requests another task, a method that
    is not supported, or none of several methods that have the same keys: names of runs and folders
    are not read."""
    naming = [binding for binding in merge.methods if _name(binding) is not None]
    task = max(
        (assigned for assigned in merge.assigned if assigned.target == "task"),
        key=lambda assigned: assigned.entry.layer,
        default=None,
    )
    if naming and (
        task is None or max(binding.entry.layer for binding in naming) >= task.entry.layer
    ):
        methods = {str(_name(binding)) for binding in naming}
        if methods <= _tables()["tasks"].keys():
            _PreferenceReader(merge, _task_of(merge, methods)).read()
    elif task is not None:
        if task.value in ANSWER_TASKS:
            _PreferenceReader(merge, task.value).read()
    elif merge.methods:
        methods = set(likely_methods(merge.methods))
        if len(methods) == 1 and methods <= _tables()["tasks"].keys():
            first, (method,) = merge.methods[0], methods
            task_name = _tables()["tasks"][method]["task"]
            merge.add_assignment(Assignment("task", task_name, first.entry, weak=True))
            _PreferenceReader(merge, task_name).read(chosen_by=first)


def _name(binding: KeyBinding) -> str | None:
    return named_method(binding.entry.name, binding.entry.value)


def _task_of(merge: Merge, methods: set[str]) -> str:
    """Return the task of methods that a config names; LLaMA-Factory's `pref_loss` names a task
    that replaces the task of `stage`."""
    for binding in merge.methods:
        if binding.entry.name in _tables()["losses"].split():
            value = str(binding.entry.value)
            if value in ("orpo", "simpo"):
                return value
    return str(_tables()["tasks"][sorted(methods)[0]]["task"])


def description(key: str) -> tuple[str, str] | None:
    """Return (how it is read, reason) of a key of preference training for the documentation, or
    None for a key that is an error unless its value turns it off."""
    tables = _tables()
    if key in tables["keys"]:
        return f"`{tables['keys'][key]}`", "with one of the tasks of preference training"
    if key in tables["cross_entropy_weights"].split():
        return "`preference.loss_type`", "adds `sft` with this weight; of `simpo` as `cpo_alpha`"
    if key in tables["losses"].split():
        return "`task`", "`orpo` and `simpo` as the task, others as `preference.loss_type`"
    for group in tables["ignored"]:
        if key in group["keys"].split():
            return group["level"], group["reason"]
    if key in tables["reference_models"].split():
        return "info", f"no effect if it is the model that is trained: {tables['refused'][key]}"
    if key in tables["refused"]:
        return "refused", tables["refused"][key]
    return None


def is_read(method: str) -> bool:
    """Return whether a method of ``methods.yaml`` is one of Paceline's tasks."""
    return method in _tables()["tasks"]


class _PreferenceReader:
    """Converts the keys of preference training for a task."""

    def __init__(self, merge: Merge, task: str) -> None:
        self.merge, self.task = merge, task
        self.tables = _tables()
        self.names = {binding.entry.name for binding in merge.methods}

    def read(self, chosen_by: KeyBinding | None = None) -> None:
        """Convert all keys. ``chosen_by``: the first one, if the keys have determined the task."""
        bindings, self.merge.methods = self.merge.methods, []
        for binding in bindings:
            notices = []
            if binding is chosen_by:
                text = f"these keys belong to {self.task}, so the task is `{self.task}`"
                notices.append(("info", text))
            if binding.entry.name not in DATA_KEYS:
                self._convert(binding, notices)
            if binding.entry.name in ("rl", "rlhf_type") and self.task == "simpo":
                self._use_trl_default(binding)
        self._read_packing()

    def _read_packing(self) -> None:
        """Pack the answers of a micro-batch if another tool packs rows, which would separate the
        answers of a pair. Texts of reward models are padded."""
        targets, notice = {"train_args.packing_strategy"}, _PACKED_PAIRS
        if self.task == "reward":
            targets, notice = targets | {"train_args.packing"}, _PADDED
        for line in self.merge.lines:
            dropped = [
                assigned
                for assigned in line.assigned
                if assigned.target in targets and (assigned.weak or assigned.value is True)
            ]
            if dropped:
                line.assigned = [item for item in line.assigned if item not in dropped]
                line.notices = (notice,)
                for assigned in dropped:
                    self.merge.assigned.remove(assigned)

    def _use_trl_default(self, binding: KeyBinding) -> None:
        """Use TRL's default of `cpo_alpha`, as the tools do that train with TRL."""
        weak = Assignment("preference.cpo_alpha", 1.0, binding.entry, weak=True)
        self.merge.add_assignment(weak)
        text = "this tool also trains the cross entropy, unless `cpo_alpha` is 0"
        self.merge.lines.append(SourceLine(binding, [weak], (("info", text),)))

    def _convert(self, binding: KeyBinding, notices: list[Notice]) -> None:
        entry, name = binding.entry, binding.entry.name
        if _name(binding) is not None:
            self._set(binding, self._named(str(_name(binding))), notices)
        elif name in self.tables["losses"].split():
            self._convert_loss(binding, notices)
        elif name in self.tables["cross_entropy_weights"].split():
            self._convert_weight(binding, notices)
        elif name in self.tables["keys"]:
            if name == "loss_type" and self.task in ("orpo", "simpo"):
                self.merge.lines.append(SourceLine(binding, [], (*notices, ("info", ""))))
                return
            self._set(binding, {self.tables["keys"][name]: entry.value}, notices)
        elif (ignored := self._ignored(name)) is not None:
            self.merge.lines.append(SourceLine(binding, [], (*notices, ignored)))
        elif is_off(entry.value) or (name == "ld_alpha" and entry.value == 1):
            self.merge.lines.append(SourceLine(binding, [], tuple(notices)))
        elif self._is_trained_model(name, entry.value):
            text = "the reference is the model before training"
            self.merge.lines.append(SourceLine(binding, [], (*notices, ("info", text))))
        else:
            reason = self.tables["refused"].get(name)
            text = f"it is not supported with `task: {self.task}`"
            self._refuse(binding, text if reason is None else f"{text}: {reason}")

    def _named(self, method: str) -> dict[str, str]:
        """Return what the name of a method sets."""
        return {**self.tables["tasks"][method], "task": self.task}

    def _convert_loss(self, binding: KeyBinding, notices: list[Notice]) -> None:
        value = str(binding.entry.value)
        if value == self.task:
            self._set(binding, {"task": self.task}, notices)
        elif value in ("sigmoid", "hinge", "ipo") and self.task == "dpo":
            if value == "ipo":
                text = "Paceline's `ipo` divides by the number of tokens, as TRL's does"
                notices.append(("warning", text))
            self._set(binding, {"preference.loss_type": [value]}, notices)
        elif not (value == "sigmoid" and self.task == "kto"):
            target = "task" if value in ("orpo", "simpo") else None
            self._refuse(binding, "this loss is not supported", target)

    def _convert_weight(self, binding: KeyBinding, notices: list[Notice]) -> None:
        weight = binding.entry.value
        if is_off(weight):
            self.merge.lines.append(SourceLine(binding, [], tuple(notices)))
        elif self.task == "simpo":
            self._set(binding, {"preference.cpo_alpha": weight}, [*notices, _DIFFERENT_MEAN])
        elif self.task == "dpo" and not self.names & {"loss_type", "pref_loss", "loss_weights"}:
            sets = {
                "preference.loss_type": ["sigmoid", "sft"],
                "preference.loss_weights": [1.0, weight],
            }
            self._set(binding, sets, [*notices, _DIFFERENT_MEAN])
        elif self.task == "dpo" and "loss_weights" not in self.names:
            self._add_term(binding, weight, notices)
        else:
            self._refuse(binding, f"it is not supported with `task: {self.task}`")

    def _add_term(self, binding: KeyBinding, weight: Any, notices: list[Notice]) -> None:
        """Add the cross entropy to the loss that another key sets."""
        for assigned in self.merge.assigned:
            if assigned.target == "preference.loss_type":
                losses = assigned.value if isinstance(assigned.value, list) else [assigned.value]
                if "sft" not in losses:
                    assigned.value = [*losses, "sft"]
                    weights = [*(1.0 for _ in losses), weight]
                    self._set(
                        binding, {"preference.loss_weights": weights}, [*notices, _DIFFERENT_MEAN]
                    )
                    return
        self._refuse(binding, "set `preference.loss_type` and `preference.loss_weights` instead")

    def _is_trained_model(self, name: str, value: Any) -> bool:
        """Return whether a key names the model that is trained as the reference model."""
        return name in self.tables["reference_models"].split() and any(
            assigned.target == "model" and assigned.value == value
            for assigned in self.merge.assigned
        )

    def _ignored(self, name: str) -> Notice | None:
        for group in self.tables["ignored"]:
            if name in group["keys"].split():
                return group["level"], group["reason"]
        return None

    def _set(
        self, binding: KeyBinding, sets: Mapping[str, YamlValue], notices: list[Notice]
    ) -> None:
        leaves = []
        for target, value in sets.items():
            assigned = Assignment(target, value, binding.entry)
            self.merge.add_assignment(assigned)
            leaves.append(assigned)
        self.merge.lines.append(SourceLine(binding, leaves, tuple(notices)))

    def _refuse(self, binding: KeyBinding, why: str, target: str | None = None) -> None:
        what = f"{binding.entry.shown()} ({short(binding.entry.value)}): {why}"
        self.merge.problems.append(
            Problem(what, "unsupported-value", binding.entry, fix=_FIX, target=target)
        )
