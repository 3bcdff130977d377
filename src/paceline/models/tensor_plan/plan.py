"""Find the tensor-parallel plan of a model: the model's own plan, the user's, or a plan for a chain
of layers.

Importing this module does not import torch: the launcher and cost models use it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, nearest
from paceline.models.json_config import JsonObject, first_number, language_fields
from paceline.models.tensor_plan.families import family_plan, unsupported
from paceline.models.tensor_plan.style import (
    COLUMN,
    COLUMN_GATHERED,
    EXPERTS,
    KV_COLUMN,
    LATENT,
    ROW,
    ROW_SPLIT,
    STYLES,
    kind_of,
    parse_style,
)
from paceline.models.tensor_plan.vocabulary import vocabulary_plan

if TYPE_CHECKING:
    from torch import nn

_SYNONYMS = {"colwise_rep": COLUMN_GATHERED, "rowwise_rep": ROW_SPLIT}
#: Styles of embeddings, whose split does not follow the model's own plan, and of modules that
#: compute with their local parameters, which is the default here.
_IGNORED = ("embedding_rowwise", "embedding_colwise", "replicate", "local_params")
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_PEFT_PREFIX = "base_model.model."
_WITHOUT_TENSOR = "set `parallel.mode: zero3`, which supports every model"


def _base_model(model: nn.Module) -> Any:
    from paceline.models.blocks import base_model

    return base_model(model)


def find_tensor_plan(model: nn.Module, configured: Mapping[str, str]) -> dict[str, str]:
    """Return {dotted name: style} of each module (for experts, each parameter) that is split, in
    the model's order.

    Args:
        model: the model that the task built, including LoRA adapters, on any device including meta.
        configured: ``parallel.tensor_plan``: pattern → style, which overrides the model's own plan.
            A pattern is a dotted name in which ``*`` matches one part, with or without the prefix
            of the base model.

    Raises:
        ConfigError: there is no plan, a style is not supported, or a pattern matches nothing.
    """
    names = {name: module for name, module in model.named_modules() if name}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    plan = _model_plan(model, names, parameters)
    plan.update(_configured_plan(model, names, configured))
    if not any(
        kind_of(style) in (COLUMN, COLUMN_GATHERED, ROW, ROW_SPLIT) for style in plan.values()
    ):
        plan.update(_chain(model))
    if not plan:
        raise ConfigError(
            "`parallel.tensor` is not supported with {class_name}: it has no plan for splitting"
            " its layers",
            code="no-tensor-plan",
            allowed="models of transformers with a base_model_tp_plan; GPT-2, OPT, BLOOM, Falcon,"
            " MPT and similar families; an nn.Sequential with Linear → activation → Linear; or a"
            " plan in the config",
            fix="list pairs of layers, the first split by rows of its weight, the second by"
            " columns: `parallel.tensor_plan: {layers.*.up: colwise, layers.*.down: rowwise}`",
            class_name=_class_name(model),
        )
    _check_pairs(plan)
    for name, style in plan.items():
        if kind_of(style) == EXPERTS and not any(other.startswith(f"{name}.") for other in plan):
            raise ConfigError(
                "`parallel.tensor`: the weights of the experts `{name}` are not found at their"
                " names in the model's plan, because they have an adapter",
                code="experts-not-found",
                fix="remove the experts from `lora.target_modules`, or set `parallel.mode: zero3`",
                name=name,
            )
    plan.update(vocabulary_plan(model, plan))
    order = {
        name: number for number, name in enumerate(dict.fromkeys(_in_order(names, parameters)))
    }
    return {
        name: _stored(plan[name], names.get(name)) for name in sorted(plan, key=order.__getitem__)
    }


def _model_plan(
    model: nn.Module, names: Mapping[str, nn.Module], parameters: Iterable[str]
) -> dict[str, str]:
    inner = _base_model(model)
    config = getattr(inner, "config", None)
    prefix = _PEFT_PREFIX if inner is not model else ""
    base = getattr(inner, "base_model_prefix", "")
    base = f"{base}." if base and hasattr(inner, base) else ""
    patterns = dict(getattr(inner, "tp_plan", None) or {})
    if not patterns and getattr(config, "base_model_tp_plan", None):
        patterns = {base + key: style for key, style in config.base_model_tp_plan.items()}  # type: ignore[union-attr]
    problem = unsupported(config)
    if problem is not None:
        raise ConfigError(
            "`parallel.tensor` is not supported with {class_name}: {problem}",
            code="tensor-with-model",
            fix=_WITHOUT_TENSOR,
            class_name=_class_name(model),
            problem=problem,
        )
    patterns.update({base + key: style for key, style in family_plan(config).items()})
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    plan = {}
    for pattern, style in patterns.items():
        matches = [
            name
            for name in _matching(prefix + pattern, names)
            if any(True for _ in names[name].parameters())
        ]
        matches = matches or _matching(prefix + pattern, parameters)
        is_head = style in (COLUMN_GATHERED, "colwise_rep", ROW_SPLIT) and any(
            names.get(name) is head for name in matches
        )
        if not matches or style in _IGNORED or is_head:
            continue
        style = _with_number(_style(style, pattern, "the model's own plan"), pattern, config)
        plan.update(dict.fromkeys(matches, style))
    return plan


def _with_number(style: str, pattern: str, config: Any) -> str:
    """Add the number from the model's config that a style requires."""
    numbers = config.get_text_config() if hasattr(config, "get_text_config") else config
    if style == LATENT:
        return f"{style}:{numbers.qk_rope_head_dim}"
    if style == EXPERTS:
        return f"{style}:{getattr(numbers, 'num_experts_per_tok', None) or 1}"
    has_single_head = getattr(numbers, "num_key_value_heads", None) == 1
    if style == COLUMN and has_single_head and pattern.endswith(_KEYS_AND_VALUES):
        return f"{KV_COLUMN}:1"
    return style


