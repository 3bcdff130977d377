"""A model without its weights: built on torch's meta device, where a tensor has a shape and takes
no memory."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, first_line
from paceline.core.hub import go_offline_if_unreachable
from paceline.models import qwen
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import config_folder, download_config, known_ids, read_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def language_model_on_meta(config: Config) -> nn.Module:
    """The model as :func:`paceline.models.language.load_language_model` gives it, adapters and
    precision included, without values. Needs its config.json alone.

    Raises:
        ConfigError: there is none, or transformers knows no such model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from paceline.models.lora import add_adapters

    args = config.train_args
    name = str(Path(resolve_model(config.model)).expanduser())
    low = getattr(torch, args.mixed_dtype or "float32")
    with _quiet():
        try:
            found = _config_of(name, config.trust_remote_code)
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(
                    found,
                    dtype=low if config.lora.enable else torch.float32,
                    trust_remote_code=config.trust_remote_code,
                )
                if config.lora.enable:
                    model = add_adapters(model, config, read_weights=False)
        except ConfigError:
            raise
        except (
            Exception
        ) as error:  # transformers raises what it likes on a config.json that does not fit together
            raise ConfigError(
                f"`model: {config.model}` cannot be laid out from its config.json:"
                f" {first_line(error)}",
                allowed=(
                    "a folder with the config.json of a causal language model, one of the"
                    f" {len(known_ids())} hub ids whose config.json comes with Paceline, another"
                    " hub id if it can be downloaded, or builtin:qwen2-tiny"
                ),
                fix=(
                    "check the name; without a network give a folder with the model's config.json:"
                    " `model=/path/to/folder`"
                ),
            ) from error
    return model  # type: ignore[no-any-return]


def _config_of(name: str, trust_remote_code: bool) -> Any:
    """The transformers config of a folder or hub id, from the hub only if nothing here has it."""
    from transformers import AutoConfig

    content = read_config(name)
    if content is None:
        go_offline_if_unreachable(name)
        download_config(name)
        content = read_config(name)
    folder = config_folder(name)
    if content is None or (folder is not None and qwen.CONVERTED_KEY not in content):
        return AutoConfig.from_pretrained(
            name if folder is None else str(folder), trust_remote_code=trust_remote_code
        )
    return AutoConfig.for_model(**content)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of libraries about what nobody here could change."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)
