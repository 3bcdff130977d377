"""What can only be decided once all keys are known: keys of other tools that act on another key,
and keys that exclude each other when they come from the file and from an override."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import UnsupportedValue
from paceline.config.compat.datasets import limit, with_fields
from paceline.config.compat.llamafactory import FILE, in_folder
from paceline.config.compat.merge import RESET, Assignment, Merge
from paceline.config.compat.precision import resolve_precision
from paceline.config.compat.values import split_beside_all
from paceline.config.entries import OVERRIDE, Problem, short
from paceline.config.schema.lora import ALL_LINEAR
from paceline.config.schema.train_args import TrainArgs
from paceline.config.yaml_read import YamlValue

Notices = list[tuple[str, str]]
_T = "train_args."


def resolve_conflicts(merge: Merge) -> Notices:
    """Apply the ``_`` targets and the exclusions to ``merge.winners``. Returns notices beyond those
    of single keys."""
    notices: Notices = []
    _default_dataset_dir(merge, notices)
    for name, act in _ACTS.items():
        winner = merge.winners.pop(name, None)
        if winner is not None and winner.value is not RESET:
            try:
                level, words = act(merge, winner)
            except UnsupportedValue as error:
                merge.problems.append(
                    Problem(f"{winner.entry.shown()}: {error.why}", winner.entry, fix=error.fix)
                )
                continue
            for line in merge.lines:
                if any(one is winner for one in line.assigned):
                    line.resolved.append((level, words))
    resolve_precision(merge)
    _exclusive(merge, notices)
    _warmup(merge, notices)
    _lora(merge, notices)
    return notices


def _set(merge: Merge, target: str, value: Any, by: Assignment) -> None:
    merge.winners[target] = Assignment(target, value, by.entry)


def _higher(merge: Merge, target: str, by: Assignment) -> bool:
    layer = merge.layer_of(target)
    return layer is not None and layer > by.entry.layer


# -- keys that act on another


def _target_linear(merge: Merge, by: Assignment) -> tuple[str, str]:
    if _higher(merge, "lora.target_modules", by):
        return "info", "is overridden by the command line"
    named = merge.value_of("lora.target_modules")
    ends, _ = split_beside_all(named) if isinstance(named, list) else ([], [])
    _set(merge, "lora.target_modules", ALL_LINEAR, by)
    words = f"is read as `lora.target_modules: {ALL_LINEAR}`"
    return "info", "; ".join([words, _save_names(merge, ends, by)] if ends else [words])


def _target_regex(merge: Merge, by: Assignment) -> tuple[str, str]:
    if _higher(merge, "lora.target_modules", by):
        return "info", "is overridden by the command line"
    _set(merge, "lora.target_modules", by.value, by)
    return "info", f"is read as `lora.target_modules: {by.value}`"


def _save_in_full(merge: Merge, by: Assignment) -> tuple[str, str]:
    if _higher(merge, "lora.target_modules", by):
        return "info", "is overridden by the command line"
    return "info", _save_names(merge, by.value, by)


def _jinja(merge: Merge, by: Assignment) -> tuple[str, str]:
    """axolotl's `chat_template: jinja`, whose template another key holds."""
    if merge.value_of("chat_template") is None:
        raise UnsupportedValue(
            "`chat_template_jinja` is missing", "add it, with the template or the path of its file"
        )
    return "info", "is the template that `chat_template_jinja` holds"


def _save_names(merge: Merge, names: list[str], by: Assignment) -> str:
    """Add modules to those trained in full: embeddings and heads that are named beside all linear
    layers."""
    before = merge.value_of("lora.modules_to_save") or []
    saved = [*before, *(name for name in names if name not in before)]
    if before:
        # the key that names the others counts too
        merge.winners["lora.modules_to_save"].value = saved
    else:
        _set(merge, "lora.modules_to_save", saved, by)
    return (
        f"{', '.join(f'`{name}`' for name in names)} beside all linear layers:"
        f" `lora.modules_to_save: {short(saved)}`"
    )


