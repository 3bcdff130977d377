"""Which layers tensor parallelism cuts, and how: read from the model's own plan, the user's, or a
plain chain of layers.

Importing this imports no torch: what follows from names and sizes alone serves the launcher and the
cost too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, nearest
from paceline.models.blocks import base_model
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

if TYPE_CHECKING:
    from torch import nn

_SYNONYMS = {"colwise_rep": COLUMN_GATHERED, "rowwise_rep": ROW_SPLIT}
#: Of embeddings and heads: they stay whole on each rank, which is right with or without a plan.
_LEFT_WHOLE = ("embedding_rowwise", "embedding_colwise", "replicate")
#: Says that a module computes with its parameters as they lie on the rank: true here of every
#: module.
_NOTHING_TO_DO = ("local_params",)
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_PEFT_PREFIX = "base_model.model."


def find_tensor_plan(model: nn.Module, given: Mapping[str, str]) -> dict[str, str]:
    """Dotted name of each module (or parameter, of experts) that is cut → its style, in the model's
    order.

    Args:
        model: as the task built it, LoRA included; on any device, meta too.
        given: ``parallel.tensor_plan``: pattern → style. A pattern is a dotted name in which ``*``
            stands for one part of it, with or without the prefix of the base model. It goes before
            the model's own plan.

    Raises:
        ConfigError: no plan, a style that cannot be had, or a pattern that fits nothing.
    """
    names = {name: module for name, module in model.named_modules() if name}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    plan = _own_plan(model, names, parameters)
    plan.update(_given_plan(model, names, given))
    if not any(
        kind_of(style) in (COLUMN, COLUMN_GATHERED, ROW, ROW_SPLIT) for style in plan.values()
    ):
        plan.update(_chain(model))
    if not plan:
        raise ConfigError(
            f"`parallel.tensor`: {_class_name(model)} does not say how its layers are cut (a module"
            " without a plan)",
            allowed=(
                "transformers' models that have a base_model_tp_plan; the families of"
                " models/tensor_plan/families.py (GPT-2, OPT, BLOOM, Falcon, MPT, …); an"
                " nn.Sequential with Linear → activation → Linear; or a plan in the config"
            ),
            fix=(
                "name pairs of layers, the first cut by rows of its weight, the second by columns: "
                "`parallel.tensor_plan: {layers.*.up: colwise, layers.*.down: rowwise}`"
            ),
        )
    _check_pairs(plan)
    _check_experts(plan)
    order = {
        name: number for number, name in enumerate(dict.fromkeys(_in_order(names, parameters)))
    }
    return {
        name: _stored(plan[name], names.get(name)) for name in sorted(plan, key=order.__getitem__)
    }


def _own_plan(
    model: nn.Module, names: Mapping[str, nn.Module], parameters: Iterable[str]
) -> dict[str, str]:
    inner = base_model(model)
    config = getattr(inner, "config", None)
    prefix = _PEFT_PREFIX if inner is not model else ""
    before = getattr(inner, "base_model_prefix", "")
    before = f"{before}." if before and hasattr(inner, before) else ""
    own = dict(getattr(inner, "tp_plan", None) or {})
    if not own and getattr(config, "base_model_tp_plan", None):
        own = {before + key: style for key, style in config.base_model_tp_plan.items()}  # type: ignore[union-attr]
    problem = unsupported(config)
    if problem is not None:
        raise ConfigError(
            f"`parallel.tensor`: {_class_name(model)} cannot be cut: {problem}",
            fix="leave tensor parallelism out: `parallel.mode: zero3` cuts every model",
        )
    own.update({before + key: style for key, style in family_plan(config).items()})
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    plan = {}
    for pattern, style in own.items():
        result = [
            name
            for name in _matching(prefix + pattern, names)
            if any(True for _ in names[name].parameters())
        ]
        result = result or _matching(prefix + pattern, parameters)
        if style in (*_LEFT_WHOLE, *_NOTHING_TO_DO) or (
            style in (COLUMN_GATHERED, "colwise_rep", ROW_SPLIT)
            and any(names.get(name) is head for name in result)
        ):
            continue
        if not result:
            continue
        style = _with_number(_style(style, pattern, "the model's own plan"), pattern, config)
        plan.update(dict.fromkeys(result, style))
    return plan


def _with_number(style: str, pattern: str, config: Any) -> str:
    """Complete a style by a number of the model's config."""
    numbers = config.get_text_config() if hasattr(config, "get_text_config") else config
    if style == LATENT:
        return f"{style}:{numbers.qk_rope_head_dim}"
    if style == EXPERTS:
        return f"{style}:{getattr(numbers, 'num_experts_per_tok', None) or 1}"
    one_head = getattr(numbers, "num_key_value_heads", None) == 1
    return (
        f"{KV_COLUMN}:1"
        if style == COLUMN and one_head and pattern.endswith(_KEYS_AND_VALUES)
        else style
    )


