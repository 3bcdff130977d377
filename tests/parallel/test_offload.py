"""What `parallel.cpu_offload` is not supported with, and what it costs."""

from typing import Any

import pytest

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
    ("mode", "offload", "settings", "message"),
    [
        ("ddp", "all", {}, "each rank computes with the full weights"),
        ("zero1", "all,activations", {}, r"`parallel.cpu_offload: \[all, activations\]`"),
        ("zero2", "optimizer", {}, "same device as the shards"),
        ("dp", "activations", {}, "the threads of its devices"),
        ("dp", "optimizer", {}, "stays on the device"),
        ("deepspeed", "activations", {}, "untested with DeepSpeed"),
        ("parameter_server", "activations", {"task": "recommend"}, "no blocks"),
        ("diloco", BOTH, {}, "stays on the device"),
        ("ddp", BOTH, {"train_args": {"optim": "adamw_8bit"}}, "in 8 bits already"),
        ("ddp", BOTH, {"train_args": {"optim": "schedule_free_adamw"}}, "all parameters"),
        ("ddp", "optimizer", {"compression": {"method": "topk"}}, "moments of local gradients"),
        ("zero3", "activations", {"train_args": {"torch_compile": True}}, "compiled block"),
        (
            "ddp",
            "activations",
            {"train_args": {"gradient_checkpointing": "selective"}},
            "not saved by autograd",
        ),
        ("zero3", "activations", {"parallel": {"device": "cpu"}}, "requires an accelerator"),
    ],
)
def test_refuses_what_is_not_supported(
    mode: str, offload: str, settings: dict[str, Any], message: str
) -> None:
    dims = ParallelDims(**{STRATEGIES[mode].main_dim: 2})
    with pytest.raises(ConfigError, match=message):
        check_strategy(mode, make_config(offload, mode, **settings), dims, installed=False)


def test_refuses_activations_in_a_pipeline_only() -> None:
    config = make_config("activations", "hybrid")
    check_strategy("hybrid", config, ParallelDims(shard=2, tensor=2))
    with pytest.raises(ConfigError, match="before backward of the first"):
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
