"""Test that a checkpoint written with any strategy and number of ranks resumes with any other, with
the losses of an uninterrupted run."""

import functools
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import events, report, run, train

from paceline.checkpoint import store

pytestmark = pytest.mark.slow

MICRO_BATCH, GLOBAL_BATCH = 4, 16  # numbers of samples; the micro-batch is that of MICRO
# A constant learning rate, because other schedules depend on `max_steps`, which the attempts
# change.
ARGS = (
    "train_args.learning_rate=1e-3",
    "train_args.warmup_steps=2",
    "train_args.lr_scheduler_type=constant_with_warmup",
)

#: name → (ranks, replicas, arguments)
MODES = {
    "single": (1, 1, ("parallel.mode=single",)),
    "dp": (2, 2, ("parallel.mode=dp",)),
    "ddp": (4, 4, ("parallel.mode=ddp",)),
    "zero1": (2, 2, ("parallel.mode=zero1",)),
    "zero2": (2, 2, ("parallel.mode=zero2",)),
    "zero3": (2, 2, ("parallel.mode=zero3",)),
    "deepspeed": (2, 2, ("parallel.mode=deepspeed", "parallel.deepspeed_stage=2")),
    "deepspeed-3": (2, 2, ("parallel.mode=deepspeed", "parallel.deepspeed_stage=3")),
    "tensor": (2, 1, ("parallel.mode=tensor",)),
    "pipeline": (2, 1, ("parallel.mode=pipeline",)),
    "shard2-tensor2": (4, 2, ("parallel.shard=2", "parallel.tensor=2")),
    "tensor2-pipeline2": (4, 1, ("parallel.tensor=2", "parallel.pipeline=2")),
}


def make_args(mode: str, save_steps: int) -> list[str]:
    ranks, replicas, args = MODES[mode]
    accumulation = GLOBAL_BATCH // MICRO_BATCH // replicas
    batch = f"gradient_accumulation_steps={accumulation}"
    return [*args, f"parallel.num_gpus={ranks}", batch, f"train_args.save_steps={save_steps}"]


def train_until(folder: Path, mode: str, step: int) -> None:
    """Start or resume the run with ``mode`` and train until ``step``."""
    train(
        folder,
        *ARGS,
        *make_args(mode, step),
        "--allow-config-change",
        f"train_args.max_steps={step}",
    )


def train_chain(folder: Path, modes: list[str], steps_per_mode: int) -> list[float]:
    for number, mode in enumerate(modes, start=1):
        train_until(folder, mode, number * steps_per_mode)
    return losses_by_step(folder)


def train_uninterrupted(folder: Path, steps: int) -> list[float]:
    train(folder, *ARGS, *make_args("single", 0), f"train_args.max_steps={steps}")
    return losses_by_step(folder)


def losses_by_step(folder: Path) -> list[float]:
    by_step = {event["step"]: event["loss"] for event in events(folder, "step")}
    return [by_step[step] for step in sorted(by_step)]


@pytest.mark.soak
def test_resume_through_chain_of_strategies(tmp_path: Path) -> None:
    modes = ["ddp", "zero3", "tensor", "pipeline", "single", "deepspeed", "zero1"]
    expected = train_uninterrupted(tmp_path / "uninterrupted", 2 * len(modes))
    result = train_chain(tmp_path / "chain", modes, 2)
    assert result == pytest.approx(expected, rel=1e-5)
    last = report(tmp_path / "chain")
    assert (last["strategy"], last["world_size"], last["resumed_from_step"]) == (
        modes[-1],
        2,
        2 * len(modes) - 2,
    )
    tensors = {
        name: store.inspect(store.find(tmp_path / name))["tensors"]
        for name in ("uninterrupted", "chain")
    }
    assert tensors["chain"].keys() == tensors["uninterrupted"].keys()
    assert {name: tensor["shape"] for name, tensor in tensors["chain"].items()} == {
        name: tensor["shape"] for name, tensor in tensors["uninterrupted"].items()
    }
    inspected = run(str(tmp_path / "chain"), verb="inspect")
    assert f"written by {modes[-1]} on 2 ranks" in inspected.stdout
    assert json.loads((tmp_path / "chain" / "report.json").read_text())["status"] == "done"


@pytest.fixture(scope="module")
def uninterrupted_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train_uninterrupted(tmp_path_factory.mktemp("uninterrupted") / "run", 6)


@pytest.fixture(scope="module")
def run_at_step_3(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that maps a mode to the folder of a cached run that ended at step 3."""

    @functools.cache
    def make(mode: str) -> Path:
        folder = tmp_path_factory.mktemp("run_at_step_3") / mode
        train_until(folder, mode, 3)
        return folder

    return make


@pytest.mark.soak
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MODES, 2)))
def test_resume_with_every_pair_of_strategies(
    first: str,
    second: str,
    tmp_path: Path,
    uninterrupted_losses: list[float],
    run_at_step_3: Callable[[str], Path],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_at_step_3(first), folder, symlinks=True)
    train_until(folder, second, 6)
    assert report(folder)["resumed_from_step"] == 3
    assert losses_by_step(folder) == pytest.approx(uninterrupted_losses, rel=1e-5)
