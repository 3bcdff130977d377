"""Save a model with what it lacks of its base model: the weights that transformers drops on
loading, and, if the model is the language model of a vision-language model, the rest of it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.files import write_json_atomic
from paceline.core.texts import UserText
from paceline.models.hub_configs import canonical_id, read_raw_config
from paceline.models.json_config import read_object
from paceline.models.qwen import is_qwen
from paceline.models.transformers_compat import NameMatch, match_names, set_conversions
from paceline.models.weights.base_checkpoint import BaseCheckpoint, open_base
from paceline.models.weights.release import KEYS
from paceline.models.weights.shards import TensorToWrite, add_shard, shard_files
from paceline.models.weights.stored_files import read_header

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Records in a model's folder that weights of its base model could not be written with it.
MISSING_BASE = "missing_base.json"
#: Files of a base model that are copied next to a model, besides the tokenizer's.
_FILES = (
    "LICENSE*", "LICENCE*", "License*", "license*", "COPYING*", "NOTICE*", "Notice*", "USE_POLICY*",
    "*processor_config.json",
)  # fmt: skip


def save_with_base(
    model: Any,
    folder: Path,
    bases: Sequence[BaseCheckpoint],
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model as ``save_pretrained`` does, with the weights of ``bases`` that it lacks.

    If the model is the language model of a vision-language model, it is written as the latter,
    under its names.

    Args:
        bases: models that it was trained from, directly or not. Their weights are taken from the
            first that has them.
        dtype: dtype of these weights; None writes them byte for byte.
    """
    matches = [(base, match_names(model, base.weight_names())) for base in bases]
    matches = [(base, match) for base, match in matches if _is_related(base, match)]
    whole = next(((base, match) for base, match in matches if _is_part(model, base)), None)
    if whole is not None:
        set_conversions(model, whole[1].conversions)
    model.save_pretrained(str(folder))
    if whole is not None:
        _write_config(whole[0], folder)
    written = {name for file in shard_files(folder) for name in read_header(file)[0]}
    added: dict[str, TensorToWrite] = {}
    for base, match in matches:
        names = [name for name in base.dropped(match) if name not in written | added.keys()]
        added |= base.to_write(names, dtype, model.dtype)
    if added:
        add_shard(folder, added)


def _is_related(base: BaseCheckpoint, match: NameMatch) -> bool:
    """Return whether a model has any of the base model's weights, and warn if not."""
    if not match.used:
        logger.warning(
            UserText(
                "model: no weight of {model} has the name of a weight of the trained model, so none"
                " is saved with it",
                code="base-without-common-weights",
                model=base.name,
            )
        )
    return bool(match.used)


def _is_part(model: Any, base: BaseCheckpoint) -> bool:
    """Return whether a model is the language model of a model of another type."""
    from transformers import CONFIG_MAPPING

    kind = str(base.content.get("model_type"))
    if kind not in CONFIG_MAPPING or kind == model.config.model_type:
        return False
    return CONFIG_MAPPING[kind].sub_configs.get("text_config") is type(model.config)


def _write_config(base: BaseCheckpoint, folder: Path) -> None:
    """Replace the config.json of a language model by the base model's, with the former inside."""
    from transformers import CONFIG_MAPPING

    text = read_object(folder / "config.json") or {}
    content = {
        key: value for key, value in base.content.items() if key not in (*KEYS, "torch_dtype")
    }
    before = CONFIG_MAPPING[str(content["model_type"])].from_dict(dict(content)).get_text_config()
    # New tokens have changed the former; adapters may have untied the embeddings.
    if content.get("vocab_size") == before.vocab_size:
        content["vocab_size"] = text["vocab_size"]
    if text.get("tie_word_embeddings", before.tie_word_embeddings) != before.tie_word_embeddings:
        content["tie_word_embeddings"] = text["tie_word_embeddings"]
    content["dtype"] = text.get("dtype")
    content["transformers_version"] = text.pop("transformers_version", None)
    text.pop("architectures", None)
    write_json_atomic(folder / "config.json", {**content, "text_config": text})


def save_trained(model: Any, folder: Path, base: str) -> None:
    """Write a model at the end of its training as :func:`save_with_base` does, with the other files
    of the base model. If the base model's files are gone, it is written without them, with a
    warning."""
    bases = []
    try:
        if not is_qwen(read_raw_config(base)):  # the conversion of such a model keeps all weights
            bases.append(open_base(base))
    except ConfigError as error:
        logger.warning(
            UserText(
                "model: weights of the base model that were not loaded are not saved: {reason}",
                code="base-weights-not-saved",
                reason=error.what,
            )
        )
        write_json_atomic(folder / MISSING_BASE, {"base": base})
    save_with_base(model, folder, bases)
    copy_base_files(base, folder)


def copy_base_files(name: str, folder: Path) -> None:
    """Copy the licence and the processor's settings of a model's folder or hub ID to ``folder``,
    unless it has files of these names. They are downloaded if the hub can be reached."""
    source = Path(name).expanduser()
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        try:
            source = Path(snapshot_download(canonical_id(name), allow_patterns=list(_FILES)))
        except Exception:  # each client library has its own network errors
            try:
                source = Path(snapshot_download(canonical_id(name), local_files_only=True))
            except Exception:
                return
    for pattern in _FILES:
        for file in source.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
