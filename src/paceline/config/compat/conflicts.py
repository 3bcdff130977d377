"""Resolve keys of other tools that act on another key."""

from functools import partial
from typing import get_args

from paceline.config.compat import parameters, sources
from paceline.config.compat.conversion import UnsupportedValue
from paceline.config.compat.merge import Action, Merge
from paceline.config.compat.notices import OVERRIDDEN, read_as_remark
from paceline.config.compat.precision import resolve_precision
from paceline.config.compat.values import split_beside_all
from paceline.config.entries import OVERRIDE, Notice, quoted_names, short
from paceline.config.schema.base import Logger
from paceline.config.schema.lora import ALL_LINEAR
from paceline.config.schema.tasks import ANSWER_TASKS
from paceline.config.schema.train_args import TrainArgs
from paceline.config.settings import RESET, Assignment

_MODULES, _PACKING = "lora.target_modules", "train_args.packing_strategy"
_SAVE_STEPS, _EVAL_STEPS = "train_args.save_steps", "train_args.eval_steps"
#: The keys whose value on the command line overrides an action of the file.
_TARGETS = {
    "_target_linear": _MODULES,
    "_target_regex": _MODULES,
    "_save_in_full": _MODULES,
    "_skip_attention": _MODULES,
    "_skip_mlp": _MODULES,
    "_saves_per_epoch": _SAVE_STEPS,
    "_evals_per_epoch": _EVAL_STEPS,
    "_packing_strategy": _PACKING,
    **{f"_use_{name}": "report_to" for name in get_args(Logger)},
}
#: Projections of attention and of the MLP, as most models name them.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_OVERRIDDEN: Notice = ("info", OVERRIDDEN)


def resolve_conflicts(merge: Merge) -> None:
    """Apply the ``_`` targets and the exclusions to ``merge.winners``."""
    sources.use_default_folder(merge)
    for name, act in _ACTIONS.items():
        winner = merge.winners.pop(name, None)
        if winner is None or winner.value is RESET:
            continue
        is_overridden = merge.is_overridden(_TARGETS.get(name), winner)
        notice = _OVERRIDDEN if is_overridden else merge.attempt(act, winner)
        for line in merge.lines:
            if notice and any(assigned is winner for assigned in line.assigned):
                line.resolved.append(notice)
    merge.exclude()
    resolve_precision(merge)  # depends on whether LoRA is used


# -- keys that act on another


def _target_linear(merge: Merge, by: Assignment) -> Notice:
    named = merge.value_of(_MODULES)
    ends, _ = split_beside_all(named) if isinstance(named, list) else ([], [])
    more = f"; {_save_names(merge, ends, by)}" if ends else ""
    return merge.read_as(_MODULES, ALL_LINEAR, by, more)


def _target_regex(merge: Merge, by: Assignment) -> Notice:
    merge.set_winner(_MODULES, by.value, by)
    return "info", f"is read as `{_MODULES}: {by.value}`"


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
        merge.set_winner("lora.modules_to_save", saved, by)
    return (
        f"{quoted_names(names)} in addition to all linear layers:"
        f" `lora.modules_to_save: {short(saved)}`"
    )


def _save_strategy(merge: Merge, by: Assignment) -> Notice:
    is_overridden = merge.is_overridden(_SAVE_STEPS, by)
    if by.value == "steps":
        return "info", "is the default: a checkpoint every `save_steps`"
    if by.value == "best":
        merge.set_winner("train_args.save_best", True, by)
        if not is_overridden:
            merge.set_winner(_SAVE_STEPS, 0, by)
        return "info", f"is read as `train_args.save_best: true` and `{_SAVE_STEPS}: 0`"
    is_per_epoch = by.value == "epoch" and not merge.value_of("train_args.max_steps")
    if by.value != "no" and not is_per_epoch:
        return "warning", "checkpoints are written every `save_steps` steps, and at the end"
    if is_overridden:
        return _OVERRIDDEN
    if by.value == "no":
        return merge.read_as(_SAVE_STEPS, 0, by, ": one checkpoint, at the end")
    unused = ""
    if merge.layer_of(_SAVE_STEPS) == by.entry.layer:
        unused = f"; {merge.winners.pop(_SAVE_STEPS).entry.shown()} has no effect"
    level, text = _per_epoch(merge, by, _SAVE_STEPS, 1)
    return level, text + unused


def _per_epoch(merge: Merge, by: Assignment, target: str, count: float | None = None) -> Notice:
    """Convert a number of times per epoch (default: the key's value) to a fraction of all steps."""
    name = target.rpartition(".")[2]
    count = by.value if count is None else count
    if merge.value_of(target) is not None and merge.yields_to(target, by):
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
        place = "each epoch" if name == "eval_steps" else "the run"
        return merge.read_as(target, 0, by, f": at the end of {place}")
    merge.set_winner(target, 1 / times, by)
    fraction = f"`{target}: {short(round(1 / times, 6))}`, a fraction of all steps"
    return "info", f"is read as {fraction}: {short(count)} in each of {short(epochs)} epochs"


def _use_logger(merge: Merge, by: Assignment, name: str) -> Notice:
    """Add a logger to `report_to`, for keys that turn on one of them."""
    names = list(merge.value_of("report_to") or [])
    if by.value is True and name not in names:
        names.append(name)
        merge.set_winner("report_to", names, by)
    return "info", read_as_remark("report_to", names)


