"""Which layers tensor parallelism cuts, and how: read from the model's own plan, the user's, or a plain chain of layers.

Importing this imports no torch: what follows from names and sizes alone serves the launcher and the cost too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import nn

COLUMN, ROW = "colwise", "rowwise"
#: Column-parallel with the output put together again; row-parallel with an input that every rank has whole.
COLUMN_GATHERED, ROW_SPLIT = "colwise_gather_output", "rowwise_split_input"
#: A module kept whole that sees the cut part of an activation (a norm over each head): its gradient is a sum over the ranks.
SUMMED = "replicated_with_grad_allreduce"
STYLES = (COLUMN, ROW, COLUMN_GATHERED, ROW_SPLIT, SUMMED)
_SYNONYMS = {"colwise_rep": COLUMN_GATHERED, "rowwise_rep": ROW_SPLIT}
#: Of embeddings and heads: they stay whole on each rank, which is right with or without a plan.
_LEFT_WHOLE = ("embedding_rowwise", "embedding_colwise", "replicate")
_PEFT_PREFIX = "base_model.model."


def find_tensor_plan(model: nn.Module, given: Mapping[str, str]) -> dict[str, str]:
    """Dotted name of each module that is cut → its style (one of :data:`STYLES`), in the model's order.

    Args:
        model: as the task built it, LoRA included; on any device, meta too.
        given: ``parallel.tensor_plan``: pattern → style. A pattern is a dotted name in which ``*`` stands for one part of
            it, with or without the prefix of the base model. It goes before the model's own plan.

    Raises:
        ConfigError: no plan, a style that cannot be had, or a pattern that fits nothing.
    """
    names = {name: one for name, one in model.named_modules() if name}
    plan = _own_plan(model, names)
    plan.update(_given_plan(model, names, given))
    if not any(style in (COLUMN, COLUMN_GATHERED, ROW, ROW_SPLIT) for style in plan.values()):
        plan.update(_chain(model))
    if not plan:
        raise ConfigError(
            f"`parallel.tensor`: {_class_name(model)} does not say how its layers are cut (a module without a plan)",
            allowed="transformers' models that have a base_model_tp_plan; an nn.Sequential with Linear → activation → Linear; "
            "or a plan in the config",
            fix="name pairs of layers, the first cut by rows of its weight, the second by columns: "
            "`parallel.tensor_plan: {layers.*.up: colwise, layers.*.down: rowwise}`",
        )
    _check_pairs(plan)
    return {name: plan[name] for name in names if name in plan}


def _own_plan(model: nn.Module, names: Mapping[str, nn.Module]) -> dict[str, str]:
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    prefix = _PEFT_PREFIX if inner is not model else ""
    own = getattr(inner, "_tp_plan", None) or {}
    if not own and getattr(getattr(inner, "config", None), "base_model_tp_plan", None):
        before = getattr(inner, "base_model_prefix", "")
        before = f"{before}." if before and hasattr(inner, before) else ""
        own = {before + key: style for key, style in inner.config.base_model_tp_plan.items()}
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    parameters = [name for name, _ in model.named_parameters()]
    plan = {}
    for pattern, style in own.items():
        found = _matching(prefix + pattern, names)
        if style in _LEFT_WHOLE or (
            style in (COLUMN_GATHERED, "colwise_rep", ROW_SPLIT) and any(names[one] is head for one in found)
        ):
            continue
        if not found and not _matching(prefix + pattern, parameters):
            continue
        plan.update(dict.fromkeys(found, _style(style, pattern, "the model's own plan")))
    return plan


def _given_plan(model: nn.Module, names: Mapping[str, nn.Module], given: Mapping[str, str]) -> dict[str, str]:
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = getattr(inner, "base_model_prefix", "") or ""
    prefixes = {"", _PEFT_PREFIX, f"{before}.", f"{_PEFT_PREFIX}{before}."}
    plan = {}
    for pattern, style in given.items():
        found = sorted({one for prefix in prefixes for one in _matching(prefix + pattern, names)})
        if not found:
            near = nearest(pattern, {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})
            raise ConfigError(
                f"`parallel.tensor_plan`: `{pattern}` is no module of {_class_name(model)}",
                allowed="dotted names of modules, `*` for one part of a name",
                fix=f"write `{near}`" if near else None,
            )
        plan.update(dict.fromkeys(found, _style(style, pattern, "`parallel.tensor_plan`")))
    return plan


def _style(style: str, pattern: str, where: str) -> str:
    style = _SYNONYMS.get(style, style)
    if style not in STYLES:
        raise ConfigError(
            f"`parallel.tensor`: {where} cuts `{pattern}` as {style}, which is not built in (fused or packed weights, experts)",
            allowed=", ".join(STYLES),
            fix="leave tensor parallelism out: `parallel.mode: zero3` cuts every model",
        )
    return style


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def _check_pairs(plan: Mapping[str, str]) -> None:
    columns = [name for name, style in plan.items() if style == COLUMN]
    rows = [name for name, style in plan.items() if style == ROW]
    if bool(columns) != bool(rows):
        lone, missing = (columns[0], ROW) if columns else (rows[0], COLUMN)
        raise ConfigError(
            f"`parallel.tensor`: `{lone}` is cut as {plan[lone]}, and no layer is {missing} to put the parts together",
            fix=f"name the layer that comes {'after' if columns else 'before'} it as {missing}",
        )


def _chain(model: nn.Module) -> dict[str, str]:
    """Pairs Linear → element-wise activation → Linear. Only where the root is an nn.Sequential of nothing but layers and
    further nn.Sequentials: their forward is known, so between the two of a pair nobody else sees the cut activation."""
    from torch import nn

    if type(model) is not nn.Sequential:
        return {}
    seen = [id(one) for _, one in model.named_modules(remove_duplicate=False)]
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
        "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Tanh Sigmoid LogSigmoid Softplus Softsign Hardtanh Hardswish "
        "Hardsigmoid Identity"
    )
    return tuple(getattr(nn, name) for name in names.split())


def _class_name(model: Any) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__


# -- what follows from names and sizes alone ----------------------------------------------------------------------------------
def cut_dim(parameter: str, dims: int, plan: Mapping[str, str]) -> int | None:
    """Along which dimension a parameter is cut; None where each rank keeps it whole.

    A column layer: rows of the weight and its bias; of LoRA beside it lora_B alone. A row layer: columns of the weight; of LoRA
    lora_A alone.
    """
    _, kind, leaf = _owner(parameter, plan)
    if kind in (COLUMN, COLUMN_GATHERED):
        return None if leaf == "lora_A" else 0
    if kind in (ROW, ROW_SPLIT):
        return None if leaf == "lora_B" or dims < 2 else 1
    return None


def is_summed(parameter: str, plan: Mapping[str, str]) -> bool:
    """True where the parameter is kept whole and each tensor rank has a part of its gradient."""
    return _owner(parameter, plan)[1] == SUMMED


def _owner(parameter: str, plan: Mapping[str, str]) -> tuple[str, str, str]:
    """(module of the plan that holds a parameter, its style, "lora_A" or "lora_B" of an adapter); empty where none."""
    parts = parameter.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if module in plan:
            return module, plan[module], parts[end] if parts[end] in ("lora_A", "lora_B") else ""
    return "", "", ""


def fitting_sizes(numbers: Iterable[int]) -> list[int]:
    """Sizes of the tensor axis that divide all ``numbers``."""
    common = reduce(math.gcd, numbers, 0)
    return [size for size in range(1, min(common, 1024) + 1) if common % size == 0]


def check_sizes(config_json: Mapping[str, Any], tensor: int) -> None:
    """From the numbers of a transformers model's config.json: can its layers be cut into ``tensor`` parts? Silent where it
    does not say.

    Raises:
        ConfigError: heads, key_value heads or the intermediate size do not divide; says which sizes would.
    """
    text = config_json.get("text_config")
    numbers = text if isinstance(text, Mapping) else config_json
    heads = _first(numbers, "num_attention_heads", "n_head", "num_heads", "n_heads")
    sizes = {
        "attention heads": heads,
        "key_value heads": _first(numbers, "num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads,
        "intermediate size": _first(numbers, "intermediate_size", "ffn_dim", "n_inner"),
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
        f"`parallel.tensor: {tensor}` does not divide the model's " + ", ".join(f"{name} ({wrong[name]})" for name in wrong),
        allowed=f"{', '.join(map(str, fitting))}: what divides "
        + ", ".join(f"{name} ({size})" for name, size in sizes.items()),
        fix=f"set `parallel.tensor: {below}`"
        if below > 1
        else "leave tensor parallelism out: `parallel.mode: zero3` cuts every model",
    )


def _first(numbers: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        if isinstance(numbers.get(name), int):
            return int(numbers[name])
    return None
