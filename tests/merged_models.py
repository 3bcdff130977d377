"""Write the full model of a run as an export does, without the proof that it is the same."""

from pathlib import Path
from typing import Any

import torch

from paceline.inference.exports.bases import base_checkpoints, base_names
from paceline.inference.exports.full import write_full
from paceline.inference.exports.source import open_source
from paceline.inference.loading import load_model

_NUM_TOKENS = 16
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id")


def write_merged(run: Path, folder: Path | None = None, dtype: str = "auto") -> Path:
    """Write the model of ``run``, with adapters merged, and return its folder."""
    folder = folder or run / "exported"
    folder.mkdir(parents=True)
    source = open_source(run)
    names = base_names(source)
    model, tokenizer = load_model(run, "float32" if dtype == "float32" else "auto")
    checkpoints = base_checkpoints(source, names, False)
    write_full(model, tokenizer, source, folder, checkpoints, names, dtype)
    return folder


@torch.no_grad()
def some_logits(model: Any) -> torch.Tensor:
    """Return the logits of a model for tokens from all over its vocabulary, in float32."""
    num_tokens = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.linspace(1, num_tokens - 1, _NUM_TOKENS).long().unsqueeze(0)
    for name in _PLACEHOLDERS:  # stands for an image, which is not among the inputs
        ids[ids == getattr(model.config, name, None)] = 1
    logits: torch.Tensor = model.eval()(input_ids=ids.to(model.device)).logits
    return logits.float()
