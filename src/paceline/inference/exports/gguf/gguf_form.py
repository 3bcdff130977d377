"""The form of an export that llama.cpp reads: one GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.packages import check_package
from paceline.core.errors import ConfigError, RunError
from paceline.inference.exports.core.estimate import (
    model_bytes,
    read_and_write_time_s,
    stored_sizes,
)
from paceline.inference.exports.core.forms import (
    ExportEstimate,
    ExportSource,
    ProofEngine,
    ProofLimit,
)
from paceline.inference.exports.gguf.architectures import find_architecture
from paceline.inference.exports.gguf.model_config import ModelConfig
from paceline.inference.exports.gguf.tokenizer import read_tokenizer
from paceline.inference.exports.gguf.weights import Weight
from paceline.inference.exports.gguf.write import choose, write_gguf
from paceline.inference.exports.source import tokenizer_folder
from paceline.models.kinds import LANGUAGE, saved_kind
from paceline.models.weights.release import KEYS

if TYPE_CHECKING:
    import torch

#: Largest accepted difference: of a logit, relative to the largest one, or the mean divergence.
_LIMITS = {
    "f16": ProofLimit("logits", 1e-3),
    "bf16": ProofLimit("logits", 2e-2),
    "q8_0": ProofLimit("kl", 0.01),
    "q4_k_m": ProofLimit("kl", 0.3),
}
#: Numbers that are converted per second, measured with a 4096 x 4096 matrix on two CPUs.
_NUMBERS_PER_S = {"f16": 250e6, "bf16": 250e6, "q8_0": 50e6, "q4_k_m": 8e6}
#: Bits of a number, with the scales of its block.
_BITS = {"f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_k_m": 4.9}
#: Space for the metadata besides the tokenizer, which needs less than its tokenizer.json.
_METADATA_BYTES = 64 << 10


class GgufForm:
    """A GGUF file.

    Args:
        kind: one of ``tensor_types.KINDS``.
    """

    merged_dtype: str | None = "float32"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = f"gguf-{kind}"
        self.option = f"`--gguf {kind}`"
        self.limit = _LIMITS[kind]

    def check(self, source: ExportSource) -> None:
        for package in ("gguf", "xllamacpp"):
            check_package(package, self.option, "export the model in another form", extra="gguf")
        kind = saved_kind(source.folder)
        if kind is not LANGUAGE:
            raise ConfigError(
                "{option} is not supported for a {kind}",
                code="gguf-with-kind",
                allowed="causal language models",
                fix="export another form of the model, such as `--merge` for adapters",
                option=self.option,
                kind=kind.noun,
            )
        config = ModelConfig.read(source.base)
        if not source.is_adapter and any(config.values.get(key) for key in KEYS):
            raise ConfigError(
                "{source} is quantized already",
                code="gguf-quantized",
                fix="give the folder of the run, or of a model with weights in 16 or 32 bits",
                source=source.folder,
            )
        find_architecture(config)
        read_tokenizer(tokenizer_folder(source))

    def estimate(self, source: ExportSource) -> ExportEstimate:
        sizes = stored_sizes(source.base)
        numbers = sum(prod(shape) for _, _, shape, _ in sizes)
        tokenizer = (tokenizer_folder(source) / "tokenizer.json").stat().st_size
        size = _METADATA_BYTES + tokenizer
        if sizes:
            size += self._tensor_bytes(source.base, sizes, numbers)
        else:  # pickled
            size += model_bytes(source.base)
        memory = max(model_bytes(source.base, "float32"), size)
        time_s = read_and_write_time_s(size) + numbers / _NUMBERS_PER_S[self.kind]
        return ExportEstimate(size, memory, time_s)

    def _tensor_bytes(
        self, base: str, sizes: list[tuple[str, str, list[int], int]], numbers: int
    ) -> int:
        config = ModelConfig.read(base)
        stored = [Weight(name, tuple(shape), _no_values) for name, _, shape, _ in sizes]
        try:
            weights = list(find_architecture(config).weights(config, stored))
        except ConfigError:  # stored in another form than the merged model
            return int(numbers * _BITS[self.kind] / 8)
        shapes = {weight.name: weight.shape for weight in weights}
        return choose(self.kind, weights, config).num_bytes(shapes)

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        name = model_name(source)
        write_gguf(model, folder / f"{name}-{self.kind}.gguf", self.kind, name)

    def unreadable(self) -> str | None:
        if find_spec("xllamacpp") is None:
            return "llama.cpp is not installed (package xllamacpp)"
        return None

    def open(self, folder: Path, trusts_code: bool = False) -> ProofEngine:
        from paceline.inference.exports.gguf.llama_cpp_engine import LlamaCppEngine

        return LlamaCppEngine(gguf_file(folder))


def _no_values() -> torch.Tensor:
    raise RuntimeError("only the size of this weight is known")


def model_name(source: ExportSource) -> str:
    """Return the name of a model in its file and its file's name: the name of the run's folder."""
    name = source.name or source.run.resolve().name
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def gguf_file(folder: Path) -> Path:
    """Return the GGUF file in the folder of an export.

    Raises:
        RunError: there is none.
    """
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise RunError("{folder} has no GGUF file", code="gguf-no-file", folder=folder)
    return files[0]
