"""Selection of LoRA target modules by names, a regular expression or `all-linear`."""

from typing import Any

import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.language import language_model_on_meta


def build(**lora: Any) -> Any:
    return language_model_on_meta(
        Config(model="builtin:qwen2-micro", dataset="d", lora={"enable": True, **lora})
    )


def adapted_modules(model: Any) -> set[str]:
    names = [
        name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name
    ]
    return {name[name.index("layers.") :] if "layers." in name else name for name in names}


def test_regular_expression_matches_full_names() -> None:
    names = adapted_modules(build(target_modules=r".*layers\.0\.self_attn\.(q|v)_proj"))
    assert names == {"layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"}
    all_linear = adapted_modules(build(target_modules="all-linear"))
    assert names < all_linear
    assert not any("lm_head" in name for name in all_linear)
    listed = adapted_modules(build(target_modules=["q_proj", "v_proj"]))
    assert names < listed < all_linear


def test_modules_to_save_are_fully_trained_with_all_linear() -> None:
    model = build(target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("embed_tokens.modules_to_save" in name for name in trained)
    assert any("lm_head.modules_to_save" in name for name in trained)


@pytest.mark.parametrize(
    ("lora", "fragments"),
    [
        (
            {"target_modules": "q_pro.*x"},
            ["matches no module", "q_proj", "whole name such as model.layers.0"],
        ),
        ({"target_modules": r"transformer\.h\.\d+\.attn"}, ["matches no module"]),
        ({"target_modules": ["q_proj", "query_key_value"]}, ["`query_key_value`", "q_proj"]),
        ({"target_modules": ["nope"]}, ["`nope`", "down_proj"]),
        ({"modules_to_save": ["wte"]}, ["`wte`", "lora.modules_to_save", "embed_tokens"]),
    ],
)
def test_rejects_targets_that_match_no_module(lora: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**lora)
    for fragment in fragments:
        assert fragment in caught.value.paragraph()
