"""`precision: bf16-true`: stochastic rounding is unbiased, depends on positions only, and trains
nearly as float32."""

import logging
from typing import Any

import pytest
import torch
from raised import raises_error
from torch import nn
from torch._inductor import compile_fx, metrics
from torch.nn import functional

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import check_strategy
from paceline.parallel.state import TensorShard
from paceline.train.optimizers import rounding
from paceline.train.optimizers.build import build_optimizer
from paceline.train.optimizers.compiled_adamw import CompiledAdamW
from paceline.train.optimizers.rounding import add_rounding, round_stochastically


def positions(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int32)


@pytest.mark.parametrize("value", [1 + 2**-10, -3.1, 1e-30, 1e-3])
def test_rounding_is_unbiased(value: float) -> None:
    values = torch.full((200_000,), value)
    results = round_stochastically(values, positions(len(values)), "weight 1")
    assert torch.equal(results, results.bfloat16().float())
    neighbors = results.unique()
    assert len(neighbors) == 2
    spacing = float(neighbors[1] - neighbors[0])
    assert neighbors[0] < values[0] < neighbors[1]
    # Five standard deviations of the mean of as many draws.
    assert abs(float(results.double().mean()) - float(values[0])) < 5 * 0.5 * spacing / 200_000**0.5


def test_bits_of_neighbors_steps_and_names_are_independent() -> None:
    values = torch.full((100_000,), 1 + 2**-8)  # exactly between two numbers: up or down
    index = positions(len(values))
    ups = [
        (round_stochastically(values, index, purpose) > 1.004).double() - 0.5
        for purpose in ("42 0 a ", "42 1 a ", "42 0 b ", "43 0 a ", "42 0 a exp_avg")
    ]
    for number, first in enumerate(ups):
        assert abs(float(first.mean())) < 0.01
        for lag in (1, 2, 64, 256):
            assert abs(float((first[lag:] * first[:-lag]).mean())) < 0.005
        for second in ups[number + 1 :]:
            assert abs(float((first * second).mean())) < 0.005


def test_representable_and_non_finite_numbers_are_unchanged() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf])
    values = torch.cat([values, torch.randn(1000).bfloat16().float()])
    assert torch.equal(round_stochastically(values, positions(len(values)), "x"), values)
    assert round_stochastically(torch.tensor([torch.nan]), positions(1), "x").isnan().all()


def make_optimizer(name: str, param: nn.Parameter, shards: list[TensorShard]) -> Any:
    args = Config(
        model="m", dataset="d", train_args={"optim": name, "weight_decay": 0.1}
    ).train_args
    optimizer = build_optimizer(args, 1e-3, [("w", param)], frozenset({"w"}))
    add_rounding(optimizer, 42, shards)
    return optimizer


def train(optimizer: Any, param: nn.Parameter, gradients: list[torch.Tensor]) -> None:
    for step, gradient in enumerate(gradients):
        optimizer.rounding.step = step
        param.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "rmsprop", "adagrad"])
