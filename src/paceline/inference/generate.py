"""Ask the model of a run a question."""

import json
import warnings
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.models.blocks import base_model
from paceline.models.language import qwen_folder
from paceline.models.qwen import CONVERTED_KEY, converted_folder


def model_folder(run: Path) -> Path:
    """The model that ``run`` means: a run's ``model/``, or a model or adapter folder itself.

    Raises:
        ConfigError: there is none.
    """
    for folder in (run / "model", run):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return folder
    raise ConfigError(
        f"{run} holds no model" if run.exists() else f"{run} does not exist",
        allowed=(
            "a finished run's folder (with model/ in it), or a folder that save_pretrained wrote"
        ),
        fix=(
            "let the run finish: the same training command goes on where it stopped"
            if run.exists()
            else "check the path"
        ),
    )


def load_model(run: Path, dtype: str = "auto") -> tuple[Any, Any]:
    """(model in evaluation mode on the CPU, tokenizer); adapters are put on their base model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    folder = model_folder(run)
    if (folder / "config.json").is_file() and (original := qwen_folder(str(folder))) is not None:
        folder = converted_folder(original)
    base = folder
    if (folder / "adapter_config.json").is_file():
        base = Path(
            json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(base), dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model in {folder} cannot be loaded as a causal language model:"
            f" {str(error).splitlines()[0][:300]}",
            fix=f"check that {base} is there" if base != folder else None,
        ) from error
    if base != folder:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder))
    return model.eval(), tokenizer


def check_trained_length(model: Any, num_tokens: int) -> None:
    """Refuse to run a converted first-generation Qwen model beyond its trained length.

    Raises:
        ConfigError: ``num_tokens`` is above it.
    """
    config: Any = getattr(base_model(model), "config", None)
    if getattr(config, CONVERTED_KEY, None) and num_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"the prompt and the answer can have {num_tokens} tokens together, and the model was"
            f" trained on {config.max_position_embeddings}; beyond that the original Qwen model"
            " changes its attention, and the Qwen2 form does not",
            fix="give a shorter prompt, or allow fewer new tokens",
        )


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    """Return the chat as the model reads it: by its template, or, without one, its texts one after
    the other."""
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)
    return tokenizer("\n\n".join(message["content"] for message in messages), return_tensors="pt")


def generate(
    run: Path,
    question: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    system: str | None = None,
    seed: int = 0,
) -> str:
    """The model's answer, by its chat template where it has one. ``temperature`` 0 takes the
    likeliest token each time."""
    import torch

    model, tokenizer = load_model(run)
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    messages = [{"role": "user", "content": question}]
    if system and tokenizer.chat_template is not None:
        messages.insert(0, {"role": "system", "content": system})
    inputs = encode_chat(tokenizer, messages).to(model.device)
    num_prompt = inputs["input_ids"].shape[1]
    check_trained_length(model, num_prompt + max_new_tokens)
    torch.manual_seed(seed)
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=temperature > 0,
            temperature=temperature or None,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            use_cache=True,
        )
    answer: str = tokenizer.decode(output[0, num_prompt:], skip_special_tokens=True)
    return answer.strip()
