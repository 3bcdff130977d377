"""Resolve what depends on several keys: keys of other tools that act on another key, and keys that
exclude each other when one comes from the file and one from an override."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

from paceline.config.compat import parameters
from paceline.config.compat.conversion import Notice, UnsupportedValue
from paceline.config.compat.datasets import limit, with_fields, with_shares
from paceline.config.compat.llamafactory import FILE, in_folder
from paceline.config.compat.merge import RESET, Assignment, Merge
from paceline.config.compat.precision import resolve_precision
from paceline.config.compat.values import split_beside_all
from paceline.config.entries import OVERRIDE, Problem, quoted_names, short
from paceline.config.schema.base import Logger
from paceline.config.schema.lora import ALL_LINEAR
from paceline.config.schema.train_args import TrainArgs
from paceline.config.yaml_read import YamlValue

_Action = Callable[[Merge, Assignment], Notice]
#: The keys whose value on the command line overrides an action of the file.
_TARGETS = {
    "_target_linear": "lora.target_modules",
    "_target_regex": "lora.target_modules",
    "_save_in_full": "lora.target_modules",
    "_saves_per_epoch": "train_args.save_steps",
    "_evals_per_epoch": "train_args.eval_steps",
}
_OVERRIDDEN: Notice = ("info", "is overridden by the command line")
_OTHER_DATA: Notice = (
    "info",
    "is ignored: it belongs to the dataset that an override has replaced",
)


def resolve_conflicts(merge: Merge) -> list[Notice]:
    """Apply the ``_`` targets and the exclusions to ``merge.winners``. Returns the notices that do
    not belong to a single key."""
    notices: list[Notice] = []
    _default_dataset_dir(merge, notices)
    for name, act in _ACTIONS.items():
        winner = merge.winners.pop(name, None)
        if winner is None or winner.value is RESET:
            continue
        notice = _run(merge, winner, act)
        for line in merge.lines:
            if notice and any(assigned is winner for assigned in line.assigned):
                line.resolved.append(notice)
    _exclusive(merge, notices)
    _warmup(merge, notices)
    _lora(merge, notices)
    resolve_precision(merge)  # depends on whether LoRA is used
    return notices


def _run(merge: Merge, by: Assignment, act: _Action) -> Notice | None:
    """Run an action. An unsupported value becomes a problem."""
    target = _TARGETS.get(by.target)
    if target and _is_overridden(merge, target, by):
        return _OVERRIDDEN
    try:
        return act(merge, by)
    except UnsupportedValue as error:
        what = f"{by.entry.shown()}: {error.why}"
        merge.problems.append(Problem(what, by.entry, fix=error.fix))
        return None


def _set(merge: Merge, target: str, value: Any, by: Assignment) -> None:
    merge.winners[target] = Assignment(target, value, by.entry)


def _is_overridden(merge: Merge, target: str, by: Assignment) -> bool:
    layer = merge.layer_of(target)
    return layer is not None and layer > by.entry.layer


# -- keys that act on another


def _target_linear(merge: Merge, by: Assignment) -> Notice:
    named = merge.value_of("lora.target_modules")
    ends, _ = split_beside_all(named) if isinstance(named, list) else ([], [])
    _set(merge, "lora.target_modules", ALL_LINEAR, by)
    text = f"is read as `lora.target_modules: {ALL_LINEAR}`"
    return "info", f"{text}; {_save_names(merge, ends, by)}" if ends else text


def _target_regex(merge: Merge, by: Assignment) -> Notice:
    _set(merge, "lora.target_modules", by.value, by)
    return "info", f"is read as `lora.target_modules: {by.value}`"


def _jinja(merge: Merge, by: Assignment) -> Notice:
    """Check axolotl's `chat_template: jinja`, whose template is in another key."""
    if merge.value_of("chat_template") is None:
        raise UnsupportedValue(
            "`chat_template_jinja` is missing", "add it, with the template or the path of its file"
        )
    return "info", "is the template in `chat_template_jinja`"


