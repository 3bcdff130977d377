"""Load and save models of transformers that read text: causal language models, and those with
another head."""

from __future__ import annotations

import logging
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, first_line
from paceline.core.hub import go_offline_if_unreachable
from paceline.models import qwen
from paceline.models.blocks import base_model
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import (
    config_folder,
    download_config,
    known_ids,
    read_config,
    read_raw_config,
)
from paceline.models.kernels.liger import install_liger
from paceline.models.kinds import VISION_LANGUAGE, ModelKind, kind_of
from paceline.models.positions import check_length
from paceline.models.vision.parts import freeze_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch import nn

_DOWNLOAD = "download the model where there is a network and set `model=/path/to/folder`"


def load_language_model(config: Config, kind: ModelKind | None = None) -> nn.Module:
    """Load the model to train, on the CPU, or build it if the default device is the meta device.

    Weights are float32, unless their conversion is deferred (see
    :mod:`paceline.models.weights.load`). With ``precision: bf16-true``, weights are bfloat16. With
    LoRA and mixed precision, the frozen weights have the compute dtype, and the added adapters are
    float32.

    Raises:
        ConfigError: the model cannot be loaded, or frozen weights are not finite in float16.
    """
    import torch
    import transformers

    from paceline.models import attention
    from paceline.models.new_tokens import add_token_embeddings
    from paceline.models.weights.load import load_pretrained

    kind = kind or kind_of(config)
    if torch.get_default_device().type == "meta":
        return language_model_on_meta(config, kind=kind)
    name = str(Path(resolve_model(config.model)).expanduser())
    go_offline_if_unreachable(name)
    if (original := qwen_folder(name)) is not None:
        qwen.check_length(config, read_raw_config(str(original)))
        name = str(qwen.converted_folder(original))
    low = getattr(torch, config.train_args.mixed_dtype or "float32")
    trained = getattr(torch, config.train_args.weight_dtype)
    dtype = low if config.lora.enable else trained
    try:
        model_config = transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=config.trust_remote_code, **kind.settings
        )
        model: Any = load_pretrained(
            getattr(transformers, kind.auto_class),
            name,
            config=model_config,
            dtype=dtype,
            shares=config.lora.enable and not kind.has_new_head,
            ignore_mismatched_sizes=kind.has_new_head,
            trust_remote_code=config.trust_remote_code,
            **attention.own_attention(config),
        )
    except (OSError, ValueError, ImportError) as error:
        if _is_about_attention(config, error):
            raise attention.unsupported_attention(config) from error
        raise ConfigError(
            "`model: {model}` cannot be loaded as a {kind}: {reason}",
            code="model-not-loaded",
            allowed="a folder with config.json and weights, a hub id that this machine can"
            " download, or builtin:qwen2-tiny",
            fix=_DOWNLOAD,
            model=config.model,
            kind=kind.noun,
            reason=first_line(error),
        ) from error
    if not kind.has_new_head:
        _check_weights(model, config)
    check_length(config, model.config.to_dict())
    attention.check_model_attention(config, model)
    add_token_embeddings(model, config)
    if config.train_args.use_liger_kernel:
        install_liger(model, config)
    model.config.use_cache = False
    if kind is VISION_LANGUAGE:
        freeze_parts(model, config)
    if not config.lora.enable:
        return model  # type: ignore[no-any-return]
    check_finite(model, config)
    from paceline.models.adapters.lora import add_adapters
    from paceline.models.adapters.quantize import quantize_layers

    quantize_layers(model, config)
    return add_adapters(model, config)


def _check_weights(model: nn.Module, config: Config) -> None:
    """Raise ConfigError if weights of a model are not in its files."""
    from paceline.models.weights.load import absent_weights

    absent = absent_weights(model)
    if absent:
        raise ConfigError(
            "`model: {model}`: {num_weights:weight} of the model, such as `{example}`, are not in"
            " its files, so training would start from random values",
            code="weights-not-in-files",
            fix="check that the folder is complete, and that config.json belongs to its weights",
            model=config.model,
            num_weights=len(absent),
            example=absent[0],
        )


