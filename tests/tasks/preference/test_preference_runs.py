"""Runs of preference training on real ranks: the strategies agree, a resumed run has the same bits,
and the log-probabilities of the reference are computed once."""

import json
import random
from pathlib import Path

import pytest
from commands import digest, events, losses, run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

VOCABULARY = ("alpha", "beta", "gamma", "delta", "red", "green", "blue", "tree")


def write_rows(path: Path, task: str) -> Path:
    numbers = random.Random(0)

    def phrase() -> str:
        return " ".join(numbers.choices(VOCABULARY, k=numbers.randint(2, 9)))

    rows = []
    for number in range(48):
        row: dict[str, object] = {"prompt": phrase()}
        if task == "kto":
            row |= {"completion": phrase(), "label": number % 3 > 0}
        else:
            row |= {"chosen": phrase(), "rejected": phrase()}
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings(task: str, folder: Path) -> list[str]:
    return [
        "model=builtin:qwen2-micro",
        f"task={task}",
        f"dataset={write_rows(folder / 'rows.jsonl', task)}",
        "parallel.device=cpu",
        "per_device_train_batch_size=2",
        "train_args.gradient_accumulation_steps=2",
        "train_args.precision=32",
        "logging_steps=1",
    ]


@pytest.mark.soak
@pytest.mark.parametrize("task", ["dpo", "orpo", "kto", "simpo", "reward"])
def test_strategies_agree(task: str, tmp_path: Path) -> None:
    modes = "ddp,zero1,zero2,zero3,deepspeed,dp"
    args = [
        *settings(task, tmp_path),
        "parallel.deepspeed_stage=3",
        f"output_dir={tmp_path / 'verify'}",
        "--world-size",
        "2",
    ]
    result = json.loads(run(*args, "--modes", modes, "--json", verb="verify").stdout)
    assert result["ok"], result
    assert {mode["mode"] for mode in result["modes"]} == set(modes.split(","))
    assert all(mode["loss_rel_diff"] < 1e-5 for mode in result["modes"])


@pytest.mark.soak
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_resumed_run_has_the_same_bits(task: str, tmp_path: Path) -> None:
    args = [
        *settings(task, tmp_path),
        "parallel.num_gpus=2",
        "parallel.mode=zero3",
        "save_steps=3",
        "max_steps=6",
        "split_dataset_ratio=8",
        "eval_steps=2",
    ]
    run(*args, f"output_dir={tmp_path / 'a'}", verb="train")
    middle = tmp_path / "a" / "checkpoints" / "step-00000003"
    run(*args, f"output_dir={tmp_path / 'b'}", f"resume={middle}", verb="train")
    last = "checkpoints/step-00000006"
    assert digest(tmp_path / "a" / last) == digest(tmp_path / "b" / last)
    notices = [event["text"] for event in events(tmp_path / "b", "notice")]
    stored = [text for text in notices if text.startswith("reference log-probabilities")]
    assert len(stored) == 2, notices
    assert all(text.endswith("read from the cache") for text in stored)
    for evaluation in events(tmp_path / "a", "eval"):
        assert {"rewards/chosen", "rewards/margins", "logps/rejected"} <= set(evaluation["metrics"])


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["local_sgd", "ddp"])
def test_adapters_start_at_the_reference(mode: str, tmp_path: Path) -> None:
    args = [*settings("dpo", tmp_path), "parallel.num_gpus=2", f"parallel.mode={mode}"]
    args.append("local_sgd.sync_every=2")
    folder = tmp_path / "run"
    run(*args, f"output_dir={folder}", "lora.enable=true", "max_steps=4", verb="train")
    first = events(folder, "step")[0]
    assert first["metrics"]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert losses(folder)[0] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("has_adapter", [False, True])
def test_reward_model_resumes_and_is_saved(has_adapter: bool, tmp_path: Path) -> None:
    args = [
        *settings("reward", tmp_path),
        "parallel.num_gpus=2",
        "parallel.mode=zero3",
        f"lora.enable={str(has_adapter).lower()}",
        "save_steps=3",
        "max_steps=6",
        "split_dataset_ratio=8",
        "eval_steps=2",
    ]
    run(*args, f"output_dir={tmp_path / 'a'}", verb="train")
    middle = tmp_path / "a" / "checkpoints" / "step-00000003"
    run(*args, f"output_dir={tmp_path / 'b'}", f"resume={middle}", verb="train")
    last = "checkpoints/step-00000006"
    assert digest(tmp_path / "a" / last) == digest(tmp_path / "b" / last)
    for evaluation in events(tmp_path / "a", "eval"):
        assert {"accuracy", "margin", "max_reward"} <= set(evaluation["metrics"])
    folder = tmp_path / "a" / "model"
    if has_adapter:
        folder = tmp_path / "merged"
        run(str(tmp_path / "a"), "--merge", "--output", str(folder), verb="export")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rewards = model(**tokenizer(["red tree", "blue"], return_tensors="pt", padding=True)).logits
    assert rewards.shape == (2, 1)
