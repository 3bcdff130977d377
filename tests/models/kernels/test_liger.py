"""Liger kernels: which parts of a model they replace, and which runs reject them. The kernels
themselves need a GPU."""

import copy
from importlib.util import find_spec

import pytest
import torch
from raised import raises_error
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.kernels.liger import check_liger, install_liger

CONFIG = Config(model="m", dataset="d", train_args={"use_liger_kernel": True})
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "head_dim": 8,
}  # fmt: skip
needs_liger = pytest.mark.skipif(
    find_spec("liger_kernel") is None,
    reason="liger-kernel, whose dependency triton takes 1 GB, is not installed",
)


def make_model(kind: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).eval()


@needs_liger
@pytest.mark.parametrize(
    ("kind", "mlp"),
    [("llama", "LigerSwiGLUMLP"), ("qwen2", "LigerSwiGLUMLP"), ("gemma2", "LigerGEGLUMLP")],
)
def test_norms_and_mlps_are_replaced_but_not_the_loss(kind: str, mlp: str) -> None:
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    model = make_model(kind)
    names = list(model.state_dict())
    ids = torch.arange(11).unsqueeze(0)
    before = model(input_ids=ids).logits
    forward, loss_function, cross_entropy = (
        model.forward,
        model.loss_function,
        functional.cross_entropy,
    )
    install_liger(model, CONFIG)
    replaced = {
        name: module.forward.args[0].__func__
        for name, module in model.named_modules()
        if "forward" in vars(module)
    }
    norms = {name for name, _ in model.named_modules() if name.endswith(("norm", "layernorm"))}
    mlps = {f"model.layers.{index}.mlp" for index in range(2)}
    assert set(replaced) == norms | mlps
    assert all(replaced[name] is LigerRMSNorm.forward for name in norms)
    assert all(replaced[name].__qualname__ == f"{mlp}.forward" for name in mlps)
    # The fused linear cross entropy would replace the model's forward.
    assert model.forward == forward
    assert model.loss_function is loss_function
    assert functional.cross_entropy is cross_entropy
    assert list(model.state_dict()) == names
    # On the CPU, the original methods run.
    assert torch.equal(model(input_ids=ids).logits, before)


@needs_liger
def test_kernels_get_the_tensors_of_accelerators_also_in_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from transformers.models.qwen2 import modeling_qwen2

    from paceline.models.kernels import liger

    norm_class = modeling_qwen2.Qwen2RMSNorm
    model = make_model("qwen2")
    install_liger(model, CONFIG)
    assert modeling_qwen2.Qwen2RMSNorm is norm_class  # models built later have no kernels
    copied = copy.deepcopy(model.model.norm)
    assert copied.forward.args[0].__self__ is copied
    assert copied.forward.args[0].__func__ is LigerRMSNorm.forward
    monkeypatch.setattr(liger, "_DEVICES", ("cpu",))
    for function in (
        lambda: copied(torch.ones(1, 32)),
        lambda: modeling_qwen2.apply_rotary_pos_emb(*[torch.ones(1, 1, 2, 8)] * 4),
    ):
        with pytest.raises(Exception, match=r"(?i)triton|driver|pointer|backend"):
            function()  # Triton does not compile for the CPU


@needs_liger
def test_family_without_kernels_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no kernels for its family, gpt_neox"):
        install_liger(make_model("gpt_neox"), CONFIG)


def test_cpu_is_rejected() -> None:
    with raises_error(ConfigError, code="liger-on-device", naming="train_args.use_liger_kernel"):
        check_liger(CONFIG, "cpu")
    check_liger(Config(model="m", dataset="d"), "cpu")


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_missing_package_is_rejected() -> None:
    with raises_error(ConfigError, code="missing-liger", naming="liger-kernel") as caught:
        check_liger(CONFIG, "cuda")
    assert "paceline[liger]" in str(caught.value.fix)