def language_model_on_meta(
    config: Config,
    device: str | torch.device = "meta",
    kind: ModelKind | None = None,
    before_adapters: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """Build the model of :func:`load_language_model` on the meta device, from its config.json.

    Args:
        device: another device; for fake tensors, which have no values either.
        before_adapters: may change the model before it gets adapters.

    Raises:
        ConfigError: there is no config.json, or transformers does not support the model.
    """
    import torch
    import transformers

    from paceline.models import attention
    from paceline.models.adapters.lora import add_adapters
    from paceline.models.adapters.quantize import quantize_layers
    from paceline.models.new_tokens import add_token_embeddings, check_token_embeddings
    from paceline.models.transforms.parameters import freeze_parameters
    from paceline.models.weights.dequantize import without_quantization
    from paceline.models.weights.release import release_of

    args, kind = config.train_args, kind or kind_of(config)
    name = str(Path(resolve_model(config.model)).expanduser())
    low = getattr(torch, args.mixed_dtype or "float32")
    with _quiet():
        try:
            model_config = _config_of(name, config.trust_remote_code)
            if release_of(name) is not None:
                model_config = without_quantization(model_config)
            model_config.update(dict(kind.settings))
            with torch.device(device):
                model: Any = getattr(transformers, kind.auto_class).from_config(
                    model_config,
                    dtype=low if config.lora.enable else getattr(torch, args.weight_dtype),
                    trust_remote_code=config.trust_remote_code,
                    **attention.own_attention(config),
                )
                attention.check_model_attention(config, model)
                add_token_embeddings(model, config)
                if config.train_args.use_liger_kernel:
                    install_liger(model, config)
                if kind is VISION_LANGUAGE:
                    freeze_parts(model, config)
                before_adapters(model)
                if config.lora.enable:
                    quantize_layers(model, config)
                    model = add_adapters(model, config, read_weights=False)
                freeze_parameters(model, args)
                check_token_embeddings(model, config)
        except ConfigError:
            raise
        except Exception as error:  # transformers raises many types for an inconsistent config.json
            if _is_about_attention(config, error):
                raise attention.unsupported_attention(config) from error
            raise ConfigError(
                "`model: {model}` cannot be built from its config.json: {reason}",
                code="unusable-model-config",
                allowed="a folder with the config.json of a {kind}, one of the {num_known_ids} hub"
                " ids whose config.json is part of Paceline, another hub id that can be"
                " downloaded, or builtin:qwen2-tiny",
                fix="check the name; without a network give a folder with the model's config.json:"
                " `model=/path/to/folder`",
                model=config.model,
                reason=first_line(error),
                kind=kind.noun,
                num_known_ids=len(known_ids()),
            ) from error
    return model  # type: ignore[no-any-return]


def _is_about_attention(config: Config, error: Exception) -> bool:
    """Return whether transformers rejects the attention that the config requests."""
    return config.train_args.attn_implementation != "auto" and "attention" in str(error).lower()


def _config_of(name: str, trust_remote_code: bool) -> Any:
    """Return the transformers config of a folder or hub ID, which is downloaded only if
    necessary."""
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
    return AutoConfig.for_model(str(content.pop("model_type")), **content)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress library warnings that the user cannot act on."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)


def check_finite(model: nn.Module, config: Config) -> None:
    """Raise ConfigError if float16 weights are not finite. The largest float16 number is 65,504."""
    import torch

    if config.train_args.mixed_dtype != "float16":
        return
    overflowed = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float16 and not bool(parameter.detach().isfinite().all())
    ]
    if overflowed:
        names = ", ".join(overflowed[:5])
        if len(overflowed) > 5:
            names += f" and {len(overflowed) - 5} more"
        raise ConfigError(
            "`precision: fp16-mixed`: frozen weights of `{model}` are not finite in float16, whose"
            " largest number is 65,504: {names}",
            code="weights-exceed-float16",
            allowed="`precision: bf16-mixed` (slow on V100 and T4, which emulate it) or"
            " `precision: 32`",
            fix="set `train_args.precision: bf16-mixed`, or `32` if there is enough memory; if the"
            " weights in the model's files are not finite either, replace the files",
            model=config.model,
            names=names,
        )


