"""Add LoRA adapters to a language model, through peft."""

import functools
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, did_you_mean, first_line
from paceline.models import qwen

Notice = tuple[str, str]

ALL_LINEAR = "all-linear"
_ADAPTER = "default"

#: Code that computes with a weight instead of calling its module, so that an adapter has no effect.
_READS_WEIGHT = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size|data)\b|\[)")

_WHY_BYPASSED = "the model's code reads these weights instead of calling the modules"

#: Names of an expert's router and projections that peft supports.
_EXPERT_PROJECTIONS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})

#: Layers of peft that do not support dropout.
_WITHOUT_DROPOUT = ("ParamWrapper", "MultiheadAttention")


def add_adapters(model: Any, config: Config, read_weights: bool = True) -> nn.Module:
    """Add the adapters that the config describes to ``model``, on its device. Trained parameters
    are float32.

    Args:
        read_weights: whether to read the weights of ``lora.adapter``, not only its configuration.

    Raises:
        ConfigError: the adapters do not fit the model. The message lists the names of its modules.
    """
    import torch

    if getattr(getattr(model, "config", None), qwen.CONVERTED_KEY, None):
        config = qwen.with_qwen2_modules(config)
    adapted = (
        _create_adapters(model, config)
        if config.lora.adapter is None
        else _load_adapters(model, config, read_weights)
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    return adapted  # type: ignore[no-any-return]


def _load_adapters(model: Any, config: Config, read_weights: bool) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    lora = config.lora
    folder = str(Path(str(lora.adapter)).expanduser())
    try:
        if read_weights:
            adapted = PeftModel.from_pretrained(model, folder, is_trainable=True)
        else:
            settings = LoraConfig.from_pretrained(folder)
            settings.inference_mode = False
            adapted = get_peft_model(model, settings)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"`lora.adapter: {lora.adapter}` cannot be loaded: {first_line(error)}"
        ) from error
    if any(not _supports_dropout(layer) for _, layer in adapter_layers(adapted)):
        # Such an adapter is saved without its dropout, because peft would not load it otherwise.
        set_dropout(adapted, lora.dropout)
    return adapted


def _create_adapters(model: Any, config: Config) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = config.lora
    targets = lora.target_modules
    # peft replaces modules, so after an error the names would be those of its wrappers.
    allowed = "all-linear, or some of: " + ", ".join(target_names(model))
    _check_names(model, config)
    selects_all = _selects_all_linear(config)
    bypassed = bypassed_modules(model) if selects_all else []
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,  # applied afterwards to the layers that support it
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=_pattern_of(bypassed) if bypassed else None,
        modules_to_save=list(lora.modules_to_save) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft warns about its automatic choices: transposed weights (GPT-2), ranks of fused
            # experts.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
            adapted = get_peft_model(model, settings)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise ConfigError(
            f"`lora.target_modules: {targets}` does not fit this model: {first_line(error)}",
            allowed=allowed,
            fix=(
                None
                if selects_all
                else "set `lora.target_modules: all-linear`, which selects the modules that fit"
            ),
        ) from error
    set_dropout(adapted, lora.dropout)
    return adapted


def _selects_all_linear(config: Config) -> bool:
    targets = config.lora.target_modules
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def set_dropout(adapted: Any, dropout: float) -> None:
    """Apply ``dropout`` to the input of every adapter that supports it.

    peft does not support dropout for an adapter on a parameter (the experts of a mixture), and does
    not load an adapter of such parameters whose configuration has a dropout.
    """
    if dropout <= 0:
        return
    layers = [layer for _, layer in adapter_layers(adapted)]
    accepting = [layer for layer in layers if _supports_dropout(layer)]
    for layer in accepting:
        layer.lora_dropout[_ADAPTER] = nn.Dropout(dropout).train(layer.training)
    if len(accepting) == len(layers):
        adapted.peft_config[_ADAPTER].lora_dropout = dropout


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each peft layer that contains a LoRA adapter."""
    from peft.tuners.lora import LoraLayer

    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)
    )


def _supports_dropout(layer: Any) -> bool:
    return type(layer).__name__ not in _WITHOUT_DROPOUT


# -- the modules of a model
# --------------------------------------------------------------------------------------------------
def _linear_modules(model: Any) -> dict[str, nn.Module]:
    """Return the linear modules except the output head, by name: those that ``all-linear``
    selects."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kinds = (nn.Linear, Conv1D)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module is not head
    }


def target_names(model: Any) -> list[str]:
    """Return the names that ``lora.target_modules`` accepts: the last part of each linear module's
    name, and peft's names for the expert projections that are a single parameter in
    transformers."""
    return sorted(
        {name.rpartition(".")[2] for name in _linear_modules(model)} | _expert_names(model)
    )


