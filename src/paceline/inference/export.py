"""Write a run's model to be used elsewhere."""

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from paceline.checkpoint.writer import reason_of
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import replace_dir
from paceline.inference.generate import load_model, model_folder

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def export(
    run: Path, *, merge: bool = False, output: str | None = None, dtype: str = "auto"
) -> Path:
    """Write the model of ``run`` to ``output`` (default: ``RUN/exported``), in the form that
    ``from_pretrained`` loads.

    Args:
        merge: add the adapters into the base model's weights.
        dtype: of the written weights: auto (as they are), float32, bfloat16, float16.

    Raises:
        ConfigError: no model there, nothing to merge, or the target exists.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"`--dtype {dtype}` is not known", allowed=", ".join(_DTYPES))
    source = model_folder(run)
    adapted = (source / "adapter_config.json").is_file()
    if adapted and not merge:
        raise ConfigError(
            f"{source} is an adapter, ready to be loaded with peft as it is",
            fix="add --merge to write it merged into its base model",
        )
    if merge and not adapted:
        raise ConfigError(
            f"{source} holds a whole model: there is no adapter to merge", fix="leave --merge out"
        )
    final = Path(output) if output else run / "exported"
    if final.exists():
        raise ConfigError(f"{final} exists already", fix="give another folder with --output DIR")
    model, tokenizer = load_model(run, dtype)
    if adapted:
        model = model.merge_and_unload()
    aside = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        model.save_pretrained(str(aside))
        tokenizer.save_pretrained(str(aside))
        replace_dir(aside, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunError(
            f"{final} could not be written: {reason_of(error)}",
            fix="free some space or give --output DIR",
        ) from error
    return final
