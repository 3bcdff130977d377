"""The form of adapters that vLLM and peft load on the base model."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.inference.exports.core.estimate import (
    model_bytes,
    read_and_write_time_s,
    stored_sizes,
)
from paceline.inference.exports.core.forms import ExportEstimate, ExportSource, ProofLimit
from paceline.inference.exports.core.transformers_engine import TransformersProofEngine
from paceline.inference.loading import tokenizer_name
from paceline.models.json_config import JsonObject, read_object
from paceline.models.kinds import LANGUAGE, VISION_LANGUAGE, saved_kind
from paceline.models.weights.stored_files import read_header

logger = logging.getLogger(__name__)

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Values that vLLM accepts for `--max-lora-rank`, and the default.
_RANKS, _DEFAULT_RANK = (1, 8, 16, 32, 64, 128, 256, 320, 512), 16
#: Fields of adapter_config.json that vLLM rejects, or does not read although the outputs depend on
#: them, with the names of some.
_REFUSED = {
    "use_dora": "DoRA", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA", "arrow_config": "Arrow",
    "kasa_config": "KaSA", "velora_config": "VeLoRA", "monteclora_config": "MonteCLoRA",
    "alora_invocation_tokens": "aLoRA", "target_parameters": "`target_parameters`",
    "rank_pattern": "`rank_pattern`", "alpha_pattern": "`alpha_pattern`",
    "lora_bias": "`lora_bias`", "fan_in_fan_out": "`fan_in_fan_out` (Conv1D)",
    "layer_replication": "`layer_replication`",
}  # fmt: skip
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.(lora_[AB]\.weight|lora_embedding_[AB])")
_HEADS = ("lm_head", "embed_tokens", "embed_in", "embed_out", "wte")
#: Largest difference from the trained model: of logits, by the dtype of the base model; of the
#: distribution, for adapters that were trained on rounded weights.
_LOGITS = {"F32": 1e-5, "F16": 2e-2, "BF16": 2e-2}
_ROUNDED_KL = {"int8": 0.05, "nf4": 0.3, "fp4": 0.3}


@dataclass
class AdapterForm:
    """Adapters in peft's form, without the base model.

    Args:
        limit: largest accepted difference from the trained model. :meth:`check` sets it, because it
            depends on the base model.
    """

    name = "adapter"
    merged_dtype: str | None = None
    limit: ProofLimit = field(default_factory=lambda: ProofLimit("logits", _LOGITS["BF16"]))

    def check(self, source: ExportSource) -> None:
        if not source.is_adapter:
            raise ConfigError(
                "`--adapter`: {source} is a full model without an adapter",
                code="adapter-export-without-adapter",
                fix="omit `--adapter`",
                source=source.folder,
            )
        kind = saved_kind(source.folder)
        if kind not in (LANGUAGE, VISION_LANGUAGE):
            raise _refused(kind.noun)
        content = read_object(source.folder / _CONFIG) or {}
        rank = check_config(content)
        _check_keys(source.folder)
        self.limit = _limit(source)
        _log_options(source, rank)

    def estimate(self, source: ExportSource) -> ExportEstimate:
        size = sum(file.stat().st_size for file in source.folder.iterdir() if file.is_file())
        base = model_bytes(source.base)
        return ExportEstimate(size, base + size, read_and_write_time_s(base))

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        for file in source.folder.iterdir():
            if file.is_file() and file.name != "README.md":  # peft's template of a model card
                shutil.copyfile(file, folder / file.name)
        if (name := tokenizer_name(source.folder, source.base)) != str(source.folder):
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(name).save_pretrained(str(folder))

    def unreadable(self) -> str | None:
        return None

    def open(self, folder: Path, trusts_code: bool = False) -> TransformersProofEngine:
        return TransformersProofEngine.load(folder, trusts_code)


def check_config(content: JsonObject) -> int:
    """Return the rank of adapters.

    Args:
        content: their adapter_config.json.

    Raises:
        ConfigError: vLLM does not load them.
    """
    kind = content.get("peft_type")
    if kind != "LORA":
        raise _refused("VeRA" if kind == "VERA" else str(kind))
    if content.get("bias", "none") != "none":
        raise _refused(f"`bias: {content['bias']}`")
    if content.get("modules_to_save") or content.get("trainable_token_indices"):
        raise ConfigError(
            "`--adapter`: vLLM does not support modules that are trained in full, such as the"
            " embeddings of new tokens (`modules_to_save: {modules}`)",
            code="adapter-with-full-modules",
            allowed="LoRA and rsLoRA with one rank, on linear layers",
            fix="use `--merge` instead, which writes the full model",
            modules=content.get("modules_to_save") or "embeddings of single tokens",
        )
    for name, what in _REFUSED.items():
        if content.get(name):
            raise _refused(what)
    rank = content.get("r")
    if not isinstance(rank, int) or rank > _RANKS[-1]:
        raise _refused(f"`r: {rank}`")
    return rank


def _refused(what: str) -> ConfigError:
    return ConfigError(
        "`--adapter`: vLLM does not support these adapters: {what}",
        code="adapter-not-for-vllm",
        allowed="LoRA and rsLoRA of language models with one rank of at most 512, on linear layers",
        fix="use `--merge` instead, which adds the adapter to the weights of the base model",
        what=what,
    )


def _check_keys(folder: Path) -> None:
    """Raise ConfigError if the names of the weights are not those that peft writes for LoRA."""
    file = folder / _WEIGHTS
    names = list(read_header(file)[0]) if file.is_file() else []
    unknown = [name for name in names if _KEY.fullmatch(name) is None]
    if unknown:
        raise _refused(unknown[0])
    if not names:
        raise ConfigError(
            "`--adapter`: {file} has no weights",
            code="adapter-export-without-weights",
            fix="give the folder of a run that has ended",
            file=file,
        )
    modules = {match["module"].rpartition(".")[2] for name in names if (match := _KEY.match(name))}
    if on_heads := sorted(modules & set(_HEADS)):
        logger.warning(
            UserText(
                "vLLM loads adapters on {modules} for some types of models only; if it rejects"
                " them, use `--merge` instead",
                code="adapter-on-embeddings",
                modules=", ".join(on_heads),
            )
        )


def _limit(source: ExportSource) -> ProofLimit:
    method = "none" if source.config is None else source.config.lora.quantize
    if method != "none":
        logger.warning(
            UserText(
                "the adapter was trained on weights of {base} that were rounded to {method}, and"
                " vLLM adds it to the weights as they are; the check measures the difference, which"
                " `--merge` avoids",
                code="adapter-of-rounded-weights",
                base=source.base,
                method=method,
            )
        )
        return ProofLimit("kl", _ROUNDED_KL[method])
    dtypes = {dtype for _, dtype, _, _ in stored_sizes(source.base)}
    name = "BF16" if "BF16" in dtypes else "F16" if "F16" in dtypes else "F32"
    return ProofLimit("logits", _LOGITS[name if dtypes else "BF16"])


def _log_options(source: ExportSource, rank: int) -> None:
    """Log the command by which vLLM serves the adapter."""
    needed = next(value for value in _RANKS if value >= rank)
    option = "" if needed <= _DEFAULT_RANK else f" --max-lora-rank {needed}"
    logger.info(
        UserText(
            "vLLM serves the export with `vllm serve {base} --enable-lora{option} --lora-modules"
            " NAME=DIR`",
            code="adapter-for-vllm",
            base=source.base,
            option=option,
        )
    )
