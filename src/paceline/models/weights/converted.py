"""Copies of models in the form in which a run uses their frozen weights.

If a model's files store another dtype, quantized weights, or one tensor per expert where
transformers uses one for all experts, each rank would convert the weights and hold a copy of them.
Instead, one rank of the host writes the converted weights to the cache, and all of them map its
files.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import cache_dir, human_bytes, write_json_atomic
from paceline.core.texts import UserText
from paceline.data.cache import build_once, key_of
from paceline.models.hub_configs import config_folder
from paceline.models.weights.dequantize import read_model
from paceline.models.weights.release import weights_bytes
from paceline.models.weights.stored_files import MIN_CONVERTED_BYTES, files_identity, mapped_bytes

logger = logging.getLogger(__name__)

_LAYOUT = 1
_DONE = "converted.json"


def converted_copy(
    auto_class: Any,
    name: str,
    dtype: torch.dtype,
    min_bytes: int = MIN_CONVERTED_BYTES,
    **options: Any,
) -> Path | None:
    """Return the folder of a copy of a model whose files can be used as they are, which is created
    in the cache on first use; None if the model needs no copy or there is no space for one.

    Args:
        dtype: dtype of the frozen weights.
        min_bytes: size of the weights to convert from which on a copy is made.
        options: options of ``from_pretrained``.
    """
    folder = config_folder(name)
    dtype_name = str(dtype).removeprefix("torch.")
    size = 0 if folder is None else weights_bytes(folder, dtype_name)
    if folder is None or size - mapped_bytes(folder, dtype_name) < min_bytes:
        return None
    key = key_of(["converted", _LAYOUT, *files_identity(folder), dtype_name])
    final = cache_dir() / "models" / f"{folder.resolve().name}-{dtype_name}-{key}"
    if not (final / _DONE).is_file():
        existing = next(parent for parent in final.parents if parent.exists())
        free = shutil.disk_usage(existing).free
        if free < size:
            logger.warning(
                UserText(
                    "model: every rank holds a copy of the frozen weights, because there is no"
                    " space to store converted ones in {cache_dir}: {size} are needed, and {free}"
                    " are free",
                    code="no-space-for-shared-weights",
                    cache_dir=cache_dir(),
                    size=human_bytes(size),
                    free=human_bytes(free),
                )
            )
            return None
        logger.info(
            UserText(
                "model: the weights are converted once and stored in {final}, so that the ranks of"
                " this host share them",
                code="weights-converted-once",
                final=final,
            )
        )
    try:
        build_once(final, _DONE, lambda target: _write(auto_class, name, dtype, target, options))
    except (ConfigError, RunError) as error:
        logger.warning(
            UserText(
                "model: every rank holds a copy of the frozen weights: {reason}",
                code="weights-not-shared",
                reason=error.what,
            )
        )
        return None
    return final if (final / "config.json").is_file() else None


def _write(
    auto_class: Any, name: str, dtype: torch.dtype, target: Path, options: dict[str, Any]
) -> None:
    """Write the copy. It has no config.json if some weights are not in the model's files, because
    these depend on the seed of the run."""
    with torch.random.fork_rng(devices=[]):
        model, info = read_model(auto_class, name, dtype=dtype, **options)
    if not info["missing_keys"] and not info["mismatched_keys"]:
        model.save_pretrained(str(target), save_original_format=False)
    write_json_atomic(target / _DONE, {"model": name})
