"""Which kernel computes packed rows on which device, and which requests are rejected."""

import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.kernels.attention_choice import (
    VARLEN,
    AttentionSetup,
    check_attention,
    choose_attention,
    joins_samples,
)

H100, A100, T4 = (9, 0), (8, 0), (7, 5)
TORCH = frozenset({VARLEN})
ALL = TORCH | {"flash_attention_2", "flash_attention_3", "flash_attention_4"}


@pytest.mark.parametrize(
    ("setup", "kernel", "reason"),
    [
        (AttentionSetup("cpu"), "sdpa", "need a GPU"),
        (AttentionSetup("cpu", "bfloat16", installed=ALL), "sdpa", "need a GPU"),
        (AttentionSetup("xpu", "bfloat16", installed=ALL), "sdpa", "no kernel for `xpu`"),
        (AttentionSetup("cuda", "bfloat16", A100, TORCH), VARLEN, "bfloat16 on cuda"),
        (AttentionSetup("cuda", "float16", H100, TORCH), VARLEN, "float16 on cuda"),
        (AttentionSetup("cuda", "bfloat16", H100, ALL), "flash_attention_3", "bfloat16"),
        (AttentionSetup("cuda", "bfloat16", A100, ALL), VARLEN, "bfloat16"),
        (AttentionSetup("cuda", "float32", H100, ALL), "sdpa", "this run in float32"),
        (AttentionSetup("cuda", "float16", T4, ALL), "sdpa", "this GPU has 7.5"),
        (AttentionSetup("cuda", "bfloat16", A100), "sdpa", "build of torch"),
        (
            AttentionSetup("cuda", "bfloat16", A100, frozenset({"flash_attention_2"})),
            "flash_attention_2",
            "bfloat16",
        ),
        (AttentionSetup("cuda", "bfloat16", H100, ALL, 512), "sdpa", "the model's is 512"),
        (
            AttentionSetup("cuda", "bfloat16", H100, ALL, has_dropout=True),
            "flash_attention_2",
            "bfloat16",
        ),
        (AttentionSetup("cuda", "bfloat16", H100, TORCH, has_dropout=True), "sdpa", "dropout"),
    ],
)
def test_auto_selects_the_kernel_that_fits(setup: AttentionSetup, kernel: str, reason: str) -> None:
    choice = choose_attention("auto", setup)
    assert choice.kernel == kernel
    assert reason in choice.reason


@pytest.mark.parametrize("requested", ["sdpa", "flash_attention_2"])
def test_requested_kernel_is_chosen(requested: str) -> None:
    setup = AttentionSetup("cuda", "bfloat16", H100, ALL)
    assert choose_attention(requested, setup).kernel == requested


def make_config(attention: str, **train_args: str) -> Config:
    args = {"attn_implementation": attention, "precision": "bf16-mixed", **train_args}
    return Config(model="m", dataset="d", train_args=args)


@pytest.mark.parametrize(
    ("config", "device", "capability", "reason"),
    [
        (make_config("flash_attention_2"), "cpu", None, "no kernel for `cpu`"),
        (make_config("flex_attention"), "cpu", None, "no backward pass"),
        (make_config("flash_attention_2", precision="32"), "cuda", H100, "float32"),
        (make_config("flash_attention_2"), "cuda", T4, "this GPU has 7.5"),
        (make_config("flash_attention_4"), "cuda", A100, "needs compute capability 9.0"),
        (make_config("flash_attention_3"), "cuda", H100, "`flash-attn-3` is not installed"),
    ],
)
def test_request_that_the_device_cannot_compute_is_rejected(
    config: Config, device: str, capability: tuple[int, int] | None, reason: str
) -> None:
    code = "attention-on-cpu" if reason == "no backward pass" else "attention-missing"
    with raises_error(ConfigError, code=code, naming="train_args.attn_implementation") as caught:
        check_attention(config, device, capability)
    assert reason in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize("requested", ["auto", "sdpa", "eager"])
def test_requests_without_a_package_pass_on_a_cpu(requested: str) -> None:
    check_attention(make_config(requested), "cpu")


def test_results_of_samples_are_joined_unless_one_call_computes_them() -> None:
    assert joins_samples(make_config("auto"), "cpu")
    assert not joins_samples(make_config("auto"), "cuda")
    assert joins_samples(make_config("auto", precision="32"), "cuda")
    assert joins_samples(make_config("sdpa"), "cuda")