def test_shards_are_updated_as_the_full_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that FSDP, ZeRO-1 and tensor parallelism keep, with pieces smaller than a part."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(12, 10, generator=generator).bfloat16()
    gradients = [torch.randn(12, 10, generator=generator).bfloat16() for _ in range(4)]

    def updated(
        cut: Any, make_shards: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.dtype]:
        param = nn.Parameter(cut(full).clone())
        optimizer = make_optimizer(name, param, make_shards(param))
        train(optimizer, param, [cut(gradient) for gradient in gradients])
        state = {k: v for k, v in optimizer.state[param].items() if v is not None}
        return param.detach(), state, param.dtype

    weight, state, dtype = updated(lambda x: x, lambda p: [TensorShard.full("w", p, p)])
    assert dtype == torch.bfloat16
    moments = {key: value for key, value in state.items() if key != "step"}
    assert all(value.dtype == torch.bfloat16 for value in moments.values())
    assert not torch.equal(weight, full)
    monkeypatch.setattr(rounding, "_PIECE_ELEMENTS", 16)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[2:4], x[8:11]])

    cuts: dict[str, tuple[Any, Any]] = {
        "pieces": (lambda x: x, lambda p: [TensorShard.full("w", p, p)]),
        "columns": (
            lambda x: x[:, 4:8].contiguous(),
            lambda p: [TensorShard("w", p, (12, 10), (0, 4), key=p)],
        ),
        "flat": (
            lambda x: x.flatten()[33:87],
            lambda p: [TensorShard("w", p, (12, 10), (33,), key=p, flat=True)],
        ),
        "ranges": (
            rows,
            lambda p: [
                TensorShard("w", p[:2], (12, 10), (2, 0), key=p, region=(slice(0, 2), slice(None))),
                TensorShard("w", p[2:], (12, 10), (8, 0), key=p, region=(slice(2, 5), slice(None))),
            ],
        ),
    }
    for cut, make_shards in cuts.values():
        part, part_state, _ = updated(cut, make_shards)
        assert torch.equal(part, cut(weight))
        for key, value in moments.items():
            assert torch.equal(part_state[key], cut(value))
        if "step" in state:
            assert part_state["step"] == state["step"] == len(gradients)


CUTS: dict[str, tuple[Any, Any]] = {
    "full": (lambda x: x, lambda p: TensorShard.full("w", p, p)),
    "rows": (lambda x: x[3:9], lambda p: TensorShard("w", p, (12, 10), (3, 0), key=p)),
    "columns": (lambda x: x[:, 4:8], lambda p: TensorShard("w", p, (12, 10), (0, 4), key=p)),
    "flat": (
        lambda x: x.flatten()[33:87],
        lambda p: TensorShard("w", p, (12, 10), (33,), key=p, flat=True),
    ),
}


@pytest.mark.soak  # compiles a kernel
def test_compiled_update_equals_the_one_of_many_kernels() -> None:
    """Of the full tensor and of its parts, with a step that is skipped on the device."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(12, 10, generator=generator).bfloat16()
    gradients = [torch.randn(12, 10, generator=generator).bfloat16() for _ in range(4)]
    for cut, shard_of in CUTS.values():
        results = []
        for is_compiled in (False, True):
            param = nn.Parameter(cut(full).clone(memory_format=torch.contiguous_format))
            optimizer = make_optimizer("adamw", param, [shard_of(param)])
            optimizer.compiled = CompiledAdamW() if is_compiled else None
            for step, gradient in enumerate(gradients):
                optimizer.rounding.step = step
                optimizer.found_inf = torch.tensor(float(step == 2))
                param.grad = cut(gradient).clone(memory_format=torch.contiguous_format)
                optimizer.step()
            assert not is_compiled or optimizer.compiled.works
            results.append({"weight": param.detach(), **optimizer.state[param]})
        assert results[0]["step"] == results[1]["step"] == len(gradients) - 1
        for key in ("weight", "exp_avg", "exp_avg_sq"):
            # A sum that is rounded differently in float32 may change a weight's last bit.
            differences = results[0][key] != results[1][key]
            assert float(differences.float().mean()) < 0.05, key
            assert torch.allclose(results[0][key].float(), results[1][key].float(), rtol=0.01)


@pytest.mark.soak  # compiles a kernel
def test_compiled_update_is_one_kernel_of_at_most_40_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    param = nn.Parameter(torch.randn(1 << 16).bfloat16())
    param.grad = torch.randn_like(param)
    optimizer = make_optimizer("adamw", param, [TensorShard.full("w", param, param)])
    optimizer.compiled = CompiledAdamW()
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "disabled", False)
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "level", logging.INFO)
    torch._dynamo.reset()
    metrics.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        optimizer.step()
    assert metrics.generated_kernel_count == 1
    assert 14 <= metrics.num_bytes_accessed / param.numel() <= 40


def test_without_a_compiler_the_update_takes_many_kernels(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = []
    for is_broken in (False, True):
        param = nn.Parameter(torch.ones(100).bfloat16())
        optimizer = make_optimizer("adamw", param, [TensorShard.full("w", param, param)])
        if is_broken:
            optimizer.compiled = CompiledAdamW()
            optimizer.compiled._update = torch.compile(_fail, fullgraph=True)
        train(optimizer, param, [torch.ones(100).bfloat16()] * 3)
        weights.append(param.detach())
    assert torch.equal(*weights)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "cannot be compiled" in caplog.text


def test_weights_that_the_compiled_kernel_cannot_update_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    param = nn.Parameter(torch.ones(12, 10).bfloat16())
    shard = TensorShard("w", param, (24, 20), (12, 10), key=param)
    optimizer = make_optimizer("adamw", param, [shard])
    optimizer.compiled = CompiledAdamW()
    with caplog.at_level(logging.INFO):
        train(optimizer, param, [torch.ones(12, 10).bfloat16()] * 3)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "1 weight on this rank cannot be updated by the compiled kernel" in caplog.text


def _fail(*_: torch.Tensor) -> None:
    raise RuntimeError("no compiler")


def memorize(dtype: torch.dtype, rounds: bool) -> tuple[float, float]:
    """Train a small network on fixed data with a learning rate whose updates are below the
    spacing of most weights in bfloat16. Return its first and last loss."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 32, generator=generator)
    targets = torch.randint(0, 16, (256,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 16)).to(dtype)
    args = Config(model="m", dataset="d").train_args
    named = list(model.named_parameters())
    optimizer = build_optimizer(args, 2e-4, named, frozenset())
    if rounds:
        add_rounding(optimizer, 42, [TensorShard.full(name, p, p) for name, p in named])
    losses = []
    for step in range(300):
        loss = functional.cross_entropy(model(inputs.to(dtype)).float(), targets)
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        if rounds:
            optimizer.rounding.step = step  # type: ignore[attr-defined]
        optimizer.step()
    return losses[0], losses[-1]