def _regression(merge: Merge, by: Assignment) -> Notice:
    """Check ms-swift's `num_labels: 1`, which is regression if the task is not a reward model."""
    if merge.value_of("task") == "classify":
        raise UnsupportedValue(
            "one label is regression, which is not supported",
            "use the tool this config was written for, or remove the key to train with classes",
        )
    return "info", "is ignored: the task determines the number of labels"


def _save_names(merge: Merge, names: list[str], by: Assignment) -> str:
    """Add embeddings and heads that are named in addition to all linear layers to the modules
    trained in full."""
    before = merge.value_of("lora.modules_to_save") or []
    saved = [*before, *(name for name in names if name not in before)]
    if before:
        # Keep the entry of the key that names the others.
        merge.winners["lora.modules_to_save"].value = saved
    else:
        _set(merge, "lora.modules_to_save", saved, by)
    return (
        f"{quoted_names(names)} in addition to all linear layers:"
        f" `lora.modules_to_save: {short(saved)}`"
    )


def _save_strategy(merge: Merge, by: Assignment) -> Notice:
    if by.value == "no":
        if _is_overridden(merge, "train_args.save_steps", by):
            return _OVERRIDDEN
        _set(merge, "train_args.save_steps", 0, by)
        return "info", "is read as `train_args.save_steps: 0`: one checkpoint, at the end"
    if by.value == "steps":
        return "info", "is the default: a checkpoint every `save_steps`"
    if by.value == "best":
        _set(merge, "train_args.save_best", True, by)
        if not _is_overridden(merge, "train_args.save_steps", by):
            _set(merge, "train_args.save_steps", 0, by)
        return "info", "is read as `train_args.save_best: true` and `train_args.save_steps: 0`"
    if by.value == "epoch" and not merge.value_of("train_args.max_steps"):
        save_steps = None
        if merge.layer_of("train_args.save_steps") == by.entry.layer:
            save_steps = merge.winners.pop("train_args.save_steps")
        if _is_overridden(merge, "train_args.save_steps", by):
            return _OVERRIDDEN
        level, text = _per_epoch(merge, by, "train_args.save_steps", 1)
        unused = f"; {save_steps.entry.shown()} has no effect" if save_steps else ""
        return level, text + unused
    return "warning", "checkpoints are written every `save_steps` steps, and at the end"


def _per_epoch(merge: Merge, by: Assignment, target: str, count: float | None = None) -> Notice:
    """Convert a number of times per epoch (default: the key's value) to a fraction of all steps."""
    name = target.rpartition(".")[2]
    count = by.value if count is None else count
    if merge.value_of(target) is not None:
        raise UnsupportedValue(
            f"`{name}` is set too, and both choose the interval",
            f"keep one of `{by.entry.name}` and `{name}`",
        )
    epochs = merge.value_of("train_args.num_train_epochs")
    if not isinstance(epochs, int | float) or epochs <= 0:
        # If the run ends after a number of steps, the other tool counts one epoch.
        has_max_steps = merge.value_of("train_args.max_steps")
        epochs = 1 if has_max_steps else TrainArgs.model_fields["num_train_epochs"].default
    times = count * epochs
    if times <= 1 or (name == "eval_steps" and count == 1):
        _set(merge, target, 0, by)
        place = "each epoch" if name == "eval_steps" else "the run"
        return "info", f"is read as `{target}: 0`: at the end of {place}"
    _set(merge, target, 1 / times, by)
    fraction = f"`{target}: {short(round(1 / times, 6))}`, a fraction of all steps"
    return "info", f"is read as {fraction}: {short(count)} in each of {short(epochs)} epochs"


def _use_logger(merge: Merge, by: Assignment, name: str) -> Notice:
    """Add a logger to `report_to`, for keys that turn on one of them."""
    if _is_overridden(merge, "report_to", by):
        return _OVERRIDDEN
    names = list(merge.value_of("report_to") or [])
    if by.value is True and name not in names:
        names.append(name)
        _set(merge, "report_to", names, by)
    return "info", f"is read as `report_to: {short(names)}`"


