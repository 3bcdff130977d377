"""Tiny vision-language models with random weights, built from configs: LLaVA and Idefics3."""

from pathlib import Path

import torch

from paceline.models.builtin import builtin_tokenizer

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
#: Size of an image in pixels, of a patch, and width of the vision tower.
_IMAGE, _PATCH, _WIDTH = 32, 8, 24
_VISION = {
    "hidden_size": _WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _IMAGE,
    "patch_size": _PATCH,
}
FAMILIES = ("llava", "idefics3")


def make_model(folder: Path, family: str) -> Path:
    """Write a model of the family with its processor to ``folder``, and return the folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(builtin_tokenizer()))
    tokenizer.chat_template = None
    marks = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    marks += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    torch.manual_seed(0)
    (_make_llava if family == "llava" else _make_idefics3)(folder, tokenizer)
    return folder


def _text_settings(tokenizer) -> dict:
    size = 8 * -(-len(tokenizer) // 8)
    return {**_TEXT, "vocab_size": size, "pad_token_id": tokenizer.pad_token_id}


def _make_llava(folder: Path, tokenizer) -> None:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION),
        text_config=LlamaConfig(**_text_settings(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    size = {"height": _IMAGE, "width": _IMAGE}
    LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": _IMAGE}, crop_size=size),
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)


def _make_idefics3(folder: Path, tokenizer) -> None:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    config = Idefics3Config(
        vision_config=_VISION,
        text_config={"model_type": "llama", **_text_settings(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * _IMAGE}, max_image_size={"longest_edge": _IMAGE}
        ),
        tokenizer,
        image_seq_len=(_IMAGE // _PATCH) ** 2 // 4,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
