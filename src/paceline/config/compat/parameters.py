"""Resolve keys of other tools that select parameters of the model and depend on other keys."""

from paceline.config.compat.conversion import UnsupportedValue
from paceline.config.compat.merge import Merge
from paceline.config.compat.notices import OVERRIDDEN, read_as_remark
from paceline.config.compat.values import embedding_group
from paceline.config.entries import Notice, short
from paceline.config.settings import Assignment

_FREEZE, _TRAINABLE = "train_args.freeze", "train_args.trainable"
_LAYERS = "train_args.trainable_layers"
_NO_EFFECT: Notice = ("info", "has no effect with LoRA")


def freeze_all(merge: Merge, by: Assignment) -> Notice:
    """Apply the share of frozen parameters, which is 1."""
    if merge.value_of("lora.enable") is True:
        return _NO_EFFECT
    patterns = merge.value_of("_trained_patterns")
    if not patterns:
        raise UnsupportedValue(
            "no parameter would be trained", "add `trainable_parameters`, or remove it"
        )
    merge.winners.pop(_FREEZE, None)
    return merge.read_as(_TRAINABLE, patterns, by)


def train_patterns(merge: Merge, by: Assignment) -> Notice:
    """Except parameters from those that are frozen."""
    if merge.value_of("lora.enable") is True:
        return _NO_EFFECT
    if merge.value_of(_TRAINABLE) == by.value:
        return "info", read_as_remark(_TRAINABLE, by.value)
    frozen = merge.value_of(_FREEZE)
    if not frozen or not isinstance(frozen, str | list):  # the schema rejects other types
        return "info", "has no effect: no parameter is frozen"
    frozen = [frozen] if isinstance(frozen, str) else frozen
    excepted = rf"^(?!.*?(?:{'|'.join(by.value)}))"
    patterns = [rf"{excepted}(?=.*?(?:{pattern}))" for pattern in frozen]
    merge.set_winner(_FREEZE, patterns, merge.winners[_FREEZE])
    return "info", f"excepts these parameters: `{_FREEZE}: {short(patterns)}`"


def train_unfrozen(merge: Merge, by: Assignment) -> Notice:
    """Train only the parameters of axolotl's patterns. With LoRA, adapters are trained."""
    if merge.value_of("lora.enable") is True:
        return (
            "warning",
            "with LoRA, `lora.target_modules` names the modules with adapters, and `vision` the"
            " parts of a vision-language model that have none",
        )
    return _train_only(merge, by)


def train_extra_modules(merge: Merge, by: Assignment) -> Notice:
    """Train LLaMA-Factory's further modules, if its method trains some layers only."""
    if not merge.value_of(_LAYERS):
        return "info", "has no effect without `finetuning_type: freeze`"
    return _train_only(merge, by)


def _train_only(merge: Merge, by: Assignment) -> Notice:
    if merge.is_overridden(_TRAINABLE, by):
        return "info", OVERRIDDEN
    return merge.read_as(_TRAINABLE, by.value, by)


def train_layers(merge: Merge, by: Assignment) -> Notice:
    """Set LLaMA-Factory's number of layers, if its method trains some layers only."""
    winner = merge.winners.get(_LAYERS)
    if winner is None or not winner.value:
        return "info", "has no effect without `finetuning_type: freeze`"
    if merge.is_overridden(_LAYERS, by):
        return "info", OVERRIDDEN
    return merge.read_as(_LAYERS, by.value, by)


def embedding_lr_scale(merge: Merge, by: Assignment) -> Notice:
    """Convert axolotl's factor of the learning rate of the embeddings and the output layer."""
    base = merge.value_of("train_args.learning_rate")
    if not isinstance(base, int | float) or not isinstance(by.value, int | float):
        raise UnsupportedValue(
            "it requires a number, and `learning_rate`", "set `learning_rate`, or `embedding_lr`"
        )
    groups = embedding_group(base * by.value)
    target = "train_args.parameter_groups"
    before = merge.value_of(target) or []
    merge.set_winner(target, [*groups, *before], by)
    return "info", read_as_remark(target, groups)


#: Pseudo-target → function that applies it.
ACTIONS = {
    "_frozen_share": freeze_all,
    "_trained_patterns": train_patterns,
    "_trainable_layers": train_layers,
    "_unfrozen": train_unfrozen,
    "_extra_modules": train_extra_modules,
    "_embedding_lr_scale": embedding_lr_scale,
}
