"""The modules of a language model that adapters apply to."""

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from paceline.config.schema import Config
from paceline.config.schema.lora import ALL_LINEAR
from paceline.core.errors import ConfigError, did_you_mean

#: Code that computes with a weight instead of calling its module, so that an adapter has no effect.
_READS_WEIGHT = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size|data)\b|\[)")

#: Where the classes of models are defined: in transformers, or in the model's own code.
_OWN_CLASSES = ("transformers.models.", "transformers_modules.")
#: class → whether it is a plain linear layer, for classes with a forward of their own.
_PLAIN_KINDS: dict[type, bool] = {}

WHY_SPECIAL = "these modules return something else than the product with their weight"
WHY_ROUTER = "routers choose the experts, and `all-linear` leaves them as they are"
WHY_BYPASSED = "the model's code reads these weights instead of calling the modules"

#: Names of an expert's router and projections that peft supports.
_EXPERT_PROJECTIONS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def selects_all_linear(config: Config) -> bool:
    targets = config.lora.target_modules
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each peft layer that contains an adapter."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.vera import VeraLayer

    kinds = (LoraLayer, VeraLayer)
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))


def linear_modules(model: Any) -> dict[str, nn.Module]:
    """Return the linear modules except the output head, by name: those that ``all-linear``
    selects. Modules of :func:`special_linear_modules` are not among them."""
    return {name: module for name, module in _linear_modules(model) if _is_plain(module)}


def special_linear_modules(model: Any) -> list[str]:
    """Return the names of modules that inherit from ``nn.Linear`` and compute something else, such
    as a router that returns scores and logits (Llama 4, Phi-3.5-MoE). An adapter or a quantized
    layer in their place fails in the first step."""
    return [name for name, module in _linear_modules(model) if not _is_plain(module)]


def _linear_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kinds = (nn.Linear, Conv1D)
    return (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module is not head
    )


def _is_plain(module: nn.Module) -> bool:
    """Return whether a linear module maps vectors of its input size to vectors of its output size,
    as an adapter does."""
    kind = type(module)
    is_own_class = kind.__module__.startswith(_OWN_CLASSES) and isinstance(module, nn.Linear)
    if not is_own_class or kind.forward is nn.Linear.forward:
        return True
    assert isinstance(module, nn.Linear)
    return _maps_vectors(kind, module)


def _maps_vectors(kind: type[nn.Module], module: nn.Linear) -> bool:
    known = _PLAIN_KINDS.get(kind)
    if known is None:
        inputs = torch.empty((1, 2, module.in_features), device="meta", dtype=module.weight.dtype)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        on_meta = {name: torch.empty_like(value, device="meta") for name, value in tensors.items()}
        try:
            out: Any = functional_call(module, on_meta, (inputs,))
            known = isinstance(out, torch.Tensor) and out.shape == (1, 2, module.out_features)
        except Exception:  # a model's own code raises anything
            known = False
        _PLAIN_KINDS[kind] = known
    return known


def routers(model: Any) -> list[str]:
    """Return the names of the modules whose weight decides which experts compute a token."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor) and _is_router(name, model)
    ]


def _is_router(name: str, model: Any) -> bool:
    parent, _, leaf = name.removesuffix(".base_layer").rpartition(".")
    if "router" in name.split("."):
        return True
    return leaf == "gate" and hasattr(model.get_submodule(parent), "experts")


def target_names(model: Any) -> list[str]:
    """Return the names that ``lora.target_modules`` accepts: the last part of each linear module's
    name, and peft's names for the expert projections that are a single parameter in
    transformers."""
    return sorted(
        {name.rpartition(".")[2] for name in linear_modules(model)} | _expert_names(model)
    )


def _expert_names(model: Any) -> frozenset[str]:
    """Return the projection names that peft maps to expert parameters of this architecture."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    settings = LoraConfig(target_modules=list(_EXPERT_PROJECTIONS))
    convert_peft_config_for_transformers(settings, model, None)  # replaces the names that it maps
    return _EXPERT_PROJECTIONS - set(settings.target_modules or ())


def check_names(model: Any, config: Config) -> None:
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
            "`lora.target_modules: {targets}`: the model has no module named {quoted}",
            code="unknown-target-modules",
            allowed="all-linear, a regular expression, or some of: {choices}",
            fix=did_you_mean(absent[0], names, "remove the names that belong to another model"),
            targets=targets,
            quoted=_quoted(absent),
            choices=allowed,
        )
    if (
        isinstance(targets, str)
        and not selects_all_linear(config)
        and not _regex_matches(targets, model, paths, experts)
    ):
        example = next((path for path in paths if path.rpartition(".")[2] in names), paths[-1])
        raise ConfigError(
            "`lora.target_modules: {targets}` is a regular expression that matches no module of"
            " this model",
            code="target-modules-match-nothing",
            allowed="all-linear, a list of some of: {choices}; or an expression that matches a"
            " whole name such as {example}",
            targets=targets,
            choices=allowed,
            example=example,
        )
    if not selects_all_linear(config):
        _check_special(targets, special_linear_modules(model), allowed)
    if absent := _missing(lora.modules_to_save, paths):
        leaves = list(
            dict.fromkeys(path.rpartition(".")[2] for path in paths if not path[-1].isdigit())
        )
        raise ConfigError(
            "`lora.modules_to_save: {modules_to_save}`: the model has no module named {quoted}",
            code="unknown-modules-to-save",
            allowed=("the last parts of names of modules, such as " + ", ".join(leaves[:12])),
            fix=did_you_mean(absent[0], leaves),
            modules_to_save=lora.modules_to_save,
            quoted=_quoted(absent),
        )


def _check_special(targets: str | list[str], special: list[str], allowed: str) -> None:
    """Raise ConfigError if a module that is not a plain linear layer is selected by name or by a
    regular expression."""
    if isinstance(targets, str):
        selected = [name for name in special if re.fullmatch(targets, name)]
    else:
        selected = [
            name
            for name in special
            if any(name == target or name.endswith(f".{target}") for target in targets)
        ]
    if selected:
        raise ConfigError(
            "`lora.target_modules: {targets}` selects {short_names}, which cannot have adapters:"
            " {why_special}",
            code="special-target-modules",
            allowed="all-linear, a regular expression, or some of: {choices}",
            targets=targets,
            short_names=short_names(selected),
            why_special=WHY_SPECIAL,
            choices=allowed,
        )


def _regex_matches(pattern: str, model: Any, paths: list[str], experts: Iterable[str]) -> bool:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            "`lora.target_modules: {pattern}` is not a valid regular expression: {reason}",
            code="invalid-target-modules",
            pattern=pattern,
            reason=error,
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
    return _read_by_parent(model, linear_modules(model))


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


def pattern_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these names, with any layer number."""
    return "|".join(
        sorted({re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) for name in names})
    )


def short_names(names: Iterable[str]) -> str:
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