def _eval_strategy(merge: Merge, by: Assignment) -> Notice:
    if by.value == "steps":
        return "info", "is the default: evaluation every `eval_steps`, with validation data"
    if by.value == "epoch":
        if merge.is_overridden(_EVAL_STEPS, by):
            return _OVERRIDDEN
        return merge.read_as(_EVAL_STEPS, 0, by, ": at the end of each epoch")
    # Turn evaluation off, unless an override sets the validation data or the interval.
    keys = [key for key in ("val_dataset", "split_dataset_ratio") if merge.value_of(key)]
    if not keys:
        return "info", "is the default without validation data"
    if any(merge.is_overridden(key, by) for key in (*keys, _EVAL_STEPS)):
        return _OVERRIDDEN
    return merge.read_as(_EVAL_STEPS, "never", by)


def _packing_strategy(merge: Merge, by: Assignment) -> Notice:
    """Apply TRL's strategy, which has an effect only with `packing: true`."""
    if merge.value_of("train_args.packing") is not True and by.entry.layer != OVERRIDE:
        return "info", "has no effect without `packing: true`"
    return merge.read_as(_PACKING, by.value, by)


def _skip_modules(merge: Merge, by: Assignment, names: tuple[str, ...]) -> Notice:
    """Leave the projections of attention or of the MLP out of the modules with adapters."""
    others = _MLP if names is _ATTENTION else _ATTENTION[:4]
    listed = merge.value_of(_MODULES)
    if listed == ALL_LINEAR:
        return "info", f"has no effect with `target_modules: {ALL_LINEAR}`"
    kept = [name for name in listed if name not in names] if isinstance(listed, list) else others
    if not kept:
        raise UnsupportedValue("no module would be trained", "list the modules in `lora`")
    return merge.read_as(_MODULES, list(kept), by)


def _cosine_min_lr(merge: Merge, by: Assignment, name: str) -> Notice:
    """Apply the lowest learning rate of axolotl's cosine schedule, which is its default."""
    kind, target = "train_args.lr_scheduler_type", "train_args.lr_scheduler_kwargs"
    if merge.value_of(kind) not in (None, "cosine", "cosine_with_min_lr"):
        return "info", f"has no effect with `lr_scheduler_type: {merge.value_of(kind)}`"
    if merge.is_overridden(kind, by):
        return _OVERRIDDEN
    limits = [f"{target}.{key}" for key in ("min_lr", "min_lr_rate")]
    if any(merge.yields_to(key, by) for key in limits):
        return "info", "is overridden by `lr_scheduler_kwargs`"
    for key in limits:
        merge.winners.pop(key, None)
    merge.set_winner(kind, "cosine_with_min_lr", by)
    merge.set_winner(f"{target}.{name}", by.value, by)
    settings = f"`{kind}: cosine_with_min_lr` with `{name}: {short(by.value)}`"
    return "info", f"is read as {settings}"


def _batch_size(merge: Merge, by: Assignment) -> Notice:
    """Apply ms-swift's size of a micro-batch. In axolotl, the key is the global batch size, from
    which the accumulation follows."""
    target = "train_args.per_device_train_batch_size"
    if merge.scores["s"] <= merge.scores["a"] or merge.yields_to(target, by):
        return (
            "warning",
            "set `per_device_train_batch_size` and `gradient_accumulation_steps`; times the number"
            " of ranks, they give the global batch size",
        )
    return merge.read_as(target, by.value, by)


def _pairs(merge: Merge, by: Assignment) -> Notice:
    """Check that the task trains on the pairs of answers of LLaMA-Factory's `converter: pair`."""
    tasks = [task for task in ANSWER_TASKS if task != "kto"]
    if merge.value_of("task") in tasks:
        return "info", "has pairs of answers"
    raise UnsupportedValue(
        "its datasets have pairs of answers (`converter: pair`), for which several methods train",
        f"state which one it is: add task: {' or task: '.join(tasks)}",
    )


#: In this order, as some read what others set.
_ACTIONS: dict[str, Action] = {
    "_target_linear": _target_linear,
    "_target_regex": _target_regex,
    "_save_in_full": lambda merge, by: ("info", _save_names(merge, by.value, by)),
    "_jinja": _jinja,
    "_regression": _regression,
    "_pairs": _pairs,
    "_batch_size": _batch_size,
    "_cosine_min_lr_rate": partial(_cosine_min_lr, name="min_lr_rate"),
    "_cosine_min_lr": partial(_cosine_min_lr, name="min_lr"),
    "_skip_attention": partial(_skip_modules, names=_ATTENTION),
    "_skip_mlp": partial(_skip_modules, names=_MLP),
    "_save_strategy": _save_strategy,
    "_saves_per_epoch": partial(_per_epoch, target=_SAVE_STEPS),
    "_evals_per_epoch": partial(_per_epoch, target=_EVAL_STEPS),
    **sources.ACTIONS,
    "_packing_strategy": _packing_strategy,
    "_eval_strategy": _eval_strategy,
    **parameters.ACTIONS,
    **{f"_use_{name}": partial(_use_logger, name=name) for name in get_args(Logger)},
}
