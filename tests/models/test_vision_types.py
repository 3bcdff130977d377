"""The types of vision-language models, compared with the tables of transformers."""

import json
from pathlib import Path

import pytest
from raised import raises_error
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.kinds import LANGUAGE, VISION_LANGUAGE, kind_of, saved_kind
from paceline.models.vision.parts import Part, part_of
from paceline.models.vision.types import REFUSED_TYPES, TESTED_TYPES, TEXT_TYPES, UNTESTED_TYPES
from paceline.tasks import load_task


def make_config(folder: Path, content: dict[str, object], **keys: object) -> Config:
    (folder / "config.json").write_text(json.dumps(content))
    return Config.model_validate({"model": str(folder), "dataset": "rows.jsonl", **keys})


def test_types_are_those_of_transformers() -> None:
    # `mistral4` is the language model of other types.
    types = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - {"mistral4"}
    assert TESTED_TYPES | UNTESTED_TYPES | set(REFUSED_TYPES) == types
    assert len(TESTED_TYPES) + len(UNTESTED_TYPES) + len(REFUSED_TYPES) == len(types)
    assert types & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == TEXT_TYPES


@pytest.mark.parametrize(
    ("content", "is_vision"),
    [
        ({"model_type": "gemma3", "vision_config": {"depth": 1}}, True),
        ({"model_type": "gemma3"}, False),
        ({"model_type": "gemma3_text"}, False),
        ({"model_type": "qwen3_5_text"}, False),
        ({"model_type": "kosmos-2"}, True),
        ({"model_type": "qwen2"}, False),
    ],
)
def test_a_model_with_a_vision_tower_is_a_vision_language_model(
    content: dict[str, object], is_vision: bool, tmp_path: Path
) -> None:
    config = make_config(tmp_path, content)
    assert kind_of(config) is (VISION_LANGUAGE if is_vision else LANGUAGE)
    assert kind_of(config.model_copy(update={"task": "dpo"})) is LANGUAGE


def test_text_only_trains_a_causal_language_model(tmp_path: Path) -> None:
    both = {"model_type": "qwen3_5", "vision_config": {"depth": 1}}
    config = make_config(tmp_path, both, vision={"text_only": True})
    assert kind_of(config) is LANGUAGE
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(both))
    assert saved_kind(folder) is VISION_LANGUAGE
    (folder.parent / "config.yaml").write_text("vision: {text_only: true}\n")
    assert saved_kind(folder) is LANGUAGE
    (folder.parent / "config.yaml").write_text("task: dpo\n")
    assert saved_kind(folder) is LANGUAGE
    (folder.parent / "config.yaml").write_text("task: sft\n")
    assert saved_kind(folder) is VISION_LANGUAGE
    config = make_config(tmp_path, {"model_type": "qwen2_5_vl"}, vision={"text_only": True})
    with raises_error(ConfigError, code="no-text-only-model", naming="qwen2_5_vl"):
        load_task(config).check()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"model_type": "florence2"}, "an encoder with a decoder"),
        ({"model_type": "vision-encoder-decoder"}, "an encoder with a decoder"),
        (
            {"model_type": "blip-2", "text_config": {"is_encoder_decoder": True}},
            "an encoder with a decoder",
        ),
        ({"model_type": "video_llava"}, "reads videos"),
    ],
)
def test_types_that_are_refused(content: dict[str, object], reason: str, tmp_path: Path) -> None:
    task = load_task(make_config(tmp_path, content))
    with raises_error(ConfigError, code="vision-language-type-refused", naming=reason):
        task.check()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", Part.TOWER),
        ("model.visual.merger.mlp.0.weight", Part.PROJECTOR),
        ("model.visual.deepstack_merger_list.0.norm.weight", Part.PROJECTOR),
        ("vision_model.patch_embedding.weight", Part.TOWER),
        ("model.image_newline", Part.PROJECTOR),
        ("model.embed_vision.embedding_projection.weight", Part.PROJECTOR),
        ("model.audio_tower.layers.0.weight", Part.AUDIO),
        ("model.embed_audio.embedding_projection.weight", Part.AUDIO),
        ("model.language_model.layers.0.mlp.up_proj.weight", Part.LANGUAGE),
        ("lm_head.weight", Part.LANGUAGE),
    ],
)
def test_parts_by_name(name: str, part: Part) -> None:
    assert part_of(name) is part