def _stored(style: str, module: nn.Module | None) -> str:
    """Return the style, with a suffix if the module stores its weight transposed."""
    linear = getattr(module, "base_layer", module)
    is_transposed = type(linear).__name__ == "Conv1D" and "/" not in style
    return f"{style}/transposed" if is_transposed else style


def _in_order(names: Iterable[str], parameters: Iterable[str]) -> Iterator[str]:
    """Yield the names of modules and parameters in the order of registration, parameters after
    their module."""
    of_module: dict[str, list[str]] = {}
    for name in parameters:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    for name in names:
        yield name
        yield from of_module.get(name, [])


def _configured_plan(
    model: nn.Module, names: Mapping[str, nn.Module], configured: Mapping[str, str]
) -> dict[str, str]:
    base = getattr(_base_model(model), "base_model_prefix", "") or ""
    prefixes = {"", _PEFT_PREFIX, f"{base}.", f"{_PEFT_PREFIX}{base}."}
    plan = {}
    for pattern, style in configured.items():
        matches = sorted(
            {name for prefix in prefixes for name in _matching(prefix + pattern, names)}
        )
        if not matches:
            near = nearest(pattern, {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})
            raise ConfigError(
                "`parallel.tensor_plan`: `{pattern}` matches no module of {class_name}",
                code="tensor-plan-matches-nothing",
                allowed="dotted names of modules, `*` for one part of a name",
                fix="write `{near}`" if near else None,
                pattern=pattern,
                class_name=_class_name(model),
                near=near,
            )
        plan.update(dict.fromkeys(matches, _style(style, pattern, "`parallel.tensor_plan`")))
    return plan


