"""Test training on fewer samples than ranks or than the global batch size."""

import json
from pathlib import Path

import pytest
from commands import events, losses, report, run
from raised import raises_error

from paceline.cli import main
from paceline.config.derive import derive
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.launch.passes.sizes import check_sizes

ROWS = [
    {"question": f"What is the capital of {name}?", "answer": f"{city}."}
    for name, city in (("Peru", "Lima"), ("Italy", "Rome"))
]


def save(folder: Path, num_rows: int) -> str:
    path = folder / f"{num_rows}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:num_rows]))
    return f"dataset={path}"


def sizes(
    samples: int, replicas: int, mode: str = "ddp", **train_args: int
) -> list[tuple[str, str]]:
    config = Config(
        model="m", dataset="d", train_args={"per_device_train_batch_size": 4, **train_args}
    )
    derived = derive(
        config,
        world_size=replicas,
        rows_per_epoch=lambda _: samples,
        num_eval=0,
        default_learning_rate=1e-4,
    )
    assert derived.steps_per_epoch == max(1, -(-samples // derived.global_batch_size))
    return check_sizes(derived, samples, mode)


def test_no_notice_for_enough_samples() -> None:
    assert sizes(8, 2) == []


def test_warns_if_batch_exceeds_dataset() -> None:
    ((level, text),) = sizes(7, 2, gradient_accumulation_steps=2)
    assert level == "warning"
    for part in (
        "16 samples",
        "4 per micro-batch × 2 accumulation × 2 replicas",
        "all 7 training samples",
        "zero weight",
    ):
        assert part in text
    assert "padding only" not in text


def test_warns_of_warm_up_longer_than_the_training() -> None:
    assert sizes(8, 2, max_steps=6, warmup_steps=6) == []
    ((level, text),) = sizes(8, 2, max_steps=6, warmup_steps=500)
    assert level == "warning"
    assert "warm-up of 500 steps is longer than the training of 6 steps" in text
    assert "only reaches about 1e-06 of 0.0001" in text


def test_warns_about_replicas_without_samples() -> None:
    ((_, text),) = sizes(1, 2)
    assert "the only training sample" in text
    assert "1 replica of 2 gets padding only" in text
    ((_, text),) = sizes(3, 8)
    assert "5 replicas of 8 get padding only; 3 replicas would" in text


def test_rejects_empty_dataset() -> None:
    with raises_error(ConfigError, code="no-training-samples"):
        sizes(0, 2)


def test_dry_run_with_one_row_and_validation_split(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = [
        "sft",
        "model=builtin:qwen2-micro",
        save(tmp_path, 1),
        "parallel.device=cpu",
        "parallel.num_gpus=2",
    ]
    assert (
        main([*args, "split_dataset_ratio=0.05", f"output_dir={tmp_path / 'run'}", "--dry-run"])
        == 0
    )
    text = capfd.readouterr().err
    assert "warning: no validation" in text
    assert "warning: the global batch of" in text


def train(folder: Path, mode: str, num_ranks: int, *args: str) -> Path:
    run(
        "model=builtin:qwen2-micro", save(folder, 2), "split_dataset_ratio=0.05",
        "learning_rate=1e-2", "max_steps=3", f"output_dir={folder / mode}", "parallel.device=cpu",
        f"parallel.mode={mode}", f"parallel.num_gpus={num_ranks}", *args,
    )  # fmt: skip
    return folder / mode


@pytest.mark.soak
def test_one_sample_on_two_ranks_matches_single_rank(tmp_path: Path) -> None:
    single, pair = train(tmp_path, "single", 1), train(tmp_path, "ddp", 2)
    assert losses(pair) == pytest.approx(losses(single), rel=1e-4)
    assert losses(pair)[-1] < losses(pair)[0]
    assert report(pair)["world_size"] == 2
    assert report(pair)["samples_seen"] == 3
    notices = [event["text"] for event in events(pair, "notice")]
    assert any("1 of 2 samples held out" in text for text in notices)
    assert any("1 replica of 2 gets padding only" in text for text in notices)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3", "tensor", "pipeline", "deepspeed"])
def test_one_sample_matches_single_rank_in_every_mode(tmp_path: Path, mode: str) -> None:
    single, pair = train(tmp_path, "single", 1), train(tmp_path, mode, 2)
    assert losses(pair) == pytest.approx(losses(single), rel=1e-4)