def check_first_generation_qwen(config: Config) -> None:
    """Check a first-generation Qwen model before a run starts. Other models pass.

    Raises:
        ConfigError: the model cannot be converted or has no safetensors files, or ``max_length``
            exceeds the length that it was trained on.
    """
    content = read_raw_config(resolve_model(config.model))
    if not qwen.is_qwen(content):
        return
    read_config(resolve_model(config.model))
    qwen.check_length(config, content)
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        qwen.check_weights(folder)


def qwen_folder(name: str) -> Path | None:
    """Return the local folder of a first-generation Qwen model in its original form, or None for
    other models. If ``name`` is a hub ID, the model is downloaded.

    Raises:
        ConfigError: the model cannot be downloaded.
    """
    if read_raw_config(name) is None and not Path(name).expanduser().exists():
        download_config(name)
    if not qwen.is_qwen(read_raw_config(name)):
        return None
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    patterns = [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "qwen.tiktoken",
        "*.safetensors",
    ]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # each client library has its own network errors
        try:
            return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        except Exception:
            raise ConfigError(
                "`model: {name}` cannot be downloaded: {reason}",
                code="qwen-download-failed",
                allowed="a folder with the original repository's config.json, qwen.tiktoken and"
                " *.safetensors",
                fix=_DOWNLOAD,
                name=name,
                reason=first_line(error),
            ) from error


def add_stop_tokens(model: Any, tokens: Iterable[int]) -> None:
    """Let generation also end at these tokens, in ``generation_config.json``."""
    settings = getattr(base_model(model), "generation_config", None)
    if settings is None:
        return
    known = settings.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    if added := [token for token in dict.fromkeys(tokens) if token not in known]:
        ends = [*known, *added]
        settings.eos_token_id = ends[0] if len(ends) == 1 else ends


def save_language_model(
    model: Any, tokenizer_path: str | None, folder: Path, base: str | None = None
) -> None:
    """Write weights, config, settings of generation and tokenizer in the format that
    ``transformers`` (or, with adapters, ``peft``) loads.

    Args:
        base: model that it was trained from, whose other weights are written as well; None for a
            model that has another head.
    """
    use_cache = getattr(model.config, "use_cache", None)
    model.config.use_cache = True
    try:
        if hasattr(model, "peft_config"):
            from paceline.models.adapters.initialization import portable_state

            with portable_state(model) as state:
                # "auto" would query the hub to find out whether the vocabulary of the base model
                # has changed. If it has, its
                # embeddings are among the modules that are trained in full.
                model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
            if (settings := getattr(base_model(model), "generation_config", None)) is not None:
                settings.to_json_file(folder / "generation_config.json")
        elif base is None:
            model.save_pretrained(str(folder))
        else:
            from paceline.models.weights.keep_base import save_trained

            save_trained(model, folder, str(Path(resolve_model(base)).expanduser()))
    finally:
        model.config.use_cache = use_cache
    if tokenizer_path is not None:
        copy_tokenizer(tokenizer_path, folder)


def copy_processor(source: Path, folder: Path) -> None:
    """Copy the files of a vision-language model's processor, except its tokenizer's files."""
    for file in source.glob("*processor_config.json"):
        shutil.copyfile(file, folder / file.name)


def copy_tokenizer(source: str, folder: Path) -> None:
    """Write the tokenizer's files: copy them from a folder, or let transformers save them for a hub
    ID."""
    path = Path(source).expanduser()
    if not path.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(str(folder))
        return
    for pattern in (
        "tokenizer*",
        "special_tokens_map.json",
        "vocab*",
        "merges.txt",
        "added_tokens.json",
        "chat_template*",
        "*.model",
    ):
        for file in path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
