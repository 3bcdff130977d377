"""Wrappers for functions of transformers that it does not document.

If the installed transformers lacks one of them, or its arguments have changed, the wrapper raises a
ConfigError with the supported range.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import JsonValue

from paceline.core.errors import ConfigError

SUPPORTED = "transformers>=5.17,<6"


def load_generation_config(model: Any, name: str, trust_remote_code: bool) -> None:
    """Load the model's generation config, and its custom ``generate`` if it is trusted, from a
    folder or hub ID, as ``from_pretrained(name)`` does.

    Raises:
        ConfigError: this transformers has no such function, or it has other arguments.
    """
    arguments: dict[str, str | bool | None] = {
        "generation_config": None,
        "from_auto_class": True,
        "from_pipeline": None,
        "pretrained_model_name_or_path": name,
        "cache_dir": None,
        "force_download": False,
        "proxies": None,
        "local_files_only": False,
        "token": None,
        "revision": "main",
        "subfolder": "",
        "trust_remote_code": trust_remote_code,
    }
    load = getattr(model, "adjust_generation_fn", None)
    if load is None or not _accepts(load, arguments.keys()):
        raise _changed("adjust_generation_fn")
    load(**arguments)


@dataclass(frozen=True)
class NameMatch:
    """Which tensors of a model's files are weights of a model.

    Args:
        used: names in the model, by names in the files.
        unused: names of the other tensors, except for constants of the model.
        conversions: conversions of transformers with which ``save_pretrained`` writes the names of
            the files.
    """

    used: dict[str, str]
    unused: list[str]
    conversions: list[Any]


def match_names(model: Any, names: Iterable[str]) -> NameMatch:
    """Match the names of tensors in files to a model's weights, as ``from_pretrained`` does.

    Raises:
        ConfigError: this transformers has no functions for it.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            PrefixChange,
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:
        raise _changed("rename_source_key") from None
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    weights = model.state_dict()
    constants = {name for name, _ in model.named_buffers()}
    prefix = model.base_model_prefix
    used: dict[str, str] = {}
    unused: list[str] = []
    removed: set[str] = set()
    for name in names:
        full, _ = rename_source_key(name, renamings, converters)
        found, _ = rename_source_key(name, renamings, converters, prefix, weights)
        if found not in weights and name in weights:
            full, found = name, rename_source_key(name, [], [], prefix, weights)[0]
        if found in weights:
            used[name] = found
            removed.add(full.removesuffix(found).removesuffix("."))
        elif found not in constants:
            unused.append(name)
    applied = [entry for entry in conversions if entry.was_used()]
    if len(removed) == 1 and (common := removed.pop()):  # the model is a part of the files' model
        applied.append(PrefixChange(prefix_to_remove=common))
    return NameMatch(used, unused, applied)


def set_conversions(model: Any, conversions: Sequence[Any]) -> None:
    """Set the conversions that ``save_pretrained`` reverses in the names and values of weights."""
    model._weight_conversions = list(conversions)


def _changed(name: str) -> ConfigError:
    return ConfigError(
        "transformers {version} has no `{function}` with the arguments that Paceline passes",
        code="changed-in-transformers",
        allowed=SUPPORTED,
        fix="run `pip install '{supported}'`",
        version=version("transformers"),
        function=name,
        supported=SUPPORTED,
    )


def cache_argument(model: Any) -> str:
    """Return the name of the argument of a model's forward pass for the keys and values of earlier
    tokens, which is also the name of this field of its output: ``cache`` since transformers 5.24,
    ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _accepts(function: Callable[..., Any], names: Set[str]) -> bool:
    """Return whether a function has arguments of all these names, and requires no others."""
    parameters = inspect.signature(function).parameters
    required = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    return required <= names <= parameters.keys()


def batching_obstacle(fields: Mapping[str, JsonValue]) -> str | None:
    """Return why transformers' continuous batching cannot generate with a model, or None. A model
    that this transformers does not know has no obstacle here.

    Args:
        fields: content of the model's ``config.json``.
    """
    try:
        from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
    except ImportError:
        raise _changed("group_layers_by_attn_type") from None
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = str(fields.get("model_type"))
    if kind not in CONFIG_MAPPING or "auto_map" in fields:
        return None
    config = CONFIG_MAPPING[kind].from_dict(dict(fields))
    of_text = config.get_text_config()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model_class.is_backend_compatible():
        return f"models of the type {kind} compute attention in their own way"
    if getattr(of_text, "kv_lora_rank", None):
        return "keys and values are compressed (multi-head latent attention)"
    try:
        group_layers_by_attn_type(of_text)
    except ValueError:
        types = sorted({*of_text.layer_types} - {"full_attention", "sliding_attention"})
        return f"the model has layers of the type {', '.join(types)}"
    return None
