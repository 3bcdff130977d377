"""`parallel.balance` in complete runs on two Gloo ranks: unchanged losses, each sample used once,
and shares stored in checkpoints."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.messages.event_text import event_text

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


def read_sample_numbers(folder: Path) -> list[list[list[int]]]:
    """Return the sample numbers of each micro-batch, by rank."""
    texts = [(folder / "notes" / f"{rank}.txt").read_text().splitlines() for rank in range(2)]
    return [[[int(number) for number in line.split()] for line in text] for text in texts]


def read_shares(path: Path) -> dict[str, Any]:
    return json.loads((path / "meta.json").read_text()).get("balance", {})


@pytest.fixture(scope="module")
def equal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equal")
    train(folder, 2 * STEPS_PER_EPOCH)
    return folder


@pytest.fixture(scope="module")
def weighted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weighted")
    train(folder, 2 * STEPS_PER_EPOCH, "parallel.balance=[3,1]")
    return folder


@pytest.mark.soak
def test_weights_do_not_change_losses_and_use_each_sample_once(
    equal_run: Path, weighted_run: Path
) -> None:
    assert losses(weighted_run / "run") == pytest.approx(losses(equal_run / "run"), rel=1e-6)
    for folder, counts in ((equal_run, (4, 4)), (weighted_run, (6, 2))):
        ranks = read_sample_numbers(folder)
        for epoch in range(2):
            sample_numbers = []
            for micro_batches, count in zip(ranks, counts, strict=True):
                assert len(micro_batches) == 2 * STEPS_PER_EPOCH * count
                epoch_micro_batches = micro_batches[
                    epoch * STEPS_PER_EPOCH * count : (epoch + 1) * STEPS_PER_EPOCH * count
                ]
                sample_numbers += [number for numbers in epoch_micro_batches for number in numbers]
            assert sorted(sample_numbers) == list(range(SAMPLES))
    assert (
        report(weighted_run / "run")["samples_seen"]
        == report(equal_run / "run")["samples_seen"]
        == 2 * SAMPLES
    )
    assert report(weighted_run / "run")["balance"] == {"shares": [6, 2]}
    assert "balance" not in report(equal_run / "run")
    assert events(equal_run / "run", "balance") == []
    (event,) = events(weighted_run / "run", "balance")
    assert (event["step"], event["shares"], event["reason"]) == (0, [6, 2], "weights")


@pytest.mark.soak
def test_resumed_run_keeps_shares_and_is_bit_identical(weighted_run: Path, tmp_path: Path) -> None:
    """`speed` keeps the shares of the checkpoint instead of measuring again, so the result is
    bit-identical to an uninterrupted run."""
    train(tmp_path, STEPS_PER_EPOCH, "parallel.balance=[3,1]")
    first = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert read_shares(first)["shares"] == [6, 2]
    stderr = train(tmp_path, 2 * STEPS_PER_EPOCH, "parallel.balance=speed")
    assert "balance: micro-batches per step as in the checkpoint: 6+2" in stderr
    last = events(tmp_path / "run", "balance")[-1]
    assert (last["step"], last["shares"], last["reason"]) == (6, [6, 2], "checkpoint")
    assert digest(tmp_path / "run") == digest(weighted_run / "run")


@pytest.mark.soak
def test_slow_rank_gets_fewer_micro_batches_after_measurement(
    equal_run: Path, tmp_path: Path
) -> None:
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
    assert losses(tmp_path / "run") == pytest.approx(losses(equal_run / "run"), rel=1e-6)
    sample_numbers = [
        number for rank in read_sample_numbers(tmp_path) for numbers in rank for number in numbers
    ]
    assert sorted(sample_numbers) == sorted([*range(SAMPLES)] * 2)
    # The first checkpoint precedes the measurement.
    assert "balance" not in json.loads(
        (tmp_path / "run/checkpoints/step-00000006/meta.json").read_text()
    )
    assert (
        read_shares(tmp_path / "run" / "checkpoints" / "step-00000012")["shares"] == event["shares"]
    )

    # With another number of ranks, the stored shares are reset to equal ones, and an event says so.
    train(tmp_path, 2 * STEPS_PER_EPOCH + 2, "parallel.balance=speed", ranks=3)
    event = events(tmp_path / "run", "balance")[-1]
    assert (event["step"], event["reason"], len(set(event["shares"])), len(event["shares"])) == (
        12,
        "reset",
        1,
        3,
    )