def _eval_strategy(merge: Merge, by: Assignment) -> Notice:
    if by.value == "steps":
        return "info", "is the default: evaluation every `eval_steps`, with validation data"
    if by.value == "epoch":
        if _is_overridden(merge, "train_args.eval_steps", by):
            return _OVERRIDDEN
        _set(merge, "train_args.eval_steps", 0, by)
        return "info", "is read as `train_args.eval_steps: 0`: at the end of each epoch"
    if _has_validation_data(merge):
        return "warning", "evaluation runs on the validation data; remove the data to skip it"
    return "info", "is the default without validation data"


def _has_validation_data(merge: Merge) -> bool:
    return merge.value_of("val_dataset") is not None or bool(merge.value_of("split_dataset_ratio"))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _change_sources(
    merge: Merge,
    by: Assignment,
    change: Callable[[list[Any]], list[Any]],
    any_layer: bool = False,
    key: str = "dataset",
) -> bool:
    """Change the data sources; return False if they come from another layer than the key."""
    data = merge.winners.get(key)
    if (
        data is None
        or data.value in (RESET, None)
        or (data.entry.layer != by.entry.layer and not any_layer)
    ):
        return False
    sources = change(_as_list(data.value))
    value = sources if isinstance(data.value, list) else sources[0]
    merge.winners[key] = Assignment(key, value, data.entry)
    return True


def _dataset_dir(merge: Merge, by: Assignment) -> Notice:
    before = merge.value_of("dataset")
    notes: list[str] = []

    def change(sources: list[Any]) -> list[Any]:
        return in_folder(sources, str(by.value), merge.value_of("task") or "sft", notes)

    if not _change_sources(merge, by, change):
        return _OTHER_DATA
    _change_sources(merge, by, change, key="val_dataset")
    after = merge.value_of("dataset")
    if by.value == "ONLINE":
        return "info", "the datasets are hub ids"
    if after == before:
        return "info", "has no files with these names; the datasets are read as paths or hub ids"
    text = "; ".join([f"gives `dataset: {short(after)}`", *dict.fromkeys(notes)])
    return "warning" if notes else "info", text


def _default_dataset_dir(merge: Merge, notices: list[Notice]) -> None:
    """Use `data/` as LLaMA-Factory does if its config does not set `dataset_dir`."""
    data = merge.winners.get("dataset")
    table = Path("data") / FILE
    is_llama_factory = 0 < merge.scores["l"] == max(merge.scores.values())
    if "_dataset_dir" in merge.winners or not is_llama_factory:
        return
    if data is not None and table.is_file():
        notice = _run(merge, Assignment("_dataset_dir", "data", data.entry), _dataset_dir)
        if notice:
            notices.append((notice[0], f"{table}, LLaMA-Factory's default, {notice[1]}"))


def _max_samples(merge: Merge, by: Assignment) -> Notice:
    number = by.value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UnsupportedValue(
            f"{short(number)} is not a number of samples", "set a whole number of at least 1"
        )
    change = partial(limit, number=number)
    _change_sources(merge, by, change, any_layer=True)
    _change_sources(merge, by, change, key="val_dataset")
    return "info", f"is read as `path#{number}` for each source: {short(merge.value_of('dataset'))}"


def _set_field(merge: Merge, by: Assignment, name: str) -> Notice:
    fields: dict[str, YamlValue] = {name: by.value}
    if name == "text":
        if by.value == "text":
            return "info", "is the default"
        fields = {"columns": {"text": by.value}, "format": "text"}
    if not _change_sources(merge, by, partial(with_fields, fields=fields)):
        return _OTHER_DATA
    return "info", f"is read as {short(fields)} of each source"


def _test_split(merge: Merge, by: Assignment) -> Notice:
    data = merge.winners.get("dataset")
    if data is None or data.entry.layer != by.entry.layer:
        return _OTHER_DATA
    if _has_validation_data(merge):
        return "info", "is overridden by the validation data of the config"
    sources = [{**source, "split": by.value} for source in with_fields(_as_list(data.value), {})]
    _set(merge, "val_dataset", sources, by)
    return "info", f"is read as `val_dataset: {short(sources)}`"


