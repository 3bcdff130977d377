"""Read configs of other tools for preference training and reinforcement learning: which task they
request, and the keys of preference training.

Most configs of TRL do not name their method, because the script that reads them chooses the
trainer. The method is then the only one that has most of the keys.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypedDict

from paceline.config.compat.binding import KeyBinding, likely_methods
from paceline.config.compat.conversion import is_off, read_table
from paceline.config.compat.keys import DATA_KEYS, named_method, task_of_method
from paceline.config.compat.merge import Merge
from paceline.config.compat.rollouts import RolloutReader
from paceline.config.entries import Notice, Problem, short
from paceline.config.schema.tasks import ANSWER_TASKS, ROLLOUT_TASKS
from paceline.config.settings import Assignment
from paceline.config.yaml_read import YamlValue
from paceline.core.texts import UserText

_DIFFERENT_MEAN: Notice = (
    "warning",
    "the cross entropy is averaged over the tokens of a batch, not over its answers",
)
_PACKED_PAIRS: Notice = (
    "warning",
    "the batch size counts samples, and the answers of a micro-batch share a row without padding",
)
_PADDED: Notice = ("info", "the texts of a micro-batch are padded, with the same results")
_Sets = Mapping[str, YamlValue]
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


def read_methods(merge: Merge) -> None:
    """Choose the task of a config with keys of preference training or of reinforcement learning,
    and convert these keys. Called before precedence is resolved. Does nothing if the config
    requests another task, a method that is not supported, or none of several methods that have the
    same keys: names of runs and folders are not read."""
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
        if all(map(task_of_method, methods)):
            _reader(merge, _task_of(merge, methods)).read()
    elif task is not None:
        if task.value in (*ANSWER_TASKS, *ROLLOUT_TASKS):
            _reader(merge, task.value).read()
    elif merge.methods:
        methods = set(likely_methods(merge.methods))
        task_name = task_of_method(min(methods)) if len(methods) == 1 else None
        if task_name is not None:
            first = merge.methods[0]
            merge.assigned.append(Assignment("task", task_name, first.entry, weak=True))
            _reader(merge, task_name).read(chosen_by=first)


def _reader(merge: Merge, task: str) -> "_PreferenceReader | RolloutReader":
    return (RolloutReader if task in ROLLOUT_TASKS else _PreferenceReader)(merge, task)


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
    return str(task_of_method(min(methods)))


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
    if (ignored := _ignored(key)) is not None:
        return ignored
    if key in tables["reference_models"].split():
        return "info", f"no effect if it is the model that is trained: {tables['refused'][key]}"
    if key in tables["refused"]:
        return "refused", tables["refused"][key]
    return None


def _ignored(key: str) -> Notice | None:
    for group in _tables()["ignored"]:
        if key in group["keys"].split():
            return group["level"], group["reason"]
    return None


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
                sets = self._convert(binding, notices)
                if sets is not None:
                    self._set(binding, sets, notices)
            if binding.entry.name in ("rl", "rlhf_type") and self.task == "simpo":
                # As the tools that train with TRL, use its default of `cpo_alpha`.
                text = "this tool also trains the cross entropy, unless `cpo_alpha` is 0"
                sets = {"preference.cpo_alpha": 1.0}
                self._set(replace(binding, resolved=[]), sets, [("info", text)], weak=True)
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
                line.notices = [notice]
                for assigned in dropped:
                    self.merge.assigned.remove(assigned)

    def _convert(self, binding: KeyBinding, notices: list[Notice]) -> _Sets | None:
        """Return what a key sets, and add the notices about it; None if there is nothing to report,
        or if it is refused."""
        name, value, method = binding.entry.name, binding.entry.value, _name(binding)
        if method is not None:
            return {**self.tables["tasks"][method], "task": self.task}
        if name in self.tables["losses"].split():
            return self._convert_loss(binding, notices)
        if name in self.tables["cross_entropy_weights"].split():
            return self._convert_weight(binding, notices)
        if name in self.tables["keys"]:
            if name != "loss_type" or self.task not in ("orpo", "simpo"):
                return {self.tables["keys"][name]: value}
            notices.append(("info", ""))
        elif (ignored := _ignored(name)) is not None:
            notices.append(ignored)
        elif is_off(value) or (name == "ld_alpha" and value == 1):
            pass
        elif self._is_trained_model(name, value):
            notices.append(("info", "the reference is the model before training"))
        else:
            reason = self.tables["refused"].get(name)
            return self._refuse(binding, self._unsupported + (f": {reason}" if reason else ""))
        return {}

    @property
    def _unsupported(self) -> str:
        return f"it is not supported with `task: {self.task}`"

    def _convert_loss(self, binding: KeyBinding, notices: list[Notice]) -> _Sets | None:
        value = str(binding.entry.value)
        if value == self.task:
            return {"task": self.task}
        if value in ("sigmoid", "hinge", "ipo") and self.task == "dpo":
            if value == "ipo":
                text = "Paceline's `ipo` divides by the number of tokens, as TRL's does"
                notices.append(("warning", text))
            return {"preference.loss_type": [value]}
        if value == "sigmoid" and self.task == "kto":
            return None
        target = "task" if value in ("orpo", "simpo") else None
        return self._refuse(binding, "this loss is not supported", target)

    def _convert_weight(self, binding: KeyBinding, notices: list[Notice]) -> _Sets | None:
        """Return the weight of the cross entropy, or add it to the loss that another key sets."""
        weight = binding.entry.value
        if is_off(weight):
            return {}
        if self.task not in ("simpo", "dpo") or (
            self.task == "dpo" and "loss_weights" in self.names
        ):
            return self._refuse(binding, self._unsupported)
        notices.append(_DIFFERENT_MEAN)
        if self.task == "simpo":
            return {"preference.cpo_alpha": weight}
        if not self.names & {"loss_type", "pref_loss"}:
            return {
                "preference.loss_type": ["sigmoid", "sft"],
                "preference.loss_weights": [1.0, weight],
            }
        for assigned in self.merge.assigned:
            if assigned.target == "preference.loss_type":
                losses = assigned.value if isinstance(assigned.value, list) else [assigned.value]
                if "sft" not in losses:
                    assigned.value = [*losses, "sft"]
                    return {"preference.loss_weights": [*(1.0 for _ in losses), weight]}
        fix = "set `preference.loss_type` and `preference.loss_weights` instead"
        return self._refuse(binding, fix)

    def _is_trained_model(self, name: str, value: Any) -> bool:
        """Return whether a key names the model that is trained as the reference model."""
        return name in self.tables["reference_models"].split() and any(
            assigned.target == "model" and assigned.value == value
            for assigned in self.merge.assigned
        )

    def _set(
        self, binding: KeyBinding, sets: _Sets, notices: list[Notice], weak: bool = False
    ) -> None:
        assigned = [Assignment(*item, binding.entry, weak) for item in sets.items()]
        self.merge.assigned += assigned
        self.merge.report(binding, assigned, notices)

    def _refuse(self, binding: KeyBinding, why: str, target: str | None = None) -> _Sets | None:
        shown = f"{binding.entry.shown()} ({short(binding.entry.value)})"
        what = UserText("{shown}: {why}", code="unsupported-value", shown=shown, why=why)
        self.merge.problems.append(Problem(what, binding.entry, fix=_FIX, target=target))
        return None
