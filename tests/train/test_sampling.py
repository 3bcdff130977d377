"""Text samples at evaluations: their content, no effect on training, and runs without samples."""

from pathlib import Path
from typing import Any

import pytest
from commands import MICRO, digest, events, report, run, train

pytestmark = pytest.mark.slow

STEPS = (
    "train_args.max_steps=6",
    "train_args.eval_steps=3",
    "split_dataset_ratio=0.1",
    "evaluation.max_new_tokens=12",
)
# Dropout reveals whether generation changes the random state. Adapters use peft's forward pass.
LORA = ("lora.enable=true", "lora.dropout=0.2", "train_args.learning_rate=0.02")


def read_samples(folder: Path) -> list[dict[str, Any]]:
    return events(folder, "sample")


@pytest.mark.soak
@pytest.mark.parametrize(
    "args",
    [
        ("parallel.mode=ddp", "parallel.num_gpus=2", *LORA),
        # all ranks take part in the forward pass
        ("parallel.mode=zero3", "parallel.num_gpus=2", *LORA),
        ("parallel.mode=diloco", "parallel.num_gpus=2", "local_sgd.sync_every=4"),
    ],
    ids=["ddp", "zero3", "diloco"],
)
def test_generating_samples_does_not_change_training(tmp_path: Path, args: tuple[str, ...]) -> None:
    for count in (0, 3):
        train(tmp_path / str(count), *STEPS, *args, f"evaluation.num_samples={count}")
    assert digest(tmp_path / "3") == digest(tmp_path / "0")
    with_samples, without = (events(tmp_path / count, "eval") for count in ("3", "0"))
    assert [event["loss"] for event in with_samples] == [event["loss"] for event in without]
    assert read_samples(tmp_path / "0") == []
    sample_events = read_samples(tmp_path / "3")
    assert (
        [event["step"] for event in sample_events]
        == [event["step"] for event in with_samples]
        == [3, 6]
    )
    prompts = [[sample["prompt"] for sample in event["samples"]] for event in sample_events]
    assert prompts[0] == prompts[1]  # the same prompts at every evaluation
    assert len(set(prompts[0])) == 3
    assert all(
        sample["text"] and sample["reference"]
        for event in sample_events
        for sample in event["samples"]
    )


@pytest.mark.soak
def test_samples_match_transformers_generate(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run"
    train(
        folder,
        *STEPS,
        "parallel.mode=single",
        "parallel.num_gpus=1",
        "train_args.learning_rate=0.03",
        "evaluation.num_samples=4",
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    generated = read_samples(folder)[-1]["samples"]
    assert len(generated) == 4
    for sample in generated:
        # The prompt ends where the answer begins.
        assert sample["prompt"].endswith("<|im_start|>assistant\n")
        assert "<|" not in sample["reference"] + sample["text"]
        inputs = tokenizer(sample["prompt"], return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            output = model.generate(
                **inputs, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        assert sample["text"] == tokenizer.decode(
            output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )


@pytest.mark.soak
def test_plain_text_is_continued(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(
            f'{{"text": "In the beginning was line {number}, followed by many others."}}\n'
            for number in range(60)
        )
    )
    args = ("task=pretrain", f"dataset={text}", "evaluation.num_samples=2", "parallel.num_gpus=1")
    run(
        *(arg for arg in MICRO if not arg.startswith("dataset=")),
        f"output_dir={tmp_path / 'run'}",
        *STEPS,
        *args,
    )
    for sample in read_samples(tmp_path / "run")[-1]["samples"]:
        assert sample["prompt"].startswith("In the beginning was line")
        assert "many others." in f"{sample['prompt']}{sample['reference']}"
        assert sample["text"]


@pytest.mark.soak
def test_pipeline_reports_once_that_samples_are_unavailable(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(
        folder,
        *STEPS,
        "parallel.mode=pipeline",
        "parallel.num_gpus=2",
        "train_args.gradient_accumulation_steps=2",
    )
    assert read_samples(folder) == []
    texts = [event["text"] for event in events(folder, "notice")]
    (reason,) = (text for text in texts if "no samples are generated" in text)
    assert "no rank holds the full model" in reason
    assert len(events(folder, "eval")) == 2


@pytest.mark.soak
def test_run_start_and_memory_events(tmp_path: Path) -> None:
    """The `run_start` and `memory` events of a sharded run agree with its report."""
    folder = tmp_path / "run"
    train(
        folder,
        "train_args.max_steps=3",
        "parallel.shard=2",
        "parallel.tensor=2",
        "parallel.num_gpus=4",
    )
    (start,), (memory,) = events(folder, "run_start"), events(folder, "memory")
    assert start["mesh"]["axes"] == {"data": 1, "shard": 2, "tensor": 2, "pipeline": 1}
    ranks = start["mesh"]["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert [(rank["coordinates"]["shard"], rank["coordinates"]["tensor"]) for rank in ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert {(rank["host"], rank["device"]) for rank in ranks} == {(start["host"], "cpu")}
    predicted, final_report = start["predicted"], report(folder)
    state = ("parameters", "gradients", "optimizer")
    assert (
        sum(predicted["memory_bytes"][kind] for kind in state)
        == final_report["state_memory_bytes"]["predicted"]
    )
    assert predicted["memory_bytes"]["activations"] > 0
    assert (
        predicted["traffic_bytes_per_step"] == final_report["traffic_bytes_per_step"]["predicted"]
    )
    assert predicted["traffic_bytes_per_step"] == sum(predicted["traffic_bytes"].values())
    assert memory["step"] == 2
    assert len(memory["ranks"]) == 4
    assert all(rank["activations"] is None for rank in memory["ranks"])  # not measured on a CPU
    assert (
        max(rank["total"] for rank in memory["ranks"])
        == final_report["state_memory_bytes"]["measured"]
    )
    for kind in state:
        max_bytes = max(rank[kind] for rank in memory["ranks"])
        assert max_bytes == pytest.approx(predicted["memory_bytes"][kind], rel=0.01)
    for step in events(folder, "step"):
        assert len(step["ranks"]) == 4
        assert sum(step["traffic"].values()) == pytest.approx(
            final_report["traffic_bytes_per_step"]["measured"], rel=0.3
        )
