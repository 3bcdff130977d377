"""Test that training is free of races between streams: the checker of streams finds nothing in runs
with offloading, background checkpoints, ZeRO-3, delayed synchronization or compression."""

from pathlib import Path

import pytest
from device_runs import WITH_NCCL, train_on
from hostnccl import SEED
from stream_order.tracing import VARIABLE, read_findings
from test_nccl_strategies import CASES as STRATEGIES

pytestmark = pytest.mark.slow

_SAVES = ("save_steps=1", "async_save=true")


def _on_two(mode: str, *args: str) -> tuple[str, ...]:
    return f"parallel.mode={mode}", "parallel.num_gpus=2", *args


RUNS: dict[str, tuple[str, ...]] = {
    "zero3-offload": _on_two("zero3", "parallel.cpu_offload=all", *_SAVES),
    "zero3-activations": _on_two("zero3", "parallel.cpu_offload=activations"),
    "zero3-recompute": _on_two("zero3", "gradient_checkpointing=true", "precision=bf16-mixed"),
    "ddp-offload": _on_two("ddp", "parallel.cpu_offload=optimizer,activations", *_SAVES),
    "ddp-fp16": _on_two("ddp", "precision=fp16-mixed", "max_grad_norm=1.0", "logging_steps=1"),
    "zero1-offload": _on_two("zero1", "parallel.cpu_offload=optimizer,activations", *_SAVES),
    "local_sgd": _on_two("local_sgd", "local_sgd.sync_every=2", "max_steps=6", *_SAVES),
    "diloco-delay": _on_two(
        "diloco", "local_sgd.sync_every=2", "max_steps=6", "local_sgd.fragment_sync_delay=1"
    ),
    "ddp-topk": _on_two("ddp", "compression.method=topk", "compression.ratio=0.1", *_SAVES),
    "ddp-powersgd-fp16": _on_two("ddp", "compression.method=powersgd", "precision=fp16-mixed"),
    "ddp-ring": _on_two("ddp", "parallel.all_reduce_algorithm=ring"),
}
QUICK = ("ddp-offload", "diloco-delay")


def check_run(folder: Path, *args: str, seed: str = "0") -> None:
    (folder / "findings").mkdir()
    variables = {**WITH_NCCL, VARIABLE: str(folder / "findings"), SEED: seed}
    train_on("cuda", folder / "run", *args, variables=variables)
    assert list((folder / "findings").iterdir()), "no process was checked"
    assert [str(each) for each in read_findings(folder / "findings")] == []


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in RUNS],
)
def test_nothing_is_found_in_a_run(name: str, tmp_path: Path) -> None:
    check_run(tmp_path, *RUNS[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_found_with_a_strategy(name: str, tmp_path: Path) -> None:
    check_run(tmp_path, *STRATEGIES[name])
