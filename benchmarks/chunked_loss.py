"""Compare the loss in chunks with the loss of all logits: memory, time and result of forward and
backward of an output head.

    python benchmarks/chunked_loss.py --output benchmarks/results/2030-01-31-chunked-loss

The head has 152,000 × 512 weights in float32, as in a small model with the vocabulary of Qwen2.5,
either frozen (LoRA) or trained. It computes in float32 or, by autocast, in bfloat16. The contenders
take turns, each in a process of its own with the same random numbers. Memory is the resident set
at its peak, less that before the forward. Linux only.
"""

import argparse
import json
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import run

CONTENDER = """
import json, resource, sys, time
import torch
from torch import nn
from torch.nn import functional
from paceline.models.shape.loss_chunks import choose_loss_chunks
from paceline.config.schema.train_args import TrainArgs
from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.softmax import LogitTransform

tokens, vocabulary, width = map(int, sys.argv[1:4])
is_chunked, is_trained, is_low = (word == "true" for word in sys.argv[4:])
torch.manual_seed(0)
head = nn.Linear(width, vocabulary, bias=False).requires_grad_(is_trained)
head.weight.grad = torch.zeros_like(head.weight) if is_trained else None
hidden = torch.randn(1, tokens, width).requires_grad_()
targets = torch.randint(0, vocabulary, (1, tokens))
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
started_at = time.perf_counter()
with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
    if is_chunked:
        chunk_tokens = choose_loss_chunks(TrainArgs(), vocabulary, "cpu").tokens
        chunks = ChunkedLoss(head, LogitTransform(), targets, None, chunk_tokens)
        with chunked_loss(chunks):
            loss = chunks.result(head(hidden))
    else:
        logits = head(hidden).flatten(0, 1).float()
        loss = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
loss.backward()
seconds = time.perf_counter() - started_at
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({
    "bytes": peak - before,
    "seconds": seconds,
    "loss": loss.item() / tokens,
    "gradient_norm": hidden.grad.norm().item(),
}))
"""
CONTENDERS = {"all logits": "false", "chunks": "true"}


def main() -> int:
    options = _arguments()
    rows = []
    for precision in ("float32", "bfloat16"):
        for head in ("frozen", "trained"):
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
            for _ in range(options.rounds):
                for name in CONTENDERS:
                    rounds[name].append(measure(options, name, head, precision))
                    print(f"{precision}, {head}, {name}: {rounds[name][-1]}", file=sys.stderr)
            rows.append({"precision": precision, "head": head, "rounds": rounds})
    result = {
        "date": date.today().isoformat(),
        "machine": run.describe_machine(),
        "tokens": options.tokens,
        "vocabulary": options.vocabulary,
        "width": options.width,
        "rows": rows,
    }
    text = as_markdown(result)
    if options.output:
        options.output.with_suffix(".md").write_text(text + "\n")
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if options.json else text)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens with a loss")
    parser.add_argument("--vocabulary", type=int, default=152_000, help="rows of the head")
    parser.add_argument("--width", type=int, default=512, help="columns of the head")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender")
    parser.add_argument("--output", type=Path, help="write OUTPUT.md and OUTPUT.json")
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    return parser.parse_args()


def measure(
    options: argparse.Namespace, contender: str, head: str, precision: str
) -> dict[str, float]:
    """Run a contender in a process of its own."""
    sizes = [str(size) for size in (options.tokens, options.vocabulary, options.width)]
    switches = [
        CONTENDERS[contender],
        str(head == "trained").lower(),
        str(precision == "bfloat16").lower(),
    ]
    done = subprocess.run(
        [sys.executable, "-c", CONTENDER, *sizes, *switches],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"# The loss in chunks: {result['date']}",
        "",
        f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB; Python"
        f" {machine['python']}, torch {machine['torch']}. {result['tokens']:,} tokens, a head of"
        f" {result['vocabulary']:,} × {result['width']} weights in float32; medians of"
        f" {len(result['rows'][0]['rounds']['chunks'])} rounds.",
        "",
        "| precision | head | memory: all logits, chunks | ratio | time: all logits, chunks | ratio"
        " | relative difference of the loss |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        full, chunks = (
            {
                key: statistics.median(each[key] for each in row["rounds"][name])
                for key in ("bytes", "seconds", "loss")
            }
            for name in CONTENDERS
        )
        lines.append(
            f"| {row['precision']} | {row['head']} | {full['bytes'] / 1e9:.2f} GB,"
            f" {chunks['bytes'] / 1e9:.2f} GB | 1/{full['bytes'] / chunks['bytes']:.1f} |"
            f" {full['seconds']:.1f} s, {chunks['seconds']:.1f} s |"
            f" {chunks['seconds'] / full['seconds']:.2f} |"
            f" {abs(chunks['loss'] / full['loss'] - 1):.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