def _style(style: str, pattern: str, source: str) -> str:
    style = _SYNONYMS.get(style, style)
    try:
        if parse_style(style).name not in STYLES:
            raise KeyError(style)
    except (KeyError, ValueError):
        raise ConfigError(
            "`parallel.tensor`: {source} has `{pattern}: {style}`, an unsupported style",
            code="unsupported-style",
            allowed=", ".join(STYLES),
            fix=_WITHOUT_TENSOR,
            source=source,
            pattern=pattern,
            style=style,
        ) from None
    return style


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def _check_pairs(plan: Mapping[str, str]) -> None:
    columns = [name for name, style in plan.items() if kind_of(style) == COLUMN]
    rows = [name for name, style in plan.items() if kind_of(style) == ROW]
    if bool(columns) != bool(rows):
        lone, missing = (columns[0], ROW) if columns else (rows[0], COLUMN)
        raise ConfigError(
            "`parallel.tensor`: `{lone}` has the style {plan}, but no layer has the style"
            " {missing}, which completes the pair",
            code="incomplete-tensor-plan",
            fix="set the style of the layer {side} it to {missing}",
            lone=lone,
            plan=plan[lone],
            missing=missing,
            side="after" if columns else "before",
        )


def _chain(model: nn.Module) -> dict[str, str]:
    """Return a plan for pairs Linear → element-wise activation → Linear.

    The model must be an nn.Sequential of layers and nested nn.Sequentials. Their forward pass is
    known, so no other module uses the split activation of a pair.
    """
    from torch import nn

    if type(model) is not nn.Sequential:
        return {}
    ids = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    plan: dict[str, str] = {}
    start: tuple[str, Any] | None = None
    for name, layer in _leaves(model, ""):
        if type(layer) is nn.Linear and ids.count(id(layer)) == 1:
            if start is not None and layer.in_features == start[1].out_features:
                plan[start[0]], plan[name] = COLUMN, ROW
                start = None
            else:
                start = (name, layer)
        elif not isinstance(layer, _element_wise()):
            start = None
    return plan


def _leaves(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    from torch import nn

    for key, child in module.named_children():
        if type(child) is nn.Sequential:
            yield from _leaves(child, f"{prefix}{key}.")
        else:
            yield prefix + key, child


def _element_wise() -> tuple[type, ...]:
    from torch import nn

    names = (
        "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Tanh Sigmoid LogSigmoid Softplus"
        " Softsign Hardtanh Hardswish Hardsigmoid Identity"
    )
    return tuple(getattr(nn, name) for name in names.split())


def _class_name(model: Any) -> str:
    return type(_base_model(model)).__name__


def fitting_sizes(numbers: Iterable[int]) -> list[int]:
    """Return the tensor-parallel sizes that divide all ``numbers``."""
    common = math.gcd(*numbers)
    return [size for size in range(1, min(common, 1024) + 1) if common % size == 0]


def check_sizes(config_json: JsonObject, tensor: int) -> None:
    """Check that ``tensor`` ranks divide the sizes in a transformers model's config.json.

    Raises:
        ConfigError: they do not divide the heads, the key_value heads or the intermediate size.
    """
    number = partial(first_number, language_fields(config_json))
    heads = number("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
    keys = number("num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads
    sizes = {
        "attention heads": heads,
        "key_value heads": None if keys == 1 else keys,  # a single head is replicated on every rank
        "intermediate size": number("intermediate_size", "ffn_dim", "n_inner"),
    }
    check_divisible({name: size for name, size in sizes.items() if size}, tensor)


def check_divisible(sizes: Mapping[str, int], tensor: int) -> None:
    """Raise ConfigError if ``tensor`` does not divide one of the sizes."""
    wrong = {name: size for name, size in sizes.items() if size % tensor}
    if not wrong:
        return
    fitting = fitting_sizes(sizes.values())
    below = max([size for size in fitting if size <= tensor], default=1)
    raise ConfigError(
        "`parallel.tensor: {tensor}` does not divide the model's {wrong}",
        code="tensor-not-divisible",
        allowed="{fitting}: what divides {sizes}",
        fix="set `parallel.tensor: {below}`" if below > 1 else _WITHOUT_TENSOR,
        tensor=tensor,
        wrong=", ".join(f"{name} ({size})" for name, size in wrong.items()),
        fitting=", ".join(map(str, fitting)),
        sizes=", ".join(f"{name} ({size})" for name, size in sizes.items()),
        below=below,
    )
