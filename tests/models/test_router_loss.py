"""The auxiliary loss of mixtures over a global batch in parts is transformers' over the whole."""

from pathlib import Path

import pytest
import torch
from families import build_model
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.models.head.router_coefficient import (
    check_router_loss,
    check_task_of_router_loss,
    coefficient_of,
)
from paceline.models.head.router_loss import RouterLoss, find_router_loss

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe")
LENGTHS = (12, 3, 7, 9)


def config_for(model: str, **args: float) -> Config:
    return Config(model=model, dataset=["builtin:python-docs"], train_args=args)


@pytest.mark.parametrize("name", MIXTURES)
def test_parts_have_the_loss_of_the_whole(name: str) -> None:
    model = build_model(name)
    ids = torch.randint(3, 8192, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    routers = [
        parameter
        for each, parameter in model.named_parameters()
        if each.endswith((".gate.weight", "router.weight", "router.layer.weight"))
    ]
    assert routers
    whole = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    expected = torch.autograd.grad(whole.aux_loss, routers)
    loss = RouterLoss(0.5, int(model.num_experts), int(model.num_experts_per_tok))

    def part(rows: slice) -> tuple[torch.Tensor, ...]:
        width = max(LENGTHS[rows])
        return ids[rows, :width], mask[rows, :width]

    totals: dict[str, torch.Tensor] = {}
    parts = [slice(0, 1), slice(1, 4)]
    outputs = [
        model(input_ids=part(rows)[0], attention_mask=part(rows)[1], output_router_logits=True)
        for rows in parts
    ]
    for rows, output, count in zip(parts, outputs, (5.0, 15.0), strict=True):
        for key, value in loss.totals(output.router_logits, part(rows)[1], count).items():
            totals[key] = totals.get(key, torch.zeros(())) + value.detach()
    terms = [
        loss.term(output.router_logits, part(rows)[1], totals)
        for rows, output in zip(parts, outputs, strict=True)
    ]
    total = sum(terms) / 20.0
    assert float(total) == pytest.approx(0.5 * float(whole.aux_loss), rel=1e-6)
    gradients = torch.autograd.grad(total, routers)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, 0.5 * reference, rtol=1e-5, atol=1e-8)


def test_config_of_the_model_decides_without_a_value(tmp_path: Path) -> None:
    asking, silent = tmp_path / "asking", tmp_path / "silent"
    numbers = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    build_model("mixtral", **numbers).config.save_pretrained(asking)
    build_model("mixtral", router_aux_loss_coef=0.02).config.save_pretrained(silent)
    assert coefficient_of(config_for(str(asking))) == 0.02
    assert coefficient_of(config_for(str(asking), router_aux_loss_coef=0.0)) == 0.0
    assert coefficient_of(config_for(str(silent))) == 0.0
    assert coefficient_of(config_for(str(silent), router_aux_loss_coef=0.1)) == 0.1
    model = build_model("mixtral")
    assert find_router_loss(model, config_for(str(silent))) is None
    found = find_router_loss(model, config_for(str(asking)))
    assert found == RouterLoss(0.02, 4, 2)


def test_models_and_layouts_without_this_loss_are_refused(tmp_path: Path) -> None:
    build_model("qwen2").config.save_pretrained(tmp_path / "dense")
    build_model("deepseek_v3").config.save_pretrained(tmp_path / "other")
    build_model("mixtral").config.save_pretrained(tmp_path / "mixture")
    dense = config_for(str(tmp_path / "dense"), router_aux_loss_coef=0.01)
    assert coefficient_of(dense) == 0.0
    with raises_error(ConfigError, code="router-loss-not-supported", naming="has no experts"):
        check_task_of_router_loss(dense)
    check_task_of_router_loss(config_for(str(tmp_path / "dense"), router_aux_loss_coef=0.0))
    check_task_of_router_loss(config_for(str(tmp_path / "dense")))
    other = config_for(str(tmp_path / "other"), router_aux_loss_coef=0.01)
    with raises_error(ConfigError, code="router-loss-not-supported", naming="other"):
        find_router_loss(build_model("deepseek_v3"), other)
    off = config_for(str(tmp_path / "other"), router_aux_loss_coef=0.0)
    assert find_router_loss(build_model("deepseek_v3"), off) is None
    mixture = config_for(str(tmp_path / "mixture"), router_aux_loss_coef=0.01)
    check_task_of_router_loss(mixture)
    check_router_loss(mixture, ParallelDims(data=4))
    with raises_error(ConfigError, code="router-loss-with-layout", naming="parallel.pipeline"):
        check_router_loss(mixture, ParallelDims(pipeline=2))
    preference = mixture.model_copy(update={"task": "dpo"})
    with raises_error(ConfigError, code="router-loss-not-supported", naming="dpo"):
        check_task_of_router_loss(preference)