def _save_strategy(merge: Merge, by: Assignment) -> tuple[str, str]:
    if by.value == "no":
        if _higher(merge, "train_args.save_steps", by):
            return "info", "is overridden by the command line"
        _set(merge, "train_args.save_steps", 0, by)
        return "info", "is read as `train_args.save_steps: 0`: one checkpoint, at the end"
    if by.value == "steps":
        return "info", "is how it is here: a checkpoint every `save_steps`"
    if by.value == "epoch" and not merge.value_of(f"{_T}max_steps"):
        given = (
            merge.winners.pop(f"{_T}save_steps")
            if merge.layer_of(f"{_T}save_steps") == by.entry.layer
            else None
        )
        level, words = _per_epoch(merge, by, f"{_T}save_steps", 1)
        return level, words + (
            f"; {given.entry.shown()} has no effect beside it" if given is not None else ""
        )
    return "warning", "checkpoints are written every `save_steps` steps, and at the end"


def _per_epoch(merge: Merge, by: Assignment, target: str, count: float) -> tuple[str, str]:
    """A number of times per epoch, as a share of all steps."""
    name = target.rpartition(".")[2]
    if _higher(merge, target, by):
        return "info", "is overridden by the command line"
    if merge.value_of(target) is not None:
        raise UnsupportedValue(
            f"`{name}` is given too, and both tell how often",
            f"keep one of `{by.entry.name}` and `{name}`",
        )
    epochs = merge.value_of(f"{_T}num_train_epochs")
    if not isinstance(epochs, int | float) or epochs <= 0:
        # where a number of steps ends the run, the other tool counts one epoch
        epochs = (
            1
            if merge.value_of(f"{_T}max_steps")
            else TrainArgs.model_fields["num_train_epochs"].default
        )
    times = count * epochs
    if times <= 1 or (name == "eval_steps" and count == 1):
        _set(merge, target, 0, by)
        return "info", f"is read as `{target}: 0`: at the end" + (
            " of each epoch" if name == "eval_steps" else " of the run"
        )
    _set(merge, target, 1 / times, by)
    share = f"`{target}: {short(round(1 / times, 6))}`, a share of all steps"
    return "info", f"is read as {share}: {short(count)} in each of {short(epochs)} epochs"


def _eval_strategy(merge: Merge, by: Assignment) -> tuple[str, str]:
    if by.value == "steps":
        return (
            "info",
            "is how it is here: evaluation every `eval_steps`, where there is validation data",
        )
    if by.value == "epoch":
        if _higher(merge, "train_args.eval_steps", by):
            return "info", "is overridden by the command line"
        _set(merge, "train_args.eval_steps", 0, by)
        return "info", "is read as `train_args.eval_steps: 0`: at the end of each epoch"
    given = merge.value_of("val_dataset") is not None or bool(merge.value_of("split_dataset_ratio"))
    if given:
        return "warning", "validation data is given, so it is run; leave it out to save the time"
    return "info", "is how it is here without validation data"


def _each_source(
    merge: Merge,
    by: Assignment,
    change: Callable[[list[Any]], list[Any]],
    same_layer: bool = True,
    key: str = "dataset",
) -> bool:
    """Change the sources of the training data; False where they come from another layer than the
    key."""
    data = merge.winners.get(key)
    if (
        data is None
        or data.value in (RESET, None)
        or (same_layer and data.entry.layer != by.entry.layer)
    ):
        return False
    listed = data.value if isinstance(data.value, list) else [data.value]
    new = change(listed)
    value = new if isinstance(data.value, list) else new[0]
    merge.winners[key] = Assignment(key, value, data.entry)
    return True


_OTHER_DATA = "is left out: it belongs to the dataset that an override has replaced"


def _dataset_dir(merge: Merge, by: Assignment) -> tuple[str, str]:
    before = merge.value_of("dataset")
    notes: list[str] = []

    def change(listed: list[Any]) -> list[Any]:
        return in_folder(listed, str(by.value), merge.value_of("task") == "pretrain", notes)

    if not _each_source(merge, by, change):
        return "info", _OTHER_DATA
    _each_source(merge, by, change, key="val_dataset")
    after = merge.value_of("dataset")
    if by.value == "ONLINE":
        return "info", "the datasets are hub ids"
    if after == before:
        return "info", "holds no file of these datasets' names; they are taken as paths or hub ids"
    return "warning" if notes else "info", "; ".join(
        [f"gives `dataset: {short(after)}`", *dict.fromkeys(notes)]
    )


