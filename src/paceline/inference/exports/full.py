"""The form that transformers loads: a full model, with adapters merged into its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.inference.exports.core.estimate import model_bytes, read_and_write_time_s
from paceline.inference.exports.core.forms import ExportEstimate, ExportSource, ProofLimit
from paceline.inference.exports.core.transformers_engine import TransformersProofEngine
from paceline.inference.exports.merge import merge_adapters
from paceline.models.language import copy_processor
from paceline.models.weights.base_checkpoint import BaseCheckpoint
from paceline.models.weights.keep_base import copy_base_files, save_with_base
from paceline.models.weights.shards import shard_files
from paceline.models.weights.stored_files import read_header

DTYPES = ("auto", "float32", "bfloat16", "float16")
#: A merged weight is rounded once more than the adapted model's: in 16 bits to 8 or 11 bits.
_LIMITS = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}


@dataclass
class FullForm:
    """A full model of transformers.

    Args:
        merges: whether adapters are merged; a model without adapters is then refused.
        merged_dtype: dtype of the written weights: auto (as they are), float32, bfloat16, float16.
        limit: largest accepted difference from the trained model. :meth:`write` sets it, because it
            depends on the dtype that the model has.
        proof_dtype: dtype in which the export computes in its proof: the trained model's, so that
            only the weights differ.
    """

    name = "transformers"
    merges: bool = False
    merged_dtype: str | None = "auto"
    limit: ProofLimit = field(default_factory=lambda: ProofLimit("logits", _LIMITS["float32"]))
    proof_dtype: str = "auto"

    def check(self, source: ExportSource) -> None:
        if self.merged_dtype not in DTYPES:
            raise ConfigError(
                "unknown `--dtype {dtype}`",
                code="unknown-dtype",
                allowed=", ".join(DTYPES),
                dtype=self.merged_dtype,
            )
        if source.is_adapter and not self.merges:
            raise ConfigError(
                "{source} is an adapter, which peft loads without an export",
                code="adapter-without-merge",
                fix="add --merge to merge it into its base model, or --adapter to check it and copy"
                " it for vLLM",
                source=source.folder,
            )
        if self.merges and not source.is_adapter:
            raise ConfigError(
                "{source} is a full model without an adapter to merge",
                code="nothing-to-merge",
                fix="remove --merge",
                source=source.folder,
            )

    def estimate(self, source: ExportSource) -> ExportEstimate:
        size = model_bytes(source.base, self.merged_dtype or "auto")
        return ExportEstimate(size, size, read_and_write_time_s(size))

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        for file in model.iterdir():
            file.rename(folder / file.name)
        dtypes = {
            entry["dtype"]
            for file in shard_files(folder)
            for entry in read_header(file)[0].values()
        }
        name = "bfloat16" if "BF16" in dtypes else "float16" if "F16" in dtypes else "float32"
        self.limit = ProofLimit("logits", _LIMITS[name])

    def unreadable(self) -> str | None:
        return None

    def open(self, folder: Path, trusts_code: bool = False) -> TransformersProofEngine:
        return TransformersProofEngine.load(folder, trusts_code, self.proof_dtype)


def write_full(
    model: Any,
    tokenizer: Any,
    source: ExportSource,
    folder: Path,
    bases: list[BaseCheckpoint],
    names: list[str],
    dtype: str,
) -> None:
    """Write a loaded model, with its adapters merged, to an existing folder.

    Args:
        bases: models whose other weights are written as well.
        names: models whose other files are copied.
        dtype: dtype of the written weights, or auto.
    """
    import torch

    if source.is_adapter:
        model = merge_adapters(model)
    stored_dtype = None if dtype == "auto" else getattr(torch, dtype)
    if stored_dtype is not None:
        model = model.to(stored_dtype)
        model.config.dtype = stored_dtype
    save_with_base(model, folder, bases, stored_dtype)
    tokenizer.save_pretrained(str(folder))
    copy_processor(source.folder, folder)
    for name in names:
        copy_base_files(name, folder)
