"""Adapters of several runs on one base model: which of them can share it, and how they are
loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from paceline.core.errors import ConfigError, first_line
from paceline.inference.chat_encoder import ChatEncoder
from paceline.inference.loading import (
    check_adapter_weights,
    model_folder,
    processor_of,
    run_config,
)
from paceline.models.json_config import read_object

#: Name of the model without adapters.
BASE = "base"
_LONGEST_REASON = 300
_ADAPTER_FILE = "adapter_config.json"
#: Initial values of adapters that leave the weights of the base as they are, as peft writes them.
_SEPARATE_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


def run_name(run: Path) -> str:
    """Return the name of a run: the name of its folder."""
    folder = run.resolve()
    is_model = folder.name == "model" and (folder.parent / "config.yaml").is_file()
    return folder.parent.name if is_model else folder.name


def check_shared_base(run: Path, adapters: Mapping[str, Path]) -> bool:
    """Check that the model of a run and adapters of other runs can share a base model. Return
    whether the base itself can answer too.

    Args:
        adapters: the runs by the names of their adapters.

    Raises:
        ConfigError: a name is used twice, or an adapter cannot share the base.
    """
    folder = model_folder(run)
    own = read_object(folder / _ADAPTER_FILE)
    _check_names(run, adapters, own is not None)
    obstacle = None if own is None else _obstacle(folder, own)
    if adapters and obstacle is not None:
        raise _not_shared(run_name(run), obstacle)
    for name, adapter in adapters.items():
        _check_adapter(name, model_folder(adapter), folder)
    return obstacle is None


def _check_names(run: Path, adapters: Mapping[str, Path], is_adapter: bool) -> None:
    name = run_name(run)
    taken = {BASE, name}
    for each in [*adapters, *([name] if is_adapter and name == BASE else [])]:
        if each in taken:
            raise ConfigError(
                "the name `{name}` would stand for two models",
                code="model-name-taken",
                fix="choose another name with `--adapter NAME=RUN`, or rename the folder of the"
                " run",
                name=each,
            )
        taken.add(each)


def _check_adapter(name: str, adapter: Path, served: Path) -> None:
    settings = read_object(adapter / _ADAPTER_FILE)
    if settings is None:
        raise ConfigError(
            "`--adapter {name}={folder}` is not an adapter: it is a complete model",
            code="not-an-adapter",
            allowed="runs with LoRA",
            fix="serve it with a `paceline serve` of its own",
            name=name,
            folder=adapter,
        )
    check_adapter_weights(adapter)
    base, own = base_folder(adapter), base_folder(served)
    if not _is_same_model(base, own):
        raise ConfigError(
            "the adapter `{name}` belongs to another base model: {base}, not {own}",
            code="adapter-of-another-base",
            fix="serve it with a `paceline serve` of its own",
            name=name,
            base=base,
            own=own,
        )
    obstacle = _obstacle(adapter, settings)
    if obstacle is None and _quantization(adapter) != _quantization(served):
        obstacle = "the weights of its base model were quantized in another way"
    if obstacle is not None:
        raise _not_shared(name, obstacle)


def _not_shared(name: str, obstacle: str) -> ConfigError:
    return ConfigError(
        "the adapter `{name}` cannot share the base model: {obstacle}",
        code="adapter-not-shared",
        fix="serve it alone, or merge it with `paceline export RUN --merge`",
        name=name,
        obstacle=obstacle,
    )


def _obstacle(folder: Path, settings: Mapping[str, JsonValue]) -> str | None:
    """Return why other models cannot use the base of an adapter; None if they can."""
    if settings.get("modules_to_save") or settings.get("trainable_token_indices"):
        return "it replaces whole layers or tokens of the base model"
    if settings.get("bias") not in (None, "none"):
        return "it has biases of its own"
    if settings.get("init_lora_weights", True) not in _SEPARATE_INITS:
        return "its initial values are taken out of the base model"
    if _has_new_tokens(folder):
        return "it has new tokens"
    return None


def _quantization(folder: Path) -> tuple[object, ...]:
    """Return the settings by which the weights of the base model were rounded."""
    config = run_config(folder)
    if config is None or config.lora.quantize == "none":
        return ("none",)
    lora = config.lora
    return (lora.quantize, lora.double_quant, config.train_args.mixed_dtype)


def _has_new_tokens(folder: Path) -> bool:
    """Return whether the tokenizer of an adapter has tokens that its base model does not have."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        num_tokens = len(AutoTokenizer.from_pretrained(str(folder)))
        config = AutoConfig.from_pretrained(str(base_folder(folder)))
    except (OSError, ValueError) as error:
        raise _tokenizer_not_loaded(folder, error) from error
    return num_tokens > int(config.get_text_config().vocab_size)


def _tokenizer_not_loaded(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "the tokenizer in {folder}, or the config of its model, cannot be loaded: {reason}",
        code="served-tokenizer-not-loaded",
        fix="check the files of the model",
        folder=folder,
        reason=first_line(error),
    )


def base_folder(folder: Path) -> Path:
    """Return the folder of the base model of an adapter, or the folder itself of a complete
    model."""
    settings = read_object(folder / _ADAPTER_FILE)
    return folder if settings is None else Path(str(settings["base_model_name_or_path"]))


def _is_same_model(folder: Path, other: Path) -> bool:
    """Return whether two folders are the same, or have the same files of weights."""
    if folder.resolve() == other.resolve():
        return True
    files, others = _weight_files(folder), _weight_files(other)
    if not files or [(file.name, file.stat().st_size) for file in files] != [
        (file.name, file.stat().st_size) for file in others
    ]:
        return False
    return all(_digest(file) == _digest(other) for file, other in zip(files, others, strict=True))


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _digest(file: Path) -> bytes:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


def stored_encoder(folder: Path, is_vision: bool) -> tuple[ChatEncoder, Any]:
    """Return what encodes the chats of the model or adapter in a folder, and transformers' settings
    of its answers.

    Raises:
        ConfigError: its tokenizer or processor cannot be loaded.
    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        holders = [folder, base_folder(folder)]
        with_file = [each for each in holders if (each / "generation_config.json").is_file()]
        if with_file:
            settings = transformers.GenerationConfig.from_pretrained(str(with_file[0]))
        else:
            config = transformers.AutoConfig.from_pretrained(str(holders[-1]))
            settings = transformers.GenerationConfig.from_model_config(config)
    except (OSError, ValueError) as error:
        raise _tokenizer_not_loaded(folder, error) from error
    return ChatEncoder(tokenizer, processor_of(folder) if is_vision else None), settings


def load_adapter(model: Any, name: str, folder: Path, adapter: str) -> Any:
    """Return the model with one more adapter.

    Args:
        name: name of the adapter for messages.
        folder: folder of the adapter.
        adapter: name of the adapter for peft.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    try:
        if not hasattr(model, "peft_config"):
            return PeftModel.from_pretrained(
                model, str(folder), adapter_name=adapter, torch_device="cpu"
            )
        model.load_adapter(str(folder), adapter_name=adapter, torch_device="cpu")
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        # the first line of torch's message does not say what is wrong
        raise _not_shared(name, " ".join(str(error).split())[:_LONGEST_REASON]) from error
    return model