def _default_dataset_dir(merge: Merge, notices: Notices) -> None:
    """LLaMA-Factory looks for its datasets in `data/` if a file does not name the folder."""
    data = merge.winners.get("dataset")
    table = Path("data") / FILE
    is_theirs = merge.scores["l"] > 0 and merge.scores["l"] == max(merge.scores.values())
    if "_dataset_dir" in merge.winners or data is None or not is_theirs or not table.is_file():
        return
    try:
        level, words = _dataset_dir(merge, Assignment("_dataset_dir", "data", data.entry))
    except UnsupportedValue as error:
        merge.problems.append(
            Problem(f"{data.entry.shown()}: {error.why}", data.entry, fix=error.fix)
        )
    else:
        notices.append((level, f"{table}, LLaMA-Factory's default, {words}"))


def _max_samples(merge: Merge, by: Assignment) -> tuple[str, str]:
    number = by.value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UnsupportedValue(
            f"{short(number)} is not a number of samples", "give a whole number of at least 1"
        )
    _each_source(merge, by, lambda listed: limit(listed, number), same_layer=False)
    _each_source(merge, by, lambda listed: limit(listed, number), key="val_dataset")
    return "info", f"is read as `path#{number}` for each source: {short(merge.value_of('dataset'))}"


def _field(name: str) -> Callable[[Merge, Assignment], tuple[str, str]]:
    def act(merge: Merge, by: Assignment) -> tuple[str, str]:
        if name == "text":
            if by.value == "text":
                return "info", "is the usual name here too"
            fields: dict[str, YamlValue] = {"columns": {"text": by.value}, "format": "text"}
        else:
            fields = {name: by.value}
        if not _each_source(merge, by, lambda listed: with_fields(listed, fields)):
            return "info", _OTHER_DATA
        return "info", f"is read as {short(fields)} of each source"

    return act


def _test_split(merge: Merge, by: Assignment) -> tuple[str, str]:
    data = merge.winners.get("dataset")
    if data is None or data.entry.layer != by.entry.layer:
        return "info", _OTHER_DATA
    if merge.value_of("val_dataset") is not None or merge.value_of("split_dataset_ratio"):
        return "info", "is overridden by the validation data given beside it"
    listed = data.value if isinstance(data.value, list) else [data.value]
    split = [
        {**({"path": one} if isinstance(one, str) else one), "split": by.value} for one in listed
    ]
    _set(merge, "val_dataset", split, by)
    return "info", f"is read as `val_dataset: {short(split)}`"


def _listed_splits(merge: Merge, by: Assignment) -> tuple[str, str]:
    """alignment-handbook's `dataset_splits`: of each source, the splits with `train` in their name
    train, those with `test` evaluate."""
    named = [str(one) for one in (by.value if isinstance(by.value, list) else [by.value])]
    train = [one for one in named if "train" in one]
    test = [one for one in named if "test" in one]
    if not train or len(train) + len(test) < len(named):
        raise UnsupportedValue(
            f"{short(named)}: a split is for training if its name has `train`, and for evaluation"
            " if it has `test`",
            "name the split of each source: `dataset: [{path: ..., split: ...}]`",
        )
    before = merge.winners.get("dataset")

    def change(splits: list[str]) -> Callable[[list[Any]], list[Any]]:
        return lambda listed: [
            one for split in splits for one in with_fields(listed, {"split": split})
        ]

    if before is None or not _each_source(merge, by, change(train)):
        return "info", _OTHER_DATA
    words = f"is read as the split of each source: {short(merge.value_of('dataset'))}"
    if test and merge.value_of("val_dataset") is None and not merge.value_of("split_dataset_ratio"):
        listed = before.value if isinstance(before.value, list) else [before.value]
        _set(merge, "val_dataset", change(test)(listed), by)
        words += f", and `val_dataset: {short(merge.value_of('val_dataset'))}`"
    return "info", words


