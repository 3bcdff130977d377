"""Select parameters by their names: those that are trained, and those with their own learning rate
or weight decay."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.models.adapters.lora import learning_rate_factors
from paceline.models.blocks import find_blocks, tied_names

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ParameterSettings:
    """The settings of a parameter; None to use the setting of the config."""

    learning_rate: float | None = None
    weight_decay: float | None = None


def freeze_parameters(model: nn.Module, args: TrainArgs) -> None:
    """Leave only the parameters trained that ``freeze``, ``trainable`` and ``trainable_layers``
    select. A weight with several names is selected by any of them.

    Raises:
        ConfigError: a pattern matches no parameter, there are fewer layers, or no parameter is
            left.
    """
    if not (args.freeze or args.trainable or args.trainable_layers is not None):
        return
    parameters = dict(model.named_parameters())
    if args.trainable or args.trainable_layers is not None:
        trained = _matching(model, args.trainable, "train_args.trainable")
        trained |= _in_layers(model, args.trainable_layers or 0)
        for name in parameters.keys() - trained:
            parameters[name].requires_grad_(False)
    for name in _matching(model, args.freeze, "train_args.freeze"):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "no parameter is trained: `train_args.freeze`, `trainable` and `trainable_layers`"
            " leave none",
            code="nothing-trained",
            fix="remove a pattern of `train_args.freeze`",
        )


def parameter_settings(
    model: nn.Module, config: Config, learning_rate: float
) -> dict[str, ParameterSettings]:
    """Return the settings, by name, of the parameters with a learning rate or weight decay of their
    own.

    Args:
        learning_rate: peak learning rate of the other parameters.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    settings = {
        name: ParameterSettings(learning_rate * factor)
        for name, factor in learning_rate_factors(model, config).items()
    }
    groups = config.train_args.parameter_groups
    for number in reversed(range(len(groups))):  # the first one applies
        group, key = groups[number], f"train_args.parameter_groups[{number}].params"
        for name in _matching(model, group.params, key):
            settings[name] = ParameterSettings(group.learning_rate, group.weight_decay)
    return settings


def _matching(model: nn.Module, patterns: Sequence[str], key: str) -> set[str]:
    """Return the names of the parameters that a pattern matches; of those with several names, the
    first one."""
    aliases = tied_names(model) if patterns else {}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    selected: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names if re.search(pattern, name)]
        if not matches:
            examples = ", ".join(names[:: max(1, len(names) // _NAMES_SHOWN)][:_NAMES_SHOWN])
            raise ConfigError(
                "`{key}`: `{pattern}` matches no parameter of the model",
                code="unknown-parameter",
                allowed="regular expressions for names such as {examples}",
                fix="correct or remove the pattern",
                key=key,
                pattern=pattern,
                examples=examples,
            )
        selected.update(aliases.get(name, name) for name in matches)
    return selected


def _in_layers(model: nn.Module, number: int) -> set[str]:
    """Return the names of the parameters in the last ``number`` layers; in the first ones, if it is
    negative."""
    blocks = find_blocks(model)
    if abs(number) > len(blocks):
        raise ConfigError(
            "`train_args.trainable_layers: {number}`: the model has {num_blocks} layers",
            code="too-many-trainable-layers",
            fix="set a number from 1 to {num_blocks}",
            number=number,
            num_blocks=len(blocks),
        )
    chosen = blocks[-number:] if number > 0 else blocks[: abs(number)]
    return {name for prefix, block in chosen for name in _names_in(prefix, block)}


def _names_in(prefix: str, module: nn.Module) -> Iterator[str]:
    return (f"{prefix}.{name}" for name, _ in module.named_parameters())


def disable_dropout(model: nn.Module) -> None:
    """Turn off the dropout layers of a model and of its adapters."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
