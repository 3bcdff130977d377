"""Wrappers for functions of transformers that it does not document.

If the installed transformers lacks one of them, or its arguments have changed, the wrapper raises a
ConfigError with the supported range.
"""

import inspect
from collections.abc import Callable, Set
from importlib.metadata import version
from typing import Any

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
        raise ConfigError(
            "transformers {version} has no `adjust_generation_fn` with the arguments that Paceline"
            " passes",
            code="changed-in-transformers",
            allowed=SUPPORTED,
            fix="run `pip install '{supported}'`",
            version=version("transformers"),
            supported=SUPPORTED,
        )
    load(**arguments)


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