def _listed_splits(merge: Merge, by: Assignment) -> Notice:
    """Apply alignment-handbook's `dataset_splits` to each source: splits with `train` in their name
    are for training, those with `test` for evaluation."""
    splits = [str(split) for split in _as_list(by.value)]
    train = [split for split in splits if "train" in split]
    test = [split for split in splits if "test" in split]
    if not train or len(train) + len(test) < len(splits):
        raise UnsupportedValue(
            f"{short(splits)}: a split is for training if its name contains `train`, and for"
            " evaluation if it contains `test`",
            "set the split of each source: `dataset: [{path: ..., split: ...}]`",
        )
    data = merge.winners.get("dataset")

    def with_splits(sources: list[Any], names: list[str]) -> list[Any]:
        return [source for name in names for source in with_fields(sources, {"split": name})]

    if data is None or not _change_sources(merge, by, partial(with_splits, names=train)):
        return _OTHER_DATA
    text = f"is read as the split of each source: {short(merge.value_of('dataset'))}"
    if test and not _has_validation_data(merge):
        _set(merge, "val_dataset", with_splits(_as_list(data.value), test), by)
        text += f", and `val_dataset: {short(merge.value_of('val_dataset'))}`"
    return "info", text


def _listed_configs(merge: Merge, by: Assignment) -> Notice:
    """Apply alignment-handbook's `dataset_configs`: one name for each source, in order."""
    names = _as_list(by.value)
    count = len(_as_list(merge.value_of("dataset")))
    if len(names) != count:
        raise UnsupportedValue(
            f"expected one name for each of {count} sources, got {len(names)}",
            "set one name for each source",
        )

    def change(sources: list[Any]) -> list[Any]:
        pairs = zip(with_fields(sources, {}), names, strict=True)
        return [{"name": name, **source} for source, name in pairs]

    if not _change_sources(merge, by, change):
        return _OTHER_DATA
    return "info", f"is read as the `name` of each source: {short(merge.value_of('dataset'))}"


def _interleave_probs(merge: Merge, by: Assignment) -> Notice:
    """Apply the probabilities of LLaMA-Factory and ms-swift as the weight of each source."""
    if by.entry.name == "interleave_probs" and merge.value_of("mixing") in (None, "concat"):
        return "info", "has no effect without `mix_strategy: interleave_...`"
    values = by.value.split(",") if isinstance(by.value, str) else _as_list(by.value)
    try:
        weights = [float(value) for value in values]
    except (TypeError, ValueError):
        raise UnsupportedValue(
            f"{short(by.value)} are not probabilities", "set one number for each source"
        ) from None
    count = len(_as_list(merge.value_of("dataset")))
    if len(weights) != count:
        raise UnsupportedValue(
            f"expected one probability for each of {count} sources, got {len(weights)}",
            "set one number for each source",
        )

    def change(sources: list[Any]) -> list[Any]:
        pairs = zip(with_fields(sources, {}), weights, strict=True)
        return [{**source, "weight": weight} for source, weight in pairs]

    if not _change_sources(merge, by, change):
        return _OTHER_DATA
    _set(merge, "mixing", "weights", by)
    return "info", f"is read as the `weight` of each source, with `mixing: weights`: {weights}"


def _shares(merge: Merge, by: Assignment) -> Notice:
    """Apply the weights of axolotl's sources as shares of their rows, unless they are mixed."""
    if merge.value_of("mixing") == "weights":
        return "info", "has the weights of `mixing: weights`"
    if not _change_sources(merge, by, with_shares):
        return _OTHER_DATA
    shown = short(merge.value_of("dataset"))
    return "info", f"is read with `weight` as the share of the rows that is used: {shown}"


def _packing_strategy(merge: Merge, by: Assignment) -> Notice:
    """Apply TRL's strategy, which has an effect only with `packing: true`."""
    if _is_overridden(merge, "train_args.packing_strategy", by):
        return _OVERRIDDEN
    if merge.value_of("train_args.packing") is not True:
        return "info", "has no effect without `packing: true`"
    _set(merge, "train_args.packing_strategy", by.value, by)
    return "info", f"is read as `train_args.packing_strategy: {by.value}`"


