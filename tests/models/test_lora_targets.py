"""Which modules get adapters: names, a regular expression, all linear layers; and what matches
nothing is refused."""

from typing import Any

import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.language import language_model_on_meta


def build(**lora: Any) -> Any:
    return language_model_on_meta(
        Config(model="builtin:qwen2-micro", dataset="d", lora={"enable": True, **lora})
    )


def adapted(model: Any) -> set[str]:
    names = [
        name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name
    ]
    return {name[name.index("layers.") :] if "layers." in name else name for name in names}


def test_a_regular_expression_matches_whole_names() -> None:
    names = adapted(build(target_modules=r".*layers\.0\.self_attn\.(q|v)_proj"))
    assert names == {"layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"}
    every = adapted(build(target_modules="all-linear"))
    assert names < every
    assert not any("lm_head" in name for name in every)
    listed = adapted(build(target_modules=["q_proj", "v_proj"]))
    assert names < listed < every


def test_modules_to_save_beside_all_linear_are_trained_in_full() -> None:
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
def test_what_matches_nothing_is_refused(lora: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**lora)
    for fragment in fragments:
        assert fragment in caught.value.paragraph()