def _listed_configs(merge: Merge, by: Assignment) -> tuple[str, str]:
    """alignment-handbook's `dataset_configs`: one name for each source, in order."""
    names = by.value if isinstance(by.value, list) else [by.value]
    data = merge.value_of("dataset")
    count = len(data) if isinstance(data, list) else 1
    if len(names) != count:
        raise UnsupportedValue(
            f"{len(names)} names for {count} sources", "give one name for each source"
        )

    def change(listed: list[Any]) -> list[Any]:
        return [
            with_fields([one], {"name": name})[0] for one, name in zip(listed, names, strict=True)
        ]

    if not _each_source(merge, by, change):
        return "info", _OTHER_DATA
    return "info", f"is read as the `name` of each source: {short(merge.value_of('dataset'))}"


_ACTS: dict[str, Callable[[Merge, Assignment], tuple[str, str]]] = {
    "_target_linear": _target_linear,
    "_target_regex": _target_regex,
    "_save_in_full": _save_in_full,
    "_jinja": _jinja,
    "_save_strategy": _save_strategy,
    "_saves_per_epoch": lambda merge, by: _per_epoch(merge, by, f"{_T}save_steps", by.value),
    "_evals_per_epoch": lambda merge, by: _per_epoch(merge, by, f"{_T}eval_steps", by.value),
    "_dataset_dir": _dataset_dir,
    "_listed_configs": _listed_configs,
    "_listed_splits": _listed_splits,
    "_name": _field("name"),
    "_test_split": _test_split,
    "_split": _field("split"),
    "_text_field": _field("text"),
    "_max_samples": _max_samples,
    "_eval_strategy": _eval_strategy,
}


# -- keys that exclude each other

#: (key given by an override, key of the file that would beat or contradict it, when)
_EXCLUSIVE: list[tuple[str, str, Callable[[Any], bool]]] = [
    (f"{_T}warmup_ratio", f"{_T}warmup_steps", lambda value: True),
    (f"{_T}num_train_epochs", f"{_T}max_steps", lambda value: True),
    ("val_dataset", "split_dataset_ratio", lambda value: value is not None),
    ("split_dataset_ratio", "val_dataset", bool),
]


def _exclusive(merge: Merge, notices: Notices) -> None:
    for key, other, when in _EXCLUSIVE:
        winner, beaten = merge.winners.get(key), merge.winners.get(other)
        if (
            winner is None
            or beaten is None
            or winner.value is RESET
            or beaten.value is RESET
            or not when(winner.value)
        ):
            continue
        if winner.entry.layer == OVERRIDE > beaten.entry.layer and beaten.value not in (
            None,
            False,
            0,
            -1,
        ):
            if not any(line.binding.entry is beaten.entry for line in merge.lines):
                words = (
                    f"{beaten.entry.shown()} ({beaten.entry.place()}) is overridden by"
                    f" {winner.entry.shown()}"
                )
                notices.append(("info", words))
            merge.winners[other] = Assignment(other, RESET, winner.entry)


def _warmup(merge: Merge, notices: Notices) -> None:
    steps, share = merge.winners.get(f"{_T}warmup_steps"), merge.value_of(f"{_T}warmup_ratio")
    if steps is not None and steps.value == 0 and steps.value is not False and share:
        # transformers' rule, under whose names both stand: a number of steps counts where it is
        # more than 0
        notices.append(
            ("info", f"`warmup_steps: 0` is overridden by `warmup_ratio: {short(share)}`")
        )
        merge.winners[f"{_T}warmup_steps"] = Assignment(f"{_T}warmup_steps", RESET, steps.entry)


def _lora(merge: Merge, notices: Notices) -> None:
    """Say, or settle, what keys of LoRA mean in a config that does not say whether it trains
    LoRA."""
    given = [
        one
        for target, one in merge.winners.items()
        if target.startswith("lora.") and one.value is not RESET
    ]
    if "lora.enable" in merge.winners or not given:
        return
    first = given[0].entry
    name = first.name.split(".")[-1]
    if (
        merge.foreign
        and name.startswith(("lora_", "target_modules"))
        and max(merge.scores["s"], merge.scores["l"]) > max(merge.scores["a"], merge.scores["t"])
    ):
        _set(merge, "lora.enable", True, given[0])
        text = (
            f"{first.shown()} is given and no method: `lora.enable: true`, which is what the tool"
            " it comes from does"
        )
        notices.append(("info", text))
    else:
        notices.append(
            (
                "warning",
                f"{first.shown()} is given but `lora.enable` is not true: all weights are trained",
            )
        )
