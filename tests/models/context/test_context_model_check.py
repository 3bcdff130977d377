"""The check of a model without weights refuses what the ranks refuse."""

from typing import Any

import pytest
import torch
from families import FAMILIES, HYBRIDS, TOKENS, build_model

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.models import attention
from paceline.models.checks.packing import choose_packing
from paceline.models.context.model_check import check_context_model

CONFIG = Config(model="m", dataset="d")
ALL: dict[str, tuple[str, dict[str, Any]]] = {**FAMILIES, **HYBRIDS}


def reason_against(model: Any) -> str | None:
    """Return the code of the reason why ranks cannot divide the rows of a model; None if they
    can."""
    try:
        check_context_model(model, CONFIG, ParallelDims(context=2))
    except ConfigError as error:
        return str(error.values["reason.code"])
    return None


def model_without_weights(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, numbers = ALL[family]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TOKENS, **numbers))


@pytest.mark.parametrize(
    ("family", "code"),
    [
        ("qwen2", None),
        ("gpt_oss", None),
        ("recurrent_gemma", "context-mixers"),
        ("lfm2", "context-mixers"),
        ("stablelm", "context-lengths-not-passed"),
        ("gptj", "attention-not-replaceable"),
    ],
)
def test_reason_against_a_model_without_weights(family: str, code: str | None) -> None:
    model = model_without_weights(family)
    before = attention.attention_of(model)
    assert reason_against(model) == code
    assert attention.attention_of(model) == before


@pytest.mark.soak
@pytest.mark.parametrize("family", ALL)
def test_ranks_accept_and_refuse_the_same_families(family: str) -> None:
    model = build_model(family)
    accepted = reason_against(model) is None
    if accepted:
        packing = choose_packing(model, torch.device("cpu"), CONFIG, divides_rows=True)
        accepted = packing.rows == "segments"
    assert accepted == (reason_against(model_without_weights(family)) is None)
