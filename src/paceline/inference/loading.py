"""Load the model of a run, and what encodes its chats."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, first_line
from paceline.inference.chat_encoder import ChatEncoder
from paceline.models.blocks import base_model
from paceline.models.kinds import LANGUAGE, VISION_LANGUAGE, saved_kind
from paceline.models.language import qwen_folder
from paceline.models.qwen import CONVERTED_KEY, converted_folder

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.data.vision_language.images import ImageProcessor

_TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt",
)  # fmt: skip


def model_folder(run: Path) -> Path:
    """Return the model folder of ``run``: its ``model/``, or ``run`` itself if it is a model or an
    adapter.

    Raises:
        ConfigError: there is none.
    """
    for folder in (run / "model", run):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return folder
    raise ConfigError(
        "{run} contains no model" if run.exists() else "{run} does not exist",
        code="no-model-in-run",
        allowed="the folder of a finished run (with model/ in it), or one of save_pretrained",
        fix="let the run finish: the same training command resumes it"
        if run.exists()
        else "check the path",
        run=run,
    )


def load_generator(run: Path) -> tuple[Any, ChatEncoder]:
    """Return the model of :func:`load_model`, and what encodes its chats.

    Raises:
        ConfigError: the model is of another kind, or its processor cannot be loaded.
    """
    kind = saved_kind(folder := model_folder(run))
    if kind not in (LANGUAGE, VISION_LANGUAGE):
        raise ConfigError(
            "the model in {folder} is a {kind}; questions can be put only to causal language"
            " models and vision-language models",
            code="not-a-language-model",
            allowed="the folder of a run with `task: sft` or `task: pretrain`",
            fix="load it with `transformers.{auto_class}`; run `paceline export RUN --merge` first"
            " if it is an adapter",
            folder=folder,
            kind=kind.noun,
            auto_class=kind.auto_class,
        )
    processor = processor_of(folder) if kind == VISION_LANGUAGE else None
    model, tokenizer = load_model(run)
    return model, ChatEncoder(tokenizer, processor)


def processor_of(folder: Path) -> ImageProcessor:
    """Return the processor of a vision-language model with the settings of its training.

    Raises:
        ConfigError: the folder has none.
    """
    from paceline.data.vision_language.images import load_processor

    config = run_config(folder)
    if config is None:
        return load_processor(folder, None, False)
    return load_processor(folder, config.vision.max_pixels, config.trust_remote_code)


def quiet_transformers() -> None:
    """Suppress the progress of loading, its report of weights, which :func:`load_model` checks, and
    warnings that users cannot act on."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")


def load_model(run: Path, dtype: str = "auto", part: Path | None = None) -> tuple[Any, Any]:
    """Return (model in eval mode on the CPU, tokenizer), with adapters on their base model.

    Optional packages that the config of the run does not use are hidden from this process, because
    they take long to import and print messages.

    Args:
        part: folder with the files of the base model that are still there, for adapters.

    Raises:
        ConfigError: the model cannot be loaded, or ``part`` lacks some of its weights.
    """
    import transformers

    from paceline.config.packages import unused_packages
    from paceline.core.user_code import hide_packages
    from paceline.models.weights.load import load_pretrained

    quiet_transformers()
    folder = model_folder(run)
    kind = saved_kind(folder)
    config = run_config(folder)
    if config is not None:
        hide_packages(unused_packages(config))
    if (folder / "config.json").is_file() and (original := qwen_folder(str(folder))) is not None:
        folder = converted_folder(original)
    base = folder
    if (folder / "adapter_config.json").is_file():
        check_adapter_weights(folder)
        base = Path(
            json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        )
    name = str(base)
    if part is not None and base != folder:
        base = part
    trusts_code = config is not None and config.trust_remote_code
    trust: dict[str, bool] = {"trust_remote_code": True} if trusts_code else {}
    is_rounded = base != folder and config is not None and config.lora.quantize != "none"
    try:
        model: Any = load_pretrained(
            getattr(transformers, kind.auto_class),
            str(base),
            dtype="auto" if is_rounded else dtype,  # as the training has read what it quantized
            ignore_mismatched_sizes=kind.has_new_head,
            **trust,
            **kind.settings,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            tokenizer_name(folder, name), **trust
        )
        if not kind.has_new_head:
            _check_complete(model, name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the model in {folder} cannot be loaded as a {kind}: {reason}",
            code="trained-model-not-loaded",
            fix="check that {base} exists" if base != folder else None,
            folder=folder,
            kind=kind.noun,
            reason=first_line(error),
            base=base,
        ) from error
    if base != folder:
        if config is not None:
            _round_base(model, config, dtype)
        from peft import PeftModel

        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # as peft does it
        if (
            folder / "generation_config.json"
        ).is_file():  # what the adapters were trained to end with
            model.generation_config = transformers.GenerationConfig.from_pretrained(str(folder))
        model = PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
    return model.eval(), tokenizer


def check_adapter_weights(folder: Path) -> None:
    """Raise ConfigError if an adapter has no file of weights: peft would ask the hub for one."""
    names = ("adapter_model.safetensors", "adapter_model.bin")
    if not any((folder / name).is_file() for name in names):
        raise ConfigError(
            "the adapter in {folder} has no weights: {name} is not there",
            code="adapter-weights-gone",
            fix="restore the file, or train the adapter again",
            folder=folder,
            name=names[0],
        )


def tokenizer_name(folder: Path, base: str) -> str:
    """Return the folder or hub ID of a model's tokenizer: the base model's if the folder of an
    adapter has none, as peft writes it."""
    return str(folder) if any((folder / name).is_file() for name in _TOKENIZER_FILES) else base


def _check_complete(model: Any, name: str) -> None:
    """Raise ConfigError if weights of a model are not in its files."""
    from paceline.models.weights.load import absent_weights

    absent = absent_weights(model)
    if absent:
        raise ConfigError(
            "{num_weights:weight} of the model {model} are not in its files: {examples}",
            code="base-weights-gone",
            fix="restore the model's files, and check that config.json belongs to them",
            model=name,
            num_weights=len(absent),
            examples=", ".join(absent[:3]),
        )


def run_config(folder: Path) -> Config | None:
    """Return the config of the run that has written the model folder, or None if it was not one."""
    from paceline.config.load import load_config

    path = folder.parent / "config.yaml"
    return load_config(path, {}).config if folder.name == "model" and path.is_file() else None


def _round_base(model: Any, config: Config, dtype: str) -> None:
    """Give the base model of an adapter the weights that it was trained on: quantized ones have
    other values than the files of the model.

    Args:
        dtype: dtype of the weights afterwards; ``auto`` leaves it as it is.
    """
    import torch

    from paceline.models.adapters.check import check_adapters
    from paceline.models.adapters.quantize import round_weights

    check_adapters(config)
    round_weights(model, config)
    if config.lora.quantize != "none" and dtype != "auto":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)


def check_trained_length(model: Any, num_tokens: int) -> None:
    """Raise ConfigError if ``num_tokens`` exceeds the trained length of a converted
    first-generation Qwen model."""
    config: Any = getattr(base_model(model), "config", None)
    if getattr(config, CONVERTED_KEY, None) and num_tokens > config.max_position_embeddings:
        raise ConfigError(
            "prompt and answer may have {num_tokens} tokens together, but the model was trained"
            " with {max_position_embeddings}; beyond that, the original Qwen model changes its"
            " attention, and its Qwen2 form does not",
            code="answer-too-long",
            fix="give a shorter prompt, or allow fewer new tokens",
            num_tokens=num_tokens,
            max_position_embeddings=config.max_position_embeddings,
        )
