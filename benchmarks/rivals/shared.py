"""Code that the rivals share: samples, the evaluation after training, and the result file. It does
not use Paceline."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

Sample = dict[str, list[int]]


def read_spec() -> dict[str, Any]:
    """Read the JSON file on the command line, which `benchmarks/common.py` writes."""
    return json.loads(Path(sys.argv[1]).read_text())


def start(spec: dict[str, Any]) -> torch.device:
    """Initialize the process group, and return the device of this rank."""
    dist.init_process_group("gloo" if spec["device"] == "cpu" else "nccl")
    torch.manual_seed(spec["seed"])
    if spec["device"] == "cpu":
        return torch.device("cpu")
    device = torch.device(spec["device"], int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def model_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of frozen weights: that of autocast on GPUs. peft keeps adapters in
    float32."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu")


def read_chats(path: str) -> list[list[dict[str, str]]]:
    with open(path, encoding="utf-8") as handle:
        return [json.loads(line)["messages"] for line in handle]


def encode(tokenizer: Any, chats: list[list[dict[str, str]]], max_length: int) -> list[Sample]:
    """Return the token ids and labels of each chat; the label is -100 outside the answers."""
    encoded = tokenizer.apply_chat_template(
        chats,
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=True,
        max_length=max_length,
    )
    return [
        {
            "input_ids": ids,
            "labels": [
                token if has_loss else -100 for token, has_loss in zip(ids, mask, strict=True)
            ],
        }
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    ]


def pad(samples: list[Sample], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return input_ids, attention_mask and labels, padded on the right, int64 [rows, longest]."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for sample in samples:
        length = len(sample["input_ids"])
        padding = longest - length
        rows["input_ids"].append(sample["input_ids"] + [pad_token_id] * padding)
        rows["attention_mask"].append([1] * length + [0] * padding)
        rows["labels"].append(sample["labels"] + [-100] * padding)
    return {name: torch.tensor(values, device=device) for name, values in rows.items()}


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the next tokens, summed over the labels."""
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
    )


def num_labels(samples: list[Sample]) -> int:
    """Return the number of labels; the first token of a sample is not predicted."""
    return sum(label != -100 for sample in samples for label in sample["labels"][1:])


class Record:
    """The end time, tokens and loss of each step, which :func:`finish` writes after training."""

    def __init__(self) -> None:
        self.step_ends: list[float] = []  # seconds since the epoch
        self.tokens: list[int] = []  # of this rank, without padding
        # Loss of this rank; the mean over the ranks is the mean over all labels.
        self.losses: list[float] = []

    def step_done(self, samples: list[Sample]) -> None:
        self.step_ends.append(time.time())
        self.tokens.append(sum(len(sample["input_ids"]) for sample in samples))


def finish(spec: dict[str, Any], record: Record, model: Any, tokenizer: Any) -> None:
    """Evaluate on the held-out chats, and write the result on rank 0. The peak memory is read
    before the evaluation."""
    local_result = {
        "tokens": record.tokens,
        "losses": record.losses,
        "peak_memory_bytes": peak_memory_bytes(model.device),
    }
    rank_results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_results, local_result)
    loss, count = evaluate(spec, model, tokenizer)
    if dist.get_rank() == 0:
        result = {
            "step_ends": record.step_ends,
            "tokens": [
                sum(values)
                for values in zip(*(result["tokens"] for result in rank_results), strict=True)
            ],
            "losses": [
                sum(values) / len(values)
                for values in zip(*(result["losses"] for result in rank_results), strict=True)
            ],
            "peak_memory_bytes": [result["peak_memory_bytes"] for result in rank_results],
            "eval_loss": loss,
            "eval_count": count,
        }
        Path(spec["result_file"]).write_text(json.dumps(result))


def evaluate(spec: dict[str, Any], model: Any, tokenizer: Any) -> tuple[float, int]:
    """Return the mean loss over all labels of the held-out set and the number of labels. The chats
    are assigned to the ranks in turn."""
    model.eval()
    samples = encode(
        tokenizer,
        read_chats(spec["eval_file"])[dist.get_rank() :: dist.get_world_size()],
        spec["max_length"],
    )
    size = spec["per_device_batch_size"]
    total = torch.zeros(2, dtype=torch.float64, device=model.device)
    with torch.no_grad(), autocast(model.device):
        for start in range(0, len(samples), size):
            chunk = samples[start : start + size]
            batch = pad(chunk, tokenizer.pad_token_id, model.device)
            labels = batch.pop("labels")
            total[0] += summed_loss(model(**batch, use_cache=False).logits, labels)
            total[1] += num_labels(chunk)
    dist.all_reduce(total)
    return float(total[0] / total[1]), int(total[1])


def close() -> None:
    """Destroy the process group."""
    # Gloo's thread needs the GIL to release the tensors of the last collective. Destroying the
    # group holds the GIL while it waits for that thread, so it would deadlock without this delay.
    time.sleep(0.2)
    dist.destroy_process_group()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of the memory that torch allocated on a GPU, or of the resident memory of
    this process (VmHWM) on a CPU."""
    if device.type != "cpu":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM. The benchmarks need Linux.")