def _stored(style: str, module: nn.Module | None) -> str:
    """The style, with a note if the module stores its weight the other way round."""
    linear = getattr(module, "base_layer", module)
    return (
        f"{style}/transposed" if type(linear).__name__ == "Conv1D" and "/" not in style else style
    )


def _in_order(names: Iterable[str], parameters: Iterable[str]) -> Iterator[str]:
    """Modules and parameters as they are registered, a parameter right after the module that has
    it."""
    of_module: dict[str, list[str]] = {}
    for name in parameters:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    for name in names:
        yield name
        yield from of_module.get(name, [])


def _check_experts(plan: Mapping[str, str]) -> None:
    for name, style in plan.items():
        if kind_of(style) == EXPERTS and not any(other.startswith(f"{name}.") for other in plan):
            raise ConfigError(
                f"`parallel.tensor`: the weights of the experts `{name}` are not found where the"
                " model's plan expects them: an adapter is in between",
                fix="take the experts out of `lora.target_modules`, or set `parallel.mode: zero3`",
            )


def _given_plan(
    model: nn.Module, names: Mapping[str, nn.Module], given: Mapping[str, str]
) -> dict[str, str]:
    inner = base_model(model)
    before = getattr(inner, "base_model_prefix", "") or ""
    prefixes = {"", _PEFT_PREFIX, f"{before}.", f"{_PEFT_PREFIX}{before}."}
    plan = {}
    for pattern, style in given.items():
        result = sorted(
            {name for prefix in prefixes for name in _matching(prefix + pattern, names)}
        )
        if not result:
            near = nearest(pattern, {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})
            raise ConfigError(
                f"`parallel.tensor_plan`: `{pattern}` is no module of {_class_name(model)}",
                allowed="dotted names of modules, `*` for one part of a name",
                fix=f"write `{near}`" if near else None,
            )
        plan.update(dict.fromkeys(result, _style(style, pattern, "`parallel.tensor_plan`")))
    return plan


def _style(style: str, pattern: str, where: str) -> str:
    style = _SYNONYMS.get(style, style)
    try:
        parse_style(style)
    except (KeyError, ValueError):
        raise ConfigError(
            f"`parallel.tensor`: {where} cuts `{pattern}` as {style}, which is not built in",
            allowed=", ".join(STYLES),
            fix="leave tensor parallelism out: `parallel.mode: zero3` cuts every model",
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
            f"`parallel.tensor`: `{lone}` is cut as {plan[lone]}, and no layer is {missing} to put"
            " the parts together",
            fix=f"name the layer that comes {'after' if columns else 'before'} it as {missing}",
        )


def _chain(model: nn.Module) -> dict[str, str]:
    """Pairs Linear → element-wise activation → Linear. Only where the root is an nn.Sequential of
    nothing but layers and further nn.Sequentials: their forward is known, so between the two of a
    pair nobody else sees the cut activation."""
    from torch import nn

    if type(model) is not nn.Sequential:
        return {}
    seen = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    leaves = list(_leaves(model, ""))
    plan: dict[str, str] = {}
    start: tuple[str, Any] | None = None
    for name, layer in leaves:
        if type(layer) is nn.Linear and seen.count(id(layer)) == 1:
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
    return type(base_model(model)).__name__


def fitting_sizes(numbers: Iterable[int]) -> list[int]:
    """Sizes of the tensor axis that divide all ``numbers``."""
    common = math.gcd(*numbers)
    return [size for size in range(1, min(common, 1024) + 1) if common % size == 0]


def check_sizes(config_json: JsonObject, tensor: int) -> None:
    """From the numbers of a transformers model's config.json: can its layers be cut into ``tensor``
    parts? Silent where it does not say.

    Raises:
        ConfigError: heads, key_value heads or the intermediate size do not divide; says which sizes
            would.
    """
    number = partial(first_number, language_fields(config_json))
    heads = number("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
    keys = number("num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads
    sizes = {
        "attention heads": heads,
        "key_value heads": None if keys == 1 else keys,  # all ranks hold a single head
        "intermediate size": number("intermediate_size", "ffn_dim", "n_inner"),
    }
    refuse_sizes({name: size for name, size in sizes.items() if size}, tensor)


def refuse_sizes(sizes: Mapping[str, int], tensor: int) -> None:
    """Raise ConfigError where a number does not divide by ``tensor``."""
    wrong = {name: size for name, size in sizes.items() if size % tensor}
    if not wrong:
        return
    fitting = fitting_sizes(sizes.values())
    below = max([size for size in fitting if size <= tensor], default=1)
    raise ConfigError(
        f"`parallel.tensor: {tensor}` does not divide the model's "
        + ", ".join(f"{name} ({wrong[name]})" for name in wrong),
        allowed=f"{', '.join(map(str, fitting))}: what divides "
        + ", ".join(f"{name} ({size})" for name, size in sizes.items()),
        fix=(
            f"set `parallel.tensor: {below}`"
            if below > 1
            else "leave tensor parallelism out: `parallel.mode: zero3` cuts every model"
        ),
    )