def test_loss_falls_nearly_as_in_float32() -> None:
    first, exact = memorize(torch.float32, rounds=False)
    _, rounded = memorize(torch.bfloat16, rounds=True)
    _, naive = memorize(torch.bfloat16, rounds=False)
    fall = first - exact
    assert fall > 0.5
    assert abs(rounded - exact) < 0.05 * fall
    assert naive - exact > 0.1 * fall
    assert naive - exact > 3 * abs(rounded - exact)


@pytest.mark.parametrize(
    ("mode", "keys", "error"),
    [
        (
            "ddp",
            {"lora": {"enable": True}},
            ("not-supported", "lora.enable"),
        ),
        ("ddp", {"task": "classify"}, ("not-supported", "task")),
        ("ddp", {"train_args": {"optim": "adafactor"}}, ("not-supported", "train_args.optim")),
        ("ddp", {"compression": {"method": "topk"}}, ("not-supported", "compression.method")),
        ("deepspeed", {}, ("not-supported", "train_args.precision")),
        ("local_sgd", {}, ("not-supported", "train_args.precision")),
        ("diloco", {}, ("not-supported", "train_args.precision")),
        ("parameter_server", {}, ("not-supported", "train_args.precision")),
    ],
)
def test_unsupported_settings_are_refused(
    mode: str, keys: dict[str, Any], error: tuple[str, str]
) -> None:
    args = {"precision": "bf16-true", **keys.pop("train_args", {})}
    config = Config(model="m", dataset="d", parallel={"mode": mode}, train_args=args, **keys)
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_strategy(mode, config, ParallelDims(data=2), installed=False)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_several_ranks_are_supported(mode: str) -> None:
    config = Config(
        model="m", dataset="d", parallel={"mode": mode}, train_args={"precision": "bf16-true"}
    )
    dims = ParallelDims(shard=2) if mode in ("zero2", "zero3") else ParallelDims(data=2)
    check_strategy(mode, config, dims, installed=False)
