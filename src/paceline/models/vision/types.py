"""The types of models that transformers maps to image-text-to-text. Imports no libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.models.builtin import config_numbers
from paceline.models.hub_configs import fetch_config
from paceline.models.json_config import JsonObject

if TYPE_CHECKING:
    from paceline.config.schema import Config

#: The types whose tokens, images and loss are tested against transformers.
TESTED_TYPES = frozenset(
    {
        "gemma3",
        "gemma4",
        "glm4v",
        "idefics3",
        "internvl",
        "llama4",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_vl",
        "smolvlm",
    }
)
#: The other types of decoders. Each is checked on its first batch
#: (:mod:`paceline.tasks.vision_check`).
UNTESTED_TYPES = frozenset(
    {
        "aria", "aya_vision", "blip-2", "chameleon", "cohere2_vision", "cohere_compass",
        "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid",
        "dots3_note", "emu3", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "fuyu", "gemma3n",
        "gemma4_unified", "git", "glm46v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga", "got_ocr2",
        "granite4_vision", "granite_docling", "hunyuan_vl", "hyperclovax_vision_v2", "idefics",
        "idefics2", "inkling2", "inkling_mm_model", "instructblip", "janus", "kimi_k25", "kosmos-2",
        "lfm2_vl", "lfm3_vl", "lighton_ocr", "llava_next_video", "minicpm_ocr", "minicpmv4_6",
        "minicpmv4_7", "minimax_m3_vl", "mistral_large4", "mllama", "molmo2", "muse_glimmer",
        "muse_spark", "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "perception_lm",
        "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen3_5_moe",
        "qwen3_omni_moe_thinker", "qwen3_vl_moe", "qwen4_exp", "shieldgemma2", "step3p7",
        "unlimited_ocr", "video_llama_3", "vipllava",
    }
)  # fmt: skip
_ENCODER_DECODER = "it is an encoder with a decoder, and answers are trained in decoders only"
#: The types that are refused, with the reason.
REFUSED_TYPES = {
    **dict.fromkeys(
        (
            "blip",
            "florence2",
            "kosmos-2.5",
            "pix2struct",
            "pp_formulanet",
            "t5gemma2",
            "udop",
            "vision-encoder-decoder",
        ),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(("instructblipvideo", "video_llava"), "its processor reads videos"),
    "diffusion_gemma": "it generates text by diffusion, without a loss on the next token",
    "evolla": "its processor reads proteins instead of images",
    "pi0": "it generates the actions of a robot",
}
#: The types that can also be trained as a causal language model, without their vision tower or with
#: an idle one.
TEXT_TYPES = frozenset(
    {
        "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git",
        "got_ocr2", "llama4", "mllama", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
    }
)  # fmt: skip


def vision_type(model: str) -> str | None:
    """Return the type of a vision-language model, or None for another model. The config.json of a
    hub ID is downloaded if it is not known, because it decides how the model is trained."""
    fetch_config(model)
    return vision_type_of(config_numbers(model))


def vision_type_of(content: JsonObject) -> str | None:
    """Return the type of a vision-language model by its config.json, or None for another model.

    A type that is also a causal language model is a vision-language model if its config.json
    describes a vision tower."""
    name = content.get("model_type")
    if not isinstance(name, str):
        return None
    if name in TEXT_TYPES and not content.get("vision_config"):
        return None
    is_known = name in TESTED_TYPES or name in UNTESTED_TYPES or name in REFUSED_TYPES
    return name if is_known else None


def check_type(model: str) -> None:
    """Check that a vision-language model is one that can be trained.

    Raises:
        ConfigError: it is an encoder-decoder, or reads something else than images.
    """
    name, content = vision_type(model), config_numbers(model)
    parts = (content, content.get("text_config"))
    reason = REFUSED_TYPES.get(name or "")
    if reason is None and any(
        isinstance(part, dict) and part.get("is_encoder_decoder") for part in parts
    ):
        reason = _ENCODER_DECODER
    if reason is not None:
        raise ConfigError(
            "the vision-language model `{model}` (`model_type: {type}`) cannot be trained:"
            " {reason}",
            code="vision-language-type-refused",
            allowed="decoders that read images, such as {tested}",
            fix="choose another model",
            model=model,
            type=name or "",
            reason=reason,
            tested=", ".join(sorted(TESTED_TYPES)),
        )


def check_text_only(config: Config) -> None:
    """Check that a vision-language model can be trained as a causal language model.

    Raises:
        ConfigError: `vision.text_only` is set, and transformers has no such model of this type.
    """
    name = vision_type(config.model) if config.vision.text_only else None
    if name is not None and name not in TEXT_TYPES:
        raise ConfigError(
            "`vision.text_only: true`: transformers has no causal language model for"
            " `model_type: {type}`",
            code="no-text-only-model",
            allowed="{types}",
            fix="leave `vision.text_only` out: rows without images are trained on as text",
            type=name,
            types=", ".join(sorted(TEXT_TYPES)),
        )