#: In this order, as some read what others set.
_ACTIONS: dict[str, _Action] = {
    "_target_linear": _target_linear,
    "_target_regex": _target_regex,
    "_save_in_full": lambda merge, by: ("info", _save_names(merge, by.value, by)),
    "_jinja": _jinja,
    "_regression": _regression,
    "_save_strategy": _save_strategy,
    "_saves_per_epoch": partial(_per_epoch, target="train_args.save_steps"),
    "_evals_per_epoch": partial(_per_epoch, target="train_args.eval_steps"),
    "_dataset_dir": _dataset_dir,
    "_listed_configs": _listed_configs,
    "_listed_splits": _listed_splits,
    "_name": partial(_set_field, name="name"),
    "_test_split": _test_split,
    "_split": partial(_set_field, name="split"),
    "_text_field": partial(_set_field, name="text"),
    "_max_samples": _max_samples,
    "_interleave_probs": _interleave_probs,
    "_shares": _shares,
    "_packing_strategy": _packing_strategy,
    "_eval_strategy": _eval_strategy,
    **parameters.ACTIONS,
    **{f"_use_{name}": partial(_use_logger, name=name) for name in get_args(Logger)},
}


# -- keys that exclude each other

#: (key set by an override, key of the file that it excludes, values that do not exclude it)
_EXCLUSIVE: list[tuple[str, str, tuple[YamlValue, ...]]] = [
    ("train_args.warmup_ratio", "train_args.warmup_steps", ()),
    ("train_args.num_train_epochs", "train_args.max_steps", ()),
    ("val_dataset", "split_dataset_ratio", (None,)),
    ("split_dataset_ratio", "val_dataset", (None, 0)),
]


def _exclusive(merge: Merge, notices: list[Notice]) -> None:
    for key, other, inert in _EXCLUSIVE:
        winner, excluded = merge.winners.get(key), merge.winners.get(other)
        if winner is None or winner.value in (RESET, *inert):
            continue
        if excluded is None or excluded.value in (RESET, None, False, 0, -1):
            continue
        if not winner.entry.layer == OVERRIDE > excluded.entry.layer:
            continue
        if not any(line.binding.entry is excluded.entry for line in merge.lines):
            place = f"{excluded.entry.shown()} ({excluded.entry.place()})"
            notices.append(("info", f"{place} is overridden by {winner.entry.shown()}"))
        _set(merge, other, RESET, winner)


def _warmup(merge: Merge, notices: list[Notice]) -> None:
    """Apply transformers' rule for its two keys: `warmup_steps` counts if it is more than 0."""
    steps = merge.winners.get("train_args.warmup_steps")
    ratio = merge.value_of("train_args.warmup_ratio")
    if steps is not None and steps.value == 0 and steps.value is not False and ratio:
        text = f"`warmup_steps: 0` is overridden by `warmup_ratio: {short(ratio)}`"
        notices.append(("info", text))
        _set(merge, "train_args.warmup_steps", RESET, steps)


def _lora(merge: Merge, notices: list[Notice]) -> None:
    """Enable LoRA, or warn, if a config has keys of LoRA but does not set `lora.enable`."""
    settings = [
        winner
        for target, winner in merge.winners.items()
        if target.startswith("lora.") and winner.value is not RESET
    ]
    if "lora.enable" in merge.winners or not settings:
        return
    entry, scores = settings[0].entry, merge.scores
    trains_lora = max(scores["s"], scores["l"]) > max(scores["a"], scores["t"])
    is_foreign_key = entry.name.split(".")[-1].startswith(("lora_", "target_modules"))
    if merge.foreign and is_foreign_key and trains_lora:
        _set(merge, "lora.enable", True, settings[0])
        text = (
            f"{entry.shown()} is set without a method: `lora.enable: true`, as in the tool that the"
            " config was written for"
        )
        notices.append(("info", text))
    else:
        text = f"{entry.shown()} is set but `lora.enable` is not true: all weights are trained"
        notices.append(("warning", text))
