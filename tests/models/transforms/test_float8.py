"""Float8 layers of torchao: which layers are converted, emulated training, and what is refused."""

import pytest
import torch
from raised import raises_error
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.models.transforms.float8 import convert_to_float8, is_convertible
from paceline.models.transforms.float8_check import check_float8
from paceline.parallel.registry import check_strategy

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def make_model(intermediate_size: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=64, intermediate_size=intermediate_size, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=320,
        )
    )  # fmt: skip


def make_config(parallel: dict[str, object] | None = None, **sections: object) -> Config:
    return Config.model_validate(
        {"model": "m", "dataset": "d", "parallel": parallel or {}, **sections}
    )


def float8_layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ != "Linear"
            and isinstance(module, nn.Linear)}  # fmt: skip


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(320, (2, 13), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_linear_layers_of_the_blocks_are_converted_and_parameters_are_kept() -> None:
    model = make_model(intermediate_size=120)
    parameters = dict(model.named_parameters())
    args = TrainArgs(fp8="tensorwise", fp8_emulate=True)
    (notice,) = convert_to_float8(model, args)
    # Of the MLP, no layer has sizes that are all multiples of 16.
    attention = {
        f"model.layers.{block}.self_attn.{name}_proj" for block in (0, 1) for name in "qkvo"
    }
    assert float8_layers(model) == attention
    assert notice == (
        "info",
        "float8: 8 of 14 linear layers of the blocks, `tensorwise` scaling, emulated",
    )
    converted = dict(model.named_parameters())
    assert list(converted) == list(parameters)
    assert all(converted[name] is parameter for name, parameter in parameters.items())


def test_routers_and_quantized_layers_are_not_convertible() -> None:
    class Quantized(nn.Linear):
        pass

    assert is_convertible("mlp.gate_proj", nn.Linear(32, 64))
    assert not is_convertible("mlp.gate", nn.Linear(32, 64))
    assert not is_convertible("mlp.router", nn.Linear(32, 64))
    assert not is_convertible("mlp.up_proj", Quantized(32, 64))
    assert not is_convertible("mlp.up_proj", nn.Linear(32, 63))


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_losses_are_close_to_those_of_float32(recipe: str) -> None:
    expected = train(make_model())
    model = make_model()
    convert_to_float8(model, TrainArgs.model_validate({"fp8": recipe, "fp8_emulate": True}))
    losses = train(model)
    assert losses == pytest.approx(expected, rel=5e-3)
    assert losses != pytest.approx(expected, rel=1e-6)


def test_without_compilation_a_warning_is_returned() -> None:
    notices = convert_to_float8(make_model(), TrainArgs(fp8="rowwise"))
    assert [level for level, _ in notices] == ["info", "warning"]
    assert "torch_compile" in notices[1][1]
    compiled = TrainArgs(fp8="rowwise", torch_compile=True)
    assert [level for level, _ in convert_to_float8(make_model(), compiled)] == ["info"]
    assert convert_to_float8(make_model(), TrainArgs()) == []


@pytest.mark.parametrize(
    ("device_type", "capability", "shown"),
    [("cpu", None, "`cpu`"), ("xpu", None, "`xpu`"), ("cuda", (8, 0), "compute capability 8.0")],
)
def test_devices_without_float8_products_are_refused(
    device_type: str, capability: tuple[int, int] | None, shown: str
) -> None:
    config = make_config(train_args={"fp8": True, "precision": "32"})
    assert config.train_args.fp8 == "tensorwise"
    check_float8(config, "cuda", (8, 9))
    with pytest.raises(ConfigError) as error:
        check_float8(config, device_type, capability)
    assert shown in error.value.what
    assert "fp8_emulate" in str(error.value.fix)
    emulated = make_config(train_args={"fp8": True, "fp8_emulate": True, "precision": "32"})
    check_float8(emulated, device_type, capability)


def test_emulation_on_a_cpu_needs_float32() -> None:
    args = {"fp8": "rowwise", "fp8_emulate": True, "precision": "bf16-mixed"}
    config = make_config(train_args=args)
    check_float8(config, "cuda", (8, 0))
    with raises_error(
        ConfigError, code="fp8-emulation-with-autocast", naming="train_args.fp8_emulate"
    ):
        check_float8(config, "cpu", None)


@pytest.mark.parametrize("mode", ["single", "ddp", "zero1", "zero2", "zero3"])
def test_supported_modes(mode: str) -> None:
    config = make_config({"mode": mode}, train_args={"fp8": "rowwise", "precision": "bf16-mixed"})
    check_strategy(mode, config, ParallelDims())


@pytest.mark.parametrize(
    ("mode", "dims", "sections", "fragment"),
    [
        ("ddp", {"data": 2}, {"lora": {"enable": True}}, "lora.enable: true"),
        ("ddp", {"data": 2}, {"task": "classify"}, "only the blocks of language models"),
        ("ddp", {"data": 2}, {"train_args": {"precision": "fp16-mixed"}}, "fp16-mixed"),
        ("tensor", {"tensor": 2}, {}, "multiples of 16"),
        ("pipeline", {"pipeline": 2}, {}, "pipeline stages"),
        ("deepspeed", {"data": 2}, {}, "DeepSpeed's hooks"),
        ("dp", {"data": 2}, {}, "copies of a model"),
        ("diloco", {"data": 2}, {}, "workers"),
    ],
)
def test_unsupported_settings_and_modes_are_refused(
    mode: str, dims: dict[str, int], sections: dict[str, dict[str, object]], fragment: str
) -> None:
    args = {"fp8": "tensorwise", **sections.get("train_args", {})}
    config = make_config({"mode": mode}, **{**sections, "train_args": args})
    with pytest.raises(ConfigError) as error:
        check_strategy(mode, config, ParallelDims(**dims), installed=False)
    assert fragment in error.value.what
    assert "train_args.fp8: tensorwise" in error.value.what