def _expert_names(model: Any) -> frozenset[str]:
    """Return the projection names that peft maps to expert parameters of this architecture."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    settings = LoraConfig(target_modules=list(_EXPERT_PROJECTIONS))
    convert_peft_config_for_transformers(settings, model, None)  # replaces the names that it maps
    return _EXPERT_PROJECTIONS - set(settings.target_modules or ())


def _check_names(model: Any, config: Config) -> None:
    """Raise ConfigError for names or a regular expression that match no module. peft would ignore
    such names if others match."""
    lora, paths = config.lora, [path for path, _ in model.named_modules() if path]
    experts = _expert_names(model)
    targets, names = lora.target_modules, target_names(model)
    allowed = ", ".join(names)
    if isinstance(targets, list) and (
        absent := _missing([target for target in targets if target not in experts], paths)
    ):
        raise ConfigError(
            f"`lora.target_modules: {targets}`: the model has no module named {_quoted(absent)}",
            allowed=f"all-linear, a regular expression, or some of: {allowed}",
            fix=did_you_mean(absent[0], names, "remove the names that belong to another model"),
        )
    if (
        isinstance(targets, str)
        and not _selects_all_linear(config)
        and not _regex_matches(targets, model, paths, experts)
    ):
        example = next((path for path in paths if path.rpartition(".")[2] in names), paths[-1])
        raise ConfigError(
            f"`lora.target_modules: {targets}` is a regular expression that matches no module of"
            " this model",
            allowed=(
                f"all-linear, a list of some of: {allowed}; or an expression that matches a whole"
                f" name such as {example}"
            ),
        )
    if absent := _missing(lora.modules_to_save, paths):
        leaves = list(
            dict.fromkeys(path.rpartition(".")[2] for path in paths if not path[-1].isdigit())
        )
        raise ConfigError(
            f"`lora.modules_to_save: {lora.modules_to_save}`: the model has no module named"
            f" {_quoted(absent)}",
            allowed="the last parts of names of modules, such as " + ", ".join(leaves[:12]),
            fix=did_you_mean(absent[0], leaves),
        )


def _regex_matches(pattern: str, model: Any, paths: list[str], experts: Iterable[str]) -> bool:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"`lora.target_modules: {pattern}` is not a valid regular expression: {error}"
        ) from error
    if any(regex.fullmatch(path) for path in paths):
        return True
    # peft also matches the names that expert projections had before they became a single parameter.
    containers = (
        {
            name.rpartition(".")[0]
            for name, parameter in model.named_parameters()
            if parameter.dim() == 3
        }
        if experts
        else ()
    )
    return any(
        regex.fullmatch(f"{container}.{name}") for container in containers for name in experts
    )


def _missing(names: Iterable[str], paths: list[str]) -> list[str]:
    return [
        name
        for name in names
        if not any(path == name or path.endswith(f".{name}") for path in paths)
    ]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def bypassed_modules(model: Any) -> list[str]:
    """Return the linear modules whose weight the model's code reads instead of calling the module,
    such as `out_proj` in Mamba. An adapter on them has no effect, either always or with fused
    kernels."""
    return _read_by_parent(model, _linear_modules(model))


def ineffective_adapters(adapted: Any) -> list[str]:
    """Return the adapters on modules that the model's code does not call; see
    :func:`bypassed_modules`."""
    return _read_by_parent(
        adapted,
        [name for name, layer in adapter_layers(adapted) if not hasattr(layer, "parameter_name")],
    )


def _read_by_parent(model: Any, names: Iterable[str]) -> list[str]:
    def is_read(name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        return leaf in _weights_read_by(type(model.get_submodule(parent)))  # type: ignore[arg-type]

    return [name for name in names if is_read(name)]


@functools.cache
def _weights_read_by(kind: type) -> frozenset[str]:
    try:
        return frozenset(_READS_WEIGHT.findall(inspect.getsource(kind)))
    except (OSError, TypeError):  # the source code is not available
        return frozenset()


def _pattern_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these names, with any layer number."""
    return "|".join(
        sorted({re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) for name in names})
    )


def _short_names(names: Iterable[str]) -> str:
    """Return names without their layers: ``model.layers.3.mlp.experts.w`` → ``mlp.experts.w``."""
    short = (
        re.sub(
            r"^.*\.\d+\.(?=\D)",
            "",
            name.removeprefix("base_model.model.").replace(".base_layer", ""),
        )
        for name in names
    )
    return ", ".join(sorted(set(short)))


# -- notices
# ------------------------------------------------------------------------------------------------
def adapter_notices(adapted: Any, config: Config) -> list[Notice]:
    """Return notices about dropout that cannot be applied and modules without an adapter."""
    lora = config.lora
    notices: list[Notice] = []
    layers = dict(adapter_layers(adapted))
    without = [
        f"{name}.{getattr(layer, 'parameter_name', '')}".rstrip(".")
        for name, layer in layers.items()
        if not _supports_dropout(layer)
    ]
    if without and lora.dropout > 0:
        level = "warning" if "dropout" in lora.model_fields_set else "info"
        applies_to = "the other adapters only" if len(without) < len(layers) else "no adapter"
        text = (
            f"lora.dropout: {lora.dropout:g} applies to {applies_to}; peft cannot apply dropout to"
            f" {_short_names(without)}"
        )
        notices.append((level, text))
    if _selects_all_linear(config) and lora.adapter is None:
        notices += _left_out(adapted.get_base_model(), lora.modules_to_save)
    elif ineffective := ineffective_adapters(adapted):
        names = _short_names(ineffective)
        notices.append(
            ("warning", f"LoRA: the adapters on {names} may have no effect: {_WHY_BYPASSED}")
        )
    return notices


def _left_out(base: Any, saved: list[str]) -> list[Notice]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    notices: list[Notice] = []
    bypassed = bypassed_modules(base)
    if bypassed:
        notices.append(("info", f"LoRA: no adapter on {_short_names(bypassed)}: {_WHY_BYPASSED}"))
    inside = tuple(
        f"{name}." for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)
    )
    linear = [
        name
        for name in _linear_modules(base)
        if name not in bypassed
        and not name.startswith(inside)
        and not any(part in saved for part in name.split("."))
    ]
    experts = [
        name
        for name, parameter in base.named_parameters()
        if parameter.dim() == 3 and ".experts." in name and not parameter.requires_grad
    ]
    plain = [*linear, *(name for name in experts if not name.startswith(inside))]
    if plain:
        text = (
            f"LoRA: no adapter on {_short_names(plain)}: peft does not select these in this"
            " architecture"
        )
        notices.append(("info", text))
    return notices
