"""Which model types of transformers are written as which architecture of llama.cpp, and how.

What each architecture needs follows llama.cpp's converter (https://github.com/ggml-org/llama.cpp,
``conversion/``) and its graphs (``src/models/``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.inference.exports.gguf import gemma, hybrids, mixtures
from paceline.inference.exports.gguf.metadata import (
    add_rope,
    add_sizes,
    llama3_factors,
    refuse,
)
from paceline.inference.exports.gguf.model_config import ModelConfig
from paceline.inference.exports.gguf.weights import Weight, stack_experts

if TYPE_CHECKING:
    import gguf
    import torch

Convert = Callable[[ModelConfig, Weight], Iterable[Weight]]


@dataclass(frozen=True)
class Architecture:
    """How models of one type are written.

    Args:
        name: name of a ``gguf.MODEL_ARCH``.
        add_metadata: adds the architecture's metadata.
        convert: returns what is written for a weight, under transformers' names.
        check: raises ConfigError for settings that llama.cpp does not have.
    """

    name: str
    add_metadata: Callable[[gguf.GGUFWriter, ModelConfig], None]
    convert: Convert
    check: Callable[[ModelConfig], None]

    def weights(self, config: ModelConfig, stored: Iterable[Weight]) -> Iterator[Weight]:
        """Return the weights of the file under llama.cpp's names.

        Raises:
            ConfigError: llama.cpp has no name for one of them.
        """
        import gguf

        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.name], config.num_layers)
        factors = llama3_factors(config)
        if factors is not None:
            yield factors
        if config.is_part:
            stored = _language_weights(stored)
        for weight in stack_experts(stored):
            if _is_left_out(config, weight.name):
                continue
            for converted in self.convert(config, weight):
                name = names.get_name(converted.name, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise ConfigError(
                        "llama.cpp's architecture {architecture} has no weight for {weight}",
                        code="gguf-unknown-weight",
                        architecture=self.name.lower(),
                        weight=converted.name,
                    )
                yield converted.renamed(name)


#: Prefixes of the language model in a vision-language model → its own prefix.
_PART_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def _language_weights(stored: Iterable[Weight]) -> Iterator[Weight]:
    """Return the weights of the language model in a vision-language model, under its names."""
    for weight in stored:
        for prefix, own in _PART_PREFIXES.items():
            if weight.name.startswith(prefix):
                yield weight.renamed(own + weight.name.removeprefix(prefix))


def _is_left_out(config: ModelConfig, name: str) -> bool:
    """Return whether a weight is not written: what predicts several tokens, what is computed, and
    a head that is the embedding."""
    if name == "lm_head.weight":
        return config.flag("tie_word_embeddings")
    return name.startswith(("mtp.", "model.mtp.")) or name.endswith(".rotary_emb.inv_freq")


def _same(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
    yield weight


def _rotate_pairs(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that orders the rows of each head as llama.cpp's rotary embedding of Llama
    does: pairs next to each other, not in halves."""

    def order(tensor: torch.Tensor) -> torch.Tensor:
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    return order


def convert_llama(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
    """Convert a weight of Llama or Mistral."""
    if ".self_attn.q_proj." in weight.name:
        yield weight.map(_rotate_pairs(config.num_heads))
    elif ".self_attn.k_proj." in weight.name:
        yield weight.map(_rotate_pairs(config.num_kv_heads))
    else:
        yield weight


def _add_dense(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    add_sizes(writer, config)
    add_rope(writer, config)


def _check_silu(config: ModelConfig) -> None:
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise refuse(config, f"has the activation function `{activation}`")


def _check_smollm3(config: ModelConfig) -> None:
    """llama.cpp leaves out the rotary embedding of each fourth layer, as SmolLM3 does."""
    _check_silu(config)
    rotated = config.wholes("no_rope_layers")
    if rotated and rotated != [int((layer + 1) % 4 != 0) for layer in range(len(rotated))]:
        raise refuse(config, "has no rotary embedding in other layers than each fourth one")


_LLAMA = Architecture("LLAMA", _add_dense, convert_llama, _check_silu)
#: model type of transformers → architecture
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "smollm3": Architecture("SMOLLM3", _add_dense, convert_llama, _check_smollm3),
    "qwen2": Architecture("QWEN2", _add_dense, _same, _check_silu),
    "qwen3": Architecture("QWEN3", _add_dense, _same, _check_silu),
    "mixtral": Architecture(
        "LLAMA", mixtures.add_mixtral, mixtures.convert_mixtral(convert_llama), _check_silu
    ),
    "qwen2_moe": Architecture(
        "QWEN2MOE", mixtures.add_qwen2_moe, mixtures.convert_experts, mixtures.check_qwen2_moe
    ),
    "qwen3_moe": Architecture(
        "QWEN3MOE", mixtures.add_qwen3_moe, mixtures.convert_experts, mixtures.check_qwen3_moe
    ),
    "gpt_oss": Architecture(
        "GPT_OSS", mixtures.add_gpt_oss, mixtures.convert_gpt_oss, mixtures.check_gpt_oss
    ),
    "gemma": Architecture("GEMMA", gemma.add_gemma, gemma.convert_gemma, gemma.check_gemma),
    "gemma2": Architecture("GEMMA2", gemma.add_gemma2, gemma.convert_gemma, gemma.check_gemma),
    "gemma3_text": Architecture("GEMMA3", gemma.add_gemma3, gemma.convert_gemma, gemma.check_gemma),
    "qwen3_5_text": Architecture(
        "QWEN35", hybrids.add_qwen35, hybrids.convert_qwen35, hybrids.check_qwen35
    ),
    "qwen3_5_moe_text": Architecture(
        "QWEN35MOE", hybrids.add_qwen35_moe, hybrids.convert_qwen35, hybrids.check_qwen35
    ),
    "lfm2": Architecture("LFM2", hybrids.add_lfm2, hybrids.convert_lfm2, hybrids.check_lfm2),
    "lfm2_moe": Architecture(
        "LFM2MOE", hybrids.add_lfm2_moe, hybrids.convert_lfm2, hybrids.check_lfm2
    ),
}


def find_architecture(config: ModelConfig) -> Architecture:
    """Return how a model is written.

    Raises:
        ConfigError: its type is not supported, or it has a setting that llama.cpp does not have.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ConfigError(
            "a model of type {model_type} cannot be exported as GGUF",
            code="gguf-unsupported-model",
            allowed=", ".join(ARCHITECTURES),
            fix="export another form of the model, such as `--merge` for adapters",
            model_type=config.model_type,
        )
    architecture.check(config)
    return architecture
