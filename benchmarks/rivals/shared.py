"""What the rivals have in common: samples, the evaluation after training, and the result file. No
tricks, no Paceline."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

Sample = dict[str, list[int]]


def read_spec() -> dict[str, Any]:
    """The work, as `benchmarks/common.py` describes it: the JSON file named on the command line."""
    return json.loads(Path(sys.argv[1]).read_text())


def read_chats(path: str) -> list[list[dict[str, str]]]:
    with open(path, encoding="utf-8") as handle:
        return [json.loads(line)["messages"] for line in handle]


def encode(tokenizer: Any, chats: list[list[dict[str, str]]], max_length: int) -> list[Sample]:
    """Token ids and labels of each chat; -100 wherever the token is not part of an answer."""
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


def pad(samples: list[Sample], pad_token_id: int) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels, int64 [rows, longest], padded on the right."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for sample in samples:
        size, gap = len(sample["input_ids"]), longest - len(sample["input_ids"])
        rows["input_ids"].append(sample["input_ids"] + [pad_token_id] * gap)
        rows["attention_mask"].append([1] * size + [0] * gap)
        rows["labels"].append(sample["labels"] + [-100] * gap)
    return {name: torch.tensor(values) for name, values in rows.items()}


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each next token, summed over the labels."""
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )


def num_labels(samples: list[Sample]) -> int:
    return sum(label != -100 for sample in samples for label in sample["labels"][1:])


class Record:
    """Times and sizes of each step, kept in memory and written once at the end."""

    def __init__(self) -> None:
        self.step_ends: list[float] = []  # seconds since the epoch
        self.tokens: list[int] = []  # this rank's tokens, padding not counted
        # as this rank back-propagated it; the mean over the ranks is that over all labels
        self.losses: list[float] = []

    def step_done(self, samples: list[Sample]) -> None:
        self.step_ends.append(time.time())
        self.tokens.append(sum(len(sample["input_ids"]) for sample in samples))


def finish(spec: dict[str, Any], record: Record, model: Any, tokenizer: Any) -> None:
    """Evaluate on the held-out chats, then write what was measured, on rank 0. The peak is that of
    training alone."""
    local = {
        "tokens": record.tokens,
        "losses": record.losses,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, local)
    loss, count = evaluate(spec, model, tokenizer)
    if dist.get_rank() == 0:
        result = {
            "step_ends": record.step_ends,
            "tokens": [
                sum(parts) for parts in zip(*(rank["tokens"] for rank in ranks), strict=True)
            ],
            "losses": [
                sum(parts) / len(parts)
                for parts in zip(*(rank["losses"] for rank in ranks), strict=True)
            ],
            "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in ranks],
            "eval_loss": loss,
            "eval_count": count,
        }
        Path(spec["result_file"]).write_text(json.dumps(result))


def evaluate(spec: dict[str, Any], model: Any, tokenizer: Any) -> tuple[float, int]:
    """(mean loss over all labels of the held-out set, their number); each rank takes every
    world-size-th chat."""
    model.eval()
    samples = encode(
        tokenizer,
        read_chats(spec["eval_file"])[dist.get_rank() :: dist.get_world_size()],
        spec["max_length"],
    )
    size = spec["per_device_batch_size"]
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(samples), size):
            chunk = samples[start : start + size]
            batch = pad(chunk, tokenizer.pad_token_id)
            labels = batch.pop("labels")
            total[0] += summed_loss(model(**batch, use_cache=False).logits, labels)
            total[1] += num_labels(chunk)
    dist.all_reduce(total)
    return float(total[0] / total[1]), int(total[1])


def close() -> None:
    """End the process group, after all measuring."""
    # gloo's thread needs the interpreter's lock to let go of the last collective's tensors; a group
    # that is destroyed before it got it waits for that thread forever, with the lock held.
    time.sleep(0.2)
    dist.destroy_process_group()


def peak_memory_bytes() -> int:
    """The most memory this process has had resident so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status: these benchmarks need Linux")
