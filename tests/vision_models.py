"""Tiny vision-language models with random weights and their real processors, built from configs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.models.builtin import builtin_tokenizer

#: Size of an image in pixels, of a patch, and width of the vision tower.
_IMAGE, _PATCH, _WIDTH = 32, 8, 24
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": _WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _IMAGE,
    "patch_size": _PATCH,
}
#: Settings of the vision towers of Qwen and GLM, whose sizes have other names.
_DEPTH = {
    "depth": 2,
    "hidden_size": _WIDTH,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": _PATCH,
    "out_hidden_size": 32,
}
_PIXELS = {"shortest_edge": 256, "longest_edge": 4096}
_SQUARE = {"height": _IMAGE, "width": _IMAGE}


def template(image: str) -> str:
    """Return a chat template that prints ``image`` for an image."""
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}"
        f"{{% if part.type == 'image' %}}{image}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@dataclass(frozen=True)
class TinyFamily:
    """How a tiny model of a family is built.

    Args:
        image: what the chat template prints for an image.
        marks: special tokens.
        named: special tokens that the processor finds by name in the tokenizer.
        make: writes the model and the processor to a folder.
        needs_torchvision: whether transformers builds the processor only with torchvision.
        tower, projector: the first names of the parameters of these parts.
    """

    image: str
    make: Callable[[Path, Any], None]
    tower: str
    projector: str
    marks: tuple[str, ...] = ()
    named: dict[str, str] = field(default_factory=dict)
    needs_torchvision: bool = True


def make_model(folder: Path, family: str) -> Path:
    """Write a model of the family with its processor to ``folder``, and return the folder."""
    from transformers import AutoTokenizer

    tiny = TINY[family]
    tokenizer = AutoTokenizer.from_pretrained(
        str(builtin_tokenizer()), extra_special_tokens=dict(tiny.named)
    )
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"additional_special_tokens": list(tiny.marks)})
    torch.manual_seed(0)
    tiny.make(folder, tokenizer)
    return folder


def _text(tokenizer: Any, **settings: Any) -> dict[str, Any]:
    size = 8 * -(-len(tokenizer) // 8)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {**_TEXT, "vocab_size": size, "bos_token_id": None, **ids, **settings}


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _save(folder: Path, config: Any, processor: Any, family: str) -> None:
    from transformers import AutoModelForImageTextToText

    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor.chat_template = template(TINY[family].image)
    processor.save_pretrained(folder)


def _make_llava(folder: Path, tokenizer: Any) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION),
        text_config=LlamaConfig(**_text(tokenizer)),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    processor = LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": _IMAGE}, crop_size=_SQUARE),
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    _save(folder, config, processor, "llava")


def _make_llava_next(folder: Path, tokenizer: Any) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    grid = [[_IMAGE, 2 * _IMAGE], [2 * _IMAGE, _IMAGE], [2 * _IMAGE, 2 * _IMAGE]]
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**_VISION),
        text_config=LlamaConfig(**_text(tokenizer)),
        image_grid_pinpoints=grid,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(
            size={"shortest_edge": _IMAGE}, crop_size=_SQUARE, image_grid_pinpoints=grid
        ),
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    _save(folder, config, processor, "llava_next")


def _make_llava_onevision(folder: Path, tokenizer: Any) -> None:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
        Qwen2Config,
        SiglipVisionConfig,
    )

    grid = [[_IMAGE, 2 * _IMAGE], [2 * _IMAGE, _IMAGE], [2 * _IMAGE, 2 * _IMAGE]]
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**_VISION, vision_use_head=False),
        text_config=Qwen2Config(**_text(tokenizer)),
        image_grid_pinpoints=grid,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **_ids(tokenizer, image_token_id="<image>", video_token_id="<video>"),
    )
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=grid),
        tokenizer,
        LlavaOnevisionVideoProcessor(size=_SQUARE),
        num_image_tokens=(_IMAGE // _PATCH) ** 2,
        vision_feature_select_strategy="full",
    )
    _save(folder, config, processor, "llava_onevision")


def _make_idefics3(folder: Path, tokenizer: Any) -> None:
    from transformers import Idefics3Config, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    config = Idefics3Config(
        vision_config=_VISION,
        text_config={"model_type": "llama", **_text(tokenizer)},
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * _IMAGE}, max_image_size={"longest_edge": _IMAGE}
        ),
        tokenizer,
        image_seq_len=(_IMAGE // _PATCH) ** 2 // 4,
    )
    _save(folder, config, processor, "idefics3")


def _make_smolvlm(folder: Path, tokenizer: Any) -> None:
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    config = SmolVLMConfig(
        vision_config=_VISION,
        text_config={"model_type": "llama", **_text(tokenizer)},
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    sizes = {"size": {"longest_edge": 2 * _IMAGE}, "max_image_size": {"longest_edge": _IMAGE}}
    processor = SmolVLMProcessor(
        SmolVLMImageProcessor(**sizes),
        tokenizer,
        SmolVLMVideoProcessor(**sizes),
        image_seq_len=(_IMAGE // _PATCH) ** 2 // 4,
    )
    _save(folder, config, processor, "smolvlm")


def _make_gemma3(folder: Path, tokenizer: Any) -> None:
    from transformers import Gemma3Config, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config = Gemma3Config(
        vision_config={**_VISION, "vision_use_head": False},
        text_config=_text(tokenizer, sliding_window=16, query_pre_attn_scalar=8),
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        **_ids(
            tokenizer,
            image_token_id="<image_soft_token>",
            boi_token_index="<start_of_image>",
            eoi_token_index="<end_of_image>",
        ),
    )
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size=_SQUARE), tokenizer, image_seq_length=4
    )
    _save(folder, config, processor, "gemma3")


def _make_gemma4(folder: Path, tokenizer: Any) -> None:
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4Config,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    vision = {**_VISION, "num_key_value_heads": 2, "head_dim": 12, "pooling_kernel_size": 2}
    del vision["image_size"]
    config = Gemma4Config(
        vision_config={**vision, "position_embedding_size": 64},
        text_config=_text(
            tokenizer,
            sliding_window=16,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=8 * -(-len(tokenizer) // 8),
            final_logit_softcapping=30.0,
            layer_types=["sliding_attention", "full_attention"],
            global_head_dim=8,
        ),
        tie_word_embeddings=False,
        **_ids(
            tokenizer,
            image_token_id="<|image|>",
            boi_token_id="<|image>",
            eoi_token_id="<image|>",
            video_token_id="<|video|>",
            audio_token_id="<|audio|>",
            boa_token_id="<|audio>",
            eoa_token_index="<audio|>",
        ),
    )
    sizes = {"patch_size": _PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    processor = Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(**sizes),
        tokenizer,
        Gemma4VideoProcessor(**sizes),
        image_seq_length=70,
    )
    _save(folder, config, processor, "gemma4")


def _make_internvl(folder: Path, tokenizer: Any) -> None:
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLProcessor,
        InternVLVideoProcessor,
        Qwen2Config,
    )

    sizes = {"image_size": [_IMAGE, _IMAGE], "patch_size": [_PATCH, _PATCH]}
    config = InternVLConfig(
        vision_config={**_VISION, **sizes},
        text_config=Qwen2Config(**_text(tokenizer)),
        image_seq_length=4,
        tie_word_embeddings=False,
        **_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
    )
    processor = InternVLProcessor(
        GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, max_patches=4),
        tokenizer,
        InternVLVideoProcessor(size=_SQUARE),
        image_seq_length=4,
    )
    _save(folder, config, processor, "internvl")


def _make_mistral3(folder: Path, tokenizer: Any) -> None:
    from transformers import Mistral3Config, PixtralImageProcessor, PixtralProcessor

    config = Mistral3Config(
        vision_config={"model_type": "pixtral", **_VISION, "image_size": 4 * _IMAGE},
        text_config={"model_type": "mistral", **_text(tokenizer)},
        spatial_merge_size=2,
        tie_word_embeddings=False,
        **_ids(tokenizer, image_token_index="[IMG]"),
    )
    processor = PixtralProcessor(
        PixtralImageProcessor(patch_size=_PATCH, size={"longest_edge": 2 * _IMAGE}),
        tokenizer,
        patch_size=_PATCH,
        spatial_merge_size=2,
    )
    _save(folder, config, processor, "mistral3")


def _make_glm4v(folder: Path, tokenizer: Any) -> None:
    from transformers import (
        Glm4vConfig,
        Glm4vImageProcessor,
        Glm4vProcessor,
        Glm4vVideoProcessor,
    )

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    config = Glm4vConfig(
        vision_config={**_DEPTH, "image_size": 64},
        text_config=_text(tokenizer, rope_parameters={**rope, "partial_rotary_factor": 1.0}),
        **_ids(
            tokenizer,
            image_token_id="<|image|>",
            video_token_id="<|video|>",
            image_start_token_id="<|begin_of_image|>",
            image_end_token_id="<|end_of_image|>",
            video_start_token_id="<|begin_of_video|>",
            video_end_token_id="<|end_of_video|>",
        ),
    )
    sizes = {"patch_size": _PATCH, "size": {"shortest_edge": 512, "longest_edge": 8192}}
    processor = Glm4vProcessor(
        Glm4vImageProcessor(**sizes), tokenizer, Glm4vVideoProcessor(**sizes)
    )
    _save(folder, config, processor, "glm4v")


def _make_llama4(folder: Path, tokenizer: Any) -> None:
    from transformers import Llama4Config, Llama4Processor
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

    config = Llama4Config(
        vision_config={
            **_VISION,
            "intermediate_size": 96,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        text_config=_text(
            tokenizer, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=256
        ),
        **_ids(
            tokenizer,
            image_token_index="<|patch|>",
            boi_token_index="<|image_start|>",
            eoi_token_index="<|image_end|>",
        ),
    )
    processor = Llama4Processor(
        Llama4ImageProcessor(size=_SQUARE, max_patches=4), tokenizer, patch_size=_PATCH
    )
    _save(folder, config, processor, "llama4")


def _qwen_maker(family: str) -> Callable[[Path, Any], None]:
    def make(folder: Path, tokenizer: Any) -> None:
        import transformers
        from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

        names = {
            "qwen2_vl": "Qwen2VL",
            "qwen2_5_vl": "Qwen2_5_VL",
            "qwen3_vl": "Qwen3VL",
            "qwen3_5": "Qwen3_5",
        }
        vision: dict[str, Any] = dict(_DEPTH)
        rope: dict[str, Any] = {"rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        text: dict[str, Any] = {}
        if family == "qwen2_vl":
            vision |= {"embed_dim": _WIDTH, "hidden_size": 32}
        if family == "qwen2_5_vl":
            vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
        if family in ("qwen3_vl", "qwen3_5"):
            vision["num_position_embeddings"] = 64
            rope["mrope_interleaved"] = True
        if family == "qwen3_vl":
            vision["deepstack_visual_indexes"] = [0]
        if family == "qwen3_5":
            text = {
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "layer_types": ["linear_attention", "full_attention"],
            }
            rope["partial_rotary_factor"] = 1.0
        config = getattr(transformers, f"{names[family]}Config")(
            vision_config=vision,
            text_config=_text(tokenizer, rope_parameters={"rope_type": "default", **rope}, **text),
            **_ids(
                tokenizer,
                image_token_id="<|image_pad|>",
                video_token_id="<|video_pad|>",
                vision_start_token_id="<|vision_start|>",
                vision_end_token_id="<|vision_end|>",
            ),
        )
        is_third = family in ("qwen3_vl", "qwen3_5")
        of_processor = "Qwen3VL" if is_third else names[family]
        sizes = {"patch_size": _PATCH, "size": _PIXELS}
        processor = getattr(transformers, f"{of_processor}Processor")(
            Qwen2VLImageProcessor(**sizes),
            tokenizer,
            (Qwen3VLVideoProcessor if is_third else Qwen2VLVideoProcessor)(**sizes),
        )
        _save(folder, config, processor, family)

    return make


_IDEFICS_MARKS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
_IDEFICS_MARKS += tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
_QWEN = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "marks": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "tower": "model.visual",
    "projector": "model.visual.merger",
}
_LLAVA = {"tower": "model.vision_tower", "projector": "model.multi_modal_projector"}
TINY = {
    **{
        name: TinyFamily(make=_qwen_maker(name), **_QWEN)
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
    },
    "gemma3": TinyFamily(
        "<start_of_image>",
        _make_gemma3,
        **_LLAVA,
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        needs_torchvision=False,
    ),
    "gemma4": TinyFamily(
        "<|image|>",
        _make_gemma4,
        "model.vision_tower",
        "model.embed_vision",
        marks=("<|video|>",),
        named={
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    ),
    "internvl": TinyFamily(
        "<IMG_CONTEXT>\n",
        _make_internvl,
        **_LLAVA,
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "llava": TinyFamily(
        "<image>", _make_llava, **_LLAVA, marks=("<image>",), needs_torchvision=False
    ),
    "llava_next": TinyFamily(
        "<image>", _make_llava_next, **_LLAVA, marks=("<image>",), needs_torchvision=False
    ),
    "llava_onevision": TinyFamily(
        "<image>", _make_llava_onevision, **_LLAVA, marks=("<image>", "<video>")
    ),
    "idefics3": TinyFamily(
        "<image>",
        _make_idefics3,
        "model.vision_model",
        "model.connector",
        marks=_IDEFICS_MARKS,
        needs_torchvision=False,
    ),
    "smolvlm": TinyFamily(
        "<image>",
        _make_smolvlm,
        "model.vision_model",
        "model.connector",
        marks=(*_IDEFICS_MARKS, "<video>"),
    ),
    "mistral3": TinyFamily(
        "[IMG]", _make_mistral3, **_LLAVA, marks=("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    ),
    "glm4v": TinyFamily(
        "<|begin_of_image|><|image|><|end_of_image|>",
        _make_glm4v,
        "model.visual",
        "model.visual.merger",
        marks=(
            *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
            *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
        ),
    ),
    "llama4": TinyFamily(
        "<|image|>",
        _make_llama4,
        "vision_model",
        "multi_modal_projector",
        marks=(
            *("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
    ),
}
#: A family whose images follow each other in a batch, and one whose images have rows; both have
#: processors that work without torchvision.
FAMILIES = ("llava", "idefics3")


def make_untested(folder: Path, family: str) -> Path:
    """Write a model of a type that Paceline has no tests for, with its processor."""
    from transformers import (
        AutoModelForImageTextToText,
        AutoTokenizer,
        Idefics2Config,
        Idefics2Processor,
        LlavaProcessor,
        PaliGemmaConfig,
        PaliGemmaProcessor,
        VipLlavaConfig,
    )
    from transformers.models.idefics2.image_processing_pil_idefics2 import (
        Idefics2ImageProcessorPil,
    )
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(str(builtin_tokenizer()))
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"additional_special_tokens": list(_IDEFICS_MARKS)})
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    ids = _ids(tokenizer, image_token_id="<image>")
    torch.manual_seed(0)
    config: Any
    processor: Any
    if family == "vipllava":
        config = VipLlavaConfig(
            vision_config={"model_type": "clip_vision_model", **_VISION},
            text_config={"model_type": "llama", **_text(tokenizer)},
            vision_feature_layers=[-1, -2],
            tie_word_embeddings=False,
            **ids,
        )
        processor = LlavaProcessor(
            LlavaImageProcessorPil(size={"shortest_edge": _IMAGE}, crop_size=_SQUARE),
            tokenizer,
            patch_size=_PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    elif family == "idefics2":
        config = Idefics2Config(
            vision_config=_VISION,
            text_config={"model_type": "mistral", **_text(tokenizer)},
            perceiver_config={
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 1,
            },
            tie_word_embeddings=False,
            **ids,
        )
        processor = Idefics2Processor(
            Idefics2ImageProcessorPil(
                size={"shortest_edge": _IMAGE, "longest_edge": 2 * _IMAGE}, do_image_splitting=False
            ),
            tokenizer,
            image_seq_len=4,
        )
    else:
        config = PaliGemmaConfig(
            vision_config={"model_type": "siglip_vision_model", **_VISION},
            text_config={"model_type": "gemma", **_text(tokenizer)},
            projection_dim=32,
            **ids,
        )
        processor = PaliGemmaProcessor(
            SiglipImageProcessorPil(size=_SQUARE, image_seq_length=16), tokenizer
        )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor.chat_template = template("<image>")
    processor.save_pretrained(folder)
    return folder
