"""What `parallel.cpu_offload` is not supported with, and what it costs."""

from typing import Any

import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.activations import Activations
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.cost import Workload
from paceline.parallel.registry import STRATEGIES, check_strategy, estimate_cost

DATA, BOTH = ParallelDims(data=2), "optimizer,activations"


def make_config(offload: str, mode: str = "ddp", **settings: Any) -> Config:
    parallel = {"mode": mode, "cpu_offload": offload} | settings.pop("parallel", {})
    return Config(model="m", dataset="d", parallel=parallel, **settings)


@pytest.mark.parametrize(
    ("mode", "offload", "settings", "error"),
    [
        ("ddp", "all", {}, ("not-supported", "parallel.cpu_offload")),
        ("zero1", "all,activations", {}, ("not-supported", "parallel.cpu_offload")),
        ("zero2", "optimizer", {}, ("not-supported", "parallel.cpu_offload")),
        ("dp", "activations", {}, ("not-supported", "parallel.cpu_offload")),
        ("dp", "optimizer", {}, ("not-supported", "parallel.cpu_offload")),
        ("deepspeed", "activations", {}, ("not-supported", "parallel.cpu_offload")),
        (
            "parameter_server",
            "activations",
            {"task": "recommend"},
            ("not-supported", "parallel.cpu_offload"),
        ),
        ("diloco", BOTH, {}, ("not-supported", "parallel.cpu_offload")),
        (
            "ddp",
            BOTH,
            {"train_args": {"optim": "adamw_8bit"}},
            ("not-supported", "train_args.optim"),
        ),
        (
            "ddp",
            BOTH,
            {"train_args": {"optim": "schedule_free_adamw"}},
            ("not-supported", "train_args.optim"),
        ),
        (
            "ddp",
            "optimizer",
            {"compression": {"method": "topk"}},
            ("not-supported", "parallel.cpu_offload"),
        ),
        (
            "zero3",
            "activations",
            {"train_args": {"torch_compile": True}},
            ("not-supported", "train_args.torch_compile"),
        ),
        (
            "ddp",
            "activations",
            {"train_args": {"gradient_checkpointing": "selective"}},
            ("not-supported", "train_args.gradient_checkpointing"),
        ),
        (
            "zero3",
            "activations",
            {"parallel": {"device": "cpu"}},
            ("offload-on-cpu", "parallel.cpu_offload"),
        ),
    ],
)
def test_refuses_what_is_not_supported(
    mode: str, offload: str, settings: dict[str, Any], error: tuple[str, str]
) -> None:
    dims = ParallelDims(**{STRATEGIES[mode].main_dim: 2})
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_strategy(mode, make_config(offload, mode, **settings), dims, installed=False)


def test_refuses_activations_in_a_pipeline_only() -> None:
    config = make_config("activations", "hybrid")
    check_strategy("hybrid", config, ParallelDims(shard=2, tensor=2))
    with raises_error(ConfigError, code="not-supported", naming="parallel.cpu_offload"):
        check_strategy("hybrid", config, ParallelDims(shard=2, pipeline=2))


@pytest.mark.parametrize("mode", ["single", "ddp", "zero1"])
def test_moments_of_large_parameters_move_to_the_host(mode: str) -> None:
    large, small = TensorShape("a.weight", (80, 64), 4, True), TensorShape("a.bias", (64,), 4, True)
    shape, work = ModelShape((large, small)), Workload(activations=Activations(ends=1 << 20))
    dims = ParallelDims() if mode == "single" else DATA
    plain, offloaded = (
        estimate_cost(mode, shape, dims, work, make_config(offload, mode))
        for offload in ("none", "optimizer")
    )
    assert 0 < offloaded.optimizer <= 8 * small.numel
    assert offloaded.host == plain.optimizer - offloaded.optimizer
    assert offloaded.host_traffic == {"optimizer": 2 * offloaded.host}
    assert (offloaded.parameters, offloaded.gradients) == (plain.parameters, plain.gradients)
