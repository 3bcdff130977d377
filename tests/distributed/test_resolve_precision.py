"""How `precision: auto` is resolved for the devices of a run."""

from types import SimpleNamespace

import pytest
import torch

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.devices import with_precision, with_supported_tf32
from paceline.train.precision import check_same_precision, set_float32_precision


def make_config(**train_args: str | bool | None) -> Config:
    return Config.model_validate({"model": "m", "dataset": "d", "train_args": train_args})


def set_capabilities(monkeypatch: pytest.MonkeyPatch, *majors: int) -> None:
    """Simulate CUDA devices with these major compute capabilities."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=majors[index])
    )


@pytest.mark.parametrize(
    ("majors", "names", "precision", "reason"),
    [
        ((8, 8), ["NVIDIA A10", "NVIDIA A10"], "bf16-mixed", "bfloat16 is supported by NVIDIA A10"),
        ((7, 7), ["Tesla T4", "Tesla T4"], "fp16-mixed", "bfloat16 is not supported by Tesla T4"),
        (
            (8, 7),
            ["NVIDIA A10", "Tesla V100"],
            "fp16-mixed",
            "bfloat16 is not supported by Tesla V100",
        ),
        ((9,), [], "bf16-mixed", "bfloat16 is supported by cuda"),
    ],
)
def test_cuda_precision_depends_on_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
    majors: tuple[int, ...],
    names: list[str],
    precision: str,
    reason: str,
) -> None:
    set_capabilities(monkeypatch, *majors)
    resolved, line = with_precision(make_config(), "cuda", names)
    assert resolved.train_args.precision == precision
    assert line == f"precision: {precision}, chosen by `precision: auto`: {reason}"


def test_unused_devices_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    set_capabilities(monkeypatch, 8, 7)
    assert (
        with_precision(make_config(), "cuda", ["NVIDIA A10"])[0].train_args.precision
        == "bf16-mixed"
    )


def test_cpu_and_unknown_accelerators_use_float32() -> None:
    assert with_precision(make_config(), "cpu", ["cpu", "cpu"])[0].train_args.precision == "32"
    assert with_precision(make_config(), "npu9", ["Card"])[0].train_args.precision == "32"


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "32"])
def test_explicit_precision_is_unchanged(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    set_capabilities(monkeypatch, 7)
    requested = make_config(precision=precision)
    assert with_precision(requested, "cuda", ["Tesla T4"]) == (requested, f"precision: {precision}")
    assert with_precision(requested, "cpu") == (requested, f"precision: {precision}")


class FakeCommunicator(Communicator):
    """A communicator whose ranks report these precisions."""

    def __init__(self, *precisions: str) -> None:
        self.precisions = precisions

    def gather_objects(self, value: object) -> list[object]:
        return list(self.precisions)


def test_rejects_ranks_with_different_precisions() -> None:
    check_same_precision(FakeCommunicator("32", "32"), make_config().train_args)
    with pytest.raises(ConfigError) as error:
        check_same_precision(
            FakeCommunicator("bf16-mixed", "fp16-mixed", "bf16-mixed"), make_config().train_args
        )
    assert "bf16-mixed on ranks 0, 2; fp16-mixed on rank 1" in error.value.what
    assert "train_args.precision" in str(error.value.fix)


@pytest.mark.parametrize(
    ("device_type", "capability", "shown"),
    [("cuda", (7, 5), "compute capability 7.5"), ("cuda", None, "`cuda`"), ("cpu", None, "`cpu`")],
)
def test_tf32_requires_devices_that_have_it(
    device_type: str, capability: tuple[int, int] | None, shown: str
) -> None:
    config = make_config(tf32=True)
    assert with_supported_tf32(config, "cuda", (8, 0)) == (config, None)
    for value in (False, None):
        config = make_config(tf32=value)
        assert with_supported_tf32(config, device_type, capability) == (config, None)
    config, warning = with_supported_tf32(make_config(tf32=True), device_type, capability)
    assert config.train_args.tf32 is None
    assert warning is not None
    assert shown in warning


def read_float32_precision() -> tuple[str, str, str]:
    cudnn = torch.backends.cudnn
    return (
        torch.backends.cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.rnn.fp32_precision,
    )


def test_tf32_sets_products_and_convolutions() -> None:
    default = read_float32_precision()
    set_float32_precision(None)
    assert read_float32_precision() == default
    try:
        for tf32 in (True, False):
            set_float32_precision(tf32)
            assert [each == "tf32" for each in read_float32_precision()] == [tf32] * 3
            # What Inductor reads raises an error if it contradicts the above.
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
            assert torch.backends.cudnn.allow_tf32 is tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cuda.matmul.fp32_precision = default[0]
        torch.backends.cudnn.conv.fp32_precision = default[1]
        torch.backends.cudnn.rnn.fp32_precision = default[2]


def test_compute_format_of_each_precision() -> None:
    formats = {
        precision: make_config(precision=precision).train_args.compute_format
        for precision in ("32", "bf16-mixed", "fp16-mixed", "bf16-true")
    }
    assert formats == {
        "32": None,
        "bf16-mixed": "bfloat16",
        "fp16-mixed": "float16",
        "bf16-true": "bfloat16",
    }
    assert make_config(precision="32", tf32=True).train_args.compute_format == "tf32"
    assert make_config(precision="bf16-mixed", tf32=True).train_args.compute_format == "bfloat16"
