"""A checkpoint written under any strategy and number of ranks goes on under any other, as if
nothing had been changed."""

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

MICRO_BATCH, SAMPLES = 4, 16  # samples of a micro-batch (as in MICRO), and of a global batch
# A constant rate: each attempt of the run ends at its own last step, on which another schedule
# would depend.
ARGS = (
    "train_args.learning_rate=1e-3",
    "train_args.warmup_steps=2",
    "train_args.lr_scheduler_type=constant_with_warmup",
)

#: name → (ranks, replicas, words)
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


def words_of(mode: str, step: int) -> list[str]:
    ranks, replicas, args = MODES[mode]
    accumulation = SAMPLES // MICRO_BATCH // replicas
    batch = f"gradient_accumulation_steps={accumulation}"
    return [*args, f"parallel.num_gpus={ranks}", batch, f"train_args.save_steps={step}"]


def stop_at(folder: Path, mode: str, step: int) -> None:
    """Run under ``mode`` until a checkpoint of ``step`` is there, and no further: the run has its
    end there."""
    train(
        folder,
        *ARGS,
        *words_of(mode, step),
        "--allow-config-change",
        f"train_args.max_steps={step}",
    )


def chain(folder: Path, modes: list[str], each: int) -> list[float]:
    for number, mode in enumerate(modes, start=1):
        stop_at(folder, mode, number * each)
    return losses_by_step(folder)


def unbroken(folder: Path, steps: int) -> list[float]:
    train(folder, *ARGS, *words_of("single", 0), f"train_args.max_steps={steps}")
    return losses_by_step(folder)


def losses_by_step(folder: Path) -> list[float]:
    by_step = {event["step"]: event["loss"] for event in events(folder, "step")}
    return [by_step[step] for step in sorted(by_step)]


@pytest.mark.parametrize(
    "modes",
    [
        ["ddp", "zero3"],
        pytest.param(
            ["ddp", "zero3", "tensor", "pipeline", "single", "deepspeed", "zero1"],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["two", "seven"],
)
def test_a_chain_of_modes_is_one_run(tmp_path: Path, modes: list[str]) -> None:
    expected = unbroken(tmp_path / "unbroken", 2 * len(modes))
    result = chain(tmp_path / "chain", modes, 2)
    assert result == pytest.approx(expected, rel=1e-5)
    last = report(tmp_path / "chain")
    assert (last["strategy"], last["world_size"], last["resumed_from_step"]) == (
        modes[-1],
        2,
        2 * len(modes) - 2,
    )
    paths = {mode: tmp_path / name for mode, name in (("unbroken", "unbroken"), ("chain", "chain"))}
    tensors = {name: store.inspect(store.find(path))["tensors"] for name, path in paths.items()}
    assert tensors["chain"].keys() == tensors["unbroken"].keys()
    assert {name: tensor["shape"] for name, tensor in tensors["chain"].items()} == {
        name: tensor["shape"] for name, tensor in tensors["unbroken"].items()
    }
    shown = run(str(tmp_path / "chain"), verb="inspect")
    assert f"written by {modes[-1]} on 2 ranks" in shown.stdout
    assert json.loads((tmp_path / "chain" / "report.json").read_text())["status"] == "done"


@pytest.fixture(scope="module")
def unbroken_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return unbroken(tmp_path_factory.mktemp("unbroken") / "run", 6)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """mode → a run that it has brought to step 3; made when first asked for."""

    @functools.cache
    def make(mode: str) -> Path:
        folder = tmp_path_factory.mktemp("begun") / mode
        stop_at(folder, mode, 3)
        return folder

    return make


@pytest.mark.soak
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MODES, 2)))
def test_every_pair(
    first: str,
    second: str,
    tmp_path: Path,
    unbroken_losses: list[float],
    begun: Callable[[str], Path],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(begun(first), folder, symlinks=True)
    stop_at(folder, second, 6)
    assert report(folder)["resumed_from_step"] == 3
    assert losses_by_step(folder) == pytest.approx(unbroken_losses, rel=1e-5)
