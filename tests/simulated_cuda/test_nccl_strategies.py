"""Test every strategy on simulated devices with the rules of NCCL: the losses are those with
Gloo."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import losses
from device_runs import WITH_NCCL, train_on
from hostnccl import SEED
from switches import FULL, LAYOUTS, QUICK_SWITCHES, TOLERANCES, Layout

from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import STRATEGIES

pytestmark = [pytest.mark.slow, pytest.mark.soak]

#: Strategies whose communication is not that of ranks with a device each, or is not Paceline's.
EXCLUDED = ("single", "dp", "deepspeed", "parameter_server")
SEEDS = ("1", "2")
Losses = Callable[..., list[float]]


def cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name and the arguments of each run."""
    names = {layout.name: layout for layout in LAYOUTS if layout.mode not in EXCLUDED}
    for layout in names.values():
        for switches in QUICK_SWITCHES:
            if layout.supports(switches):
                yield f"{layout.name}-{switches}", (*layout.args, *switches.args)
    for layout in four_ranks():
        yield layout.name, (*layout.args, *FULL.args)
    ddp = (*names["ddp"].args, *FULL.args)
    wide = (*_on_four_ranks("ddp", data=4).args, *FULL.args)
    for algorithm in ("ring", "tree", "halving", "naive"):
        setting = f"parallel.all_reduce_algorithm={algorithm}"
        yield f"ddp-{algorithm}", (*ddp, setting)
        yield f"ddp4-{algorithm}", (*wide, setting)
    for method in ("bf16", "fp16", "int8", "topk", "randomk", "powersgd", "signsgd", "[topk,bf16]"):
        settings = (f"compression.method={method}", "compression.ratio=0.1")
        yield f"ddp-{method}", (*ddp, *settings)
        yield f"ddp4-{method}", (*wide, *settings)
    pipeline = (*names["pipeline"].args, *FULL.args)
    long_pipeline = (*_on_four_ranks("pipeline", pipeline=4).args, *FULL.args)
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"):
        # The smallest model has too few layers for two stages per rank.
        setting = f"parallel.pipeline_schedule={schedule}"
        yield f"pipeline-{schedule}", (*pipeline, "model=builtin:qwen2-tiny", setting)
        yield f"pipeline4-{schedule}", (*long_pipeline, "model=builtin:qwen2-tiny", setting)
    diloco = (*names["diloco"].args, *FULL.args, "max_steps=6", "local_sgd.fragment_sync_delay=1")
    yield "diloco-overlap", diloco
    yield "diloco-int8", (*diloco, "local_sgd.num_fragments=2", "local_sgd.outer_dtype=int8")


def four_ranks() -> Iterator[Layout]:
    for mode in ("ddp", "zero1", "zero2", "zero3", "local_sgd", "diloco"):
        yield _on_four_ranks(mode, **{STRATEGIES[mode].main_dim: 4})
    for first, second in (
        ("data", "tensor"),
        ("data", "shard"),
        ("data", "pipeline"),
        ("shard", "pipeline"),
    ):
        yield _on_four_ranks("hybrid", **{first: 2, second: 2})


def _on_four_ranks(mode: str, **dims: int) -> Layout:
    name = "-".join([mode, *(f"{axis}{size}" for axis, size in dims.items())])
    return Layout(name, mode, ParallelDims(**dims), dims if mode == "hybrid" else {})


CASES = dict(cases())


@pytest.fixture(scope="module")
def gloo_losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Return a function that returns the losses of a case with Gloo."""
    known: dict[str, list[float]] = {}

    def losses_of(name: str) -> list[float]:
        if name not in known:
            folder = tmp_path_factory.mktemp("gloo") / "run"
            train_on("cuda", folder, *CASES[name])
            known[name] = losses(folder)
        return known[name]

    return losses_of


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_with_gloo(
    name: str, seed: str, gloo_losses: Losses, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train_on("cuda", folder, *CASES[name], variables=WITH_NCCL | {SEED: seed})
    tolerance = next(
        (value for key, value in TOLERANCES.items() if f"precision={key}" in CASES[name])
    )
    assert losses(folder) == pytest.approx(gloo_losses(name), rel=tolerance)
