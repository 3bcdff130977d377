"""`parallel.balance` in whole runs on two Gloo ranks: the losses of equal shares, each sample once,
shares in checkpoints."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.event_text import event_text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
from commands import digest, events, losses, report, run

pytestmark = pytest.mark.slow

TASK = Path(__file__).resolve().parents[1] / "balance_task.py"
SAMPLES, STEPS_PER_EPOCH = 96, 6
ARGS = (
    f"task={TASK}:RecordingTask",
    "model=noted",
    "dataset=made-by-the-task",
    "parallel.device=cpu",
    "parallel.mode=ddp",
    "per_device_train_batch_size=2",
    "gradient_accumulation_steps=4",
    "train_args.lr_scheduler_type=constant",
    "train_args.logging_steps=1",
    "train_args.save_steps=6",
)


def train(
    folder: Path, steps: int, *args: str, slow: dict[str, float] | None = None, ranks: int = 2
) -> str:
    task_args = json.dumps({"notes": str(folder / "notes"), "slow": slow or {}})
    folder.mkdir(exist_ok=True)
    run_args = (
        f"parallel.num_gpus={ranks}",
        f"train_args.max_steps={steps}",
        f"task_args={task_args}",
        "--allow-config-change",
    )
    return run(*ARGS, f"output_dir={folder / 'run'}", *run_args, *args).stderr


def noted(folder: Path) -> list[list[list[int]]]:
    """Sample numbers of each micro-batch, by rank."""
    texts = [(folder / "notes" / f"{rank}.txt").read_text().splitlines() for rank in range(2)]
    return [[[int(number) for number in line.split()] for line in text] for text in texts]


def shares_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "meta.json").read_text()).get("balance", {})


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equal")
    train(folder, 2 * STEPS_PER_EPOCH)
    return folder


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weighted")
    train(folder, 2 * STEPS_PER_EPOCH, "parallel.balance=[3,1]")
    return folder


@pytest.mark.soak
def test_weights_give_the_losses_of_equal_shares_and_each_sample_once(
    equal: Path, weighted: Path
) -> None:
    assert losses(weighted / "run") == pytest.approx(losses(equal / "run"), rel=1e-6)
    for folder, counts in ((equal, (4, 4)), (weighted, (6, 2))):
        ranks = noted(folder)
        for epoch in range(2):
            seen = []
            for micro_batches, count in zip(ranks, counts, strict=True):
                assert len(micro_batches) == 2 * STEPS_PER_EPOCH * count
                of_epoch = micro_batches[
                    epoch * STEPS_PER_EPOCH * count : (epoch + 1) * STEPS_PER_EPOCH * count
                ]
                seen += [number for numbers in of_epoch for number in numbers]
            assert sorted(seen) == list(range(SAMPLES))
    assert (
        report(weighted / "run")["samples_seen"]
        == report(equal / "run")["samples_seen"]
        == 2 * SAMPLES
    )
    assert report(weighted / "run")["balance"] == {"shares": [6, 2]}
    assert "balance" not in report(equal / "run")
    assert events(equal / "run", "balance") == []
    (event,) = events(weighted / "run", "balance")
    assert (event["step"], event["shares"], event["reason"]) == (0, [6, 2], "weights")


@pytest.mark.soak
def test_a_resumed_run_keeps_the_shares_bit_for_bit(weighted: Path, tmp_path: Path) -> None:
    """`speed` keeps the checkpoint's shares instead of measuring again, so the bits are those of an
    undisturbed run."""
    train(tmp_path, STEPS_PER_EPOCH, "parallel.balance=[3,1]")
    first = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert shares_of(first)["shares"] == [6, 2]
    stderr = train(tmp_path, 2 * STEPS_PER_EPOCH, "parallel.balance=speed")
    assert "balance: micro-batches per step as in the checkpoint: 6+2" in stderr
    last = events(tmp_path / "run", "balance")[-1]
    assert (last["step"], last["shares"], last["reason"]) == (6, [6, 2], "checkpoint")
    assert digest(tmp_path / "run") == digest(weighted / "run")


@pytest.mark.soak
def test_speeds_are_measured_and_the_slow_rank_gets_less(equal: Path, tmp_path: Path) -> None:
    stderr = train(
        tmp_path, 2 * STEPS_PER_EPOCH, "parallel.balance=speed", slow={"0": 0.02, "1": 0.12}
    )
    event = events(tmp_path / "run", "balance")[0]
    assert (event["step"], event["reason"]) == (7, "measured")
    assert event["shares"][0] > event["shares"][1] >= 1
    assert sum(event["shares"]) == 8
    assert event["seconds"][1] > event["seconds"][0] > 0
    assert event["gain"] > 1.1
    assert event["text"] in stderr
    assert event_text(event) == ("info", event["text"])
    assert losses(tmp_path / "run") == pytest.approx(losses(equal / "run"), rel=1e-6)
    seen = [number for rank in noted(tmp_path) for numbers in rank for number in numbers]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 2)
    # not yet measured
    assert "balance" not in json.loads(
        (tmp_path / "run/checkpoints/step-00000006/meta.json").read_text()
    )
    assert (
        shares_of(tmp_path / "run" / "checkpoints" / "step-00000012")["shares"] == event["shares"]
    )

    # On another number of ranks the stored shares do not fit: equal ones, with an event.
    train(tmp_path, 2 * STEPS_PER_EPOCH + 2, "parallel.balance=speed", ranks=3)
    event = events(tmp_path / "run", "balance")[-1]
    assert (event["step"], event["reason"], len(set(event["shares"])), len(event["shares"])) == (
        12,
        "reset",
        1,
        3,
    )
