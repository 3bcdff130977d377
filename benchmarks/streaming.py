"""Compare the start, the memory and the wait for data of a streaming run with those of Hugging Face
datasets.

    python benchmarks/streaming.py --size-gb 2.3 --steps 200 --output
    benchmarks/results/2030-01-31-streaming

Both contenders train the same built-in model on two CPU ranks with rows of one generated file of
JSON lines, which neither has read before. The rival is a hand-written loop with
`load_dataset(streaming=True)`, its shuffle buffer, `split_dataset_by_node`, and one loader process
per rank that renders the chat template and tokenizes.

For each contender, the results are the seconds from the start of the command to the end of the
first step, the mean share of a step that a rank waits for its batch (after the first ten steps),
and the resident memory of rank 0 after step 100 and at the end.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from run import describe_machine, report_results

MODEL = "builtin:qwen2-tiny"
TITLES = {
    "paceline": "Paceline, `streaming: true`",
    "datasets": "hand-written loop, `load_dataset(streaming=True)`",
}
WORLD_SIZE = 2
PER_DEVICE = 4
MAX_LENGTH = 1024
WARMUP_STEPS = 10
TIMEOUT_S = 1800.0

RIVAL = """
import json, os, sys, time
from functools import partial

import datasets, torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path, data, steps, per_device, max_length, output = sys.argv[1:]
steps, per_device, max_length = int(steps), int(per_device), int(max_length)


def rss():
    with open("/proc/self/status") as handle:
        return next(int(line.split()[1]) * 1024 for line in handle if line.startswith("VmRSS"))


def encode(tokenizer, row):
    chat = [
        {"role": "user", "content": row["instruction"]},
        {"role": "assistant", "content": row["output"]},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    return {"input_ids": tokenizer(text, truncation=True, max_length=max_length)["input_ids"]}


def collate(pad, rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    for row, line in zip(rows, ids):
        line[: len(row["input_ids"])] = torch.tensor(row["input_ids"])
    mask = (ids != pad).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


dist.init_process_group("gloo")
rank = dist.get_rank()
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = datasets.load_dataset("json", data_files=data, split="train", streaming=True)
rows = split_dataset_by_node(rows.shuffle(seed=42, buffer_size=16384), rank, dist.get_world_size())
rows = rows.map(partial(encode, tokenizer), remove_columns=["instruction", "input", "output"])
pad = tokenizer.pad_token_id or 0
loader = DataLoader(rows, per_device, collate_fn=partial(collate, pad), num_workers=1)
waits, times, memory, first_at = [], [], [], None
batches = iter(loader)
for step in range(steps):
    start = time.perf_counter()
    batch = next(batches)
    waits.append(time.perf_counter() - start)
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - start)
    memory.append(rss())
    first_at = first_at or time.time()
if rank == 0:
    with open(output, "w") as handle:
        json.dump({"first_at": first_at, "waits": waits, "times": times, "memory": memory}, handle)
dist.destroy_process_group()
"""


def write_rows(path: Path, size_bytes: int) -> int:
    """Write rows with words of a fixed seed until the file has this size. Return their number."""
    rng = random.Random(0)
    vocabulary = [
        f"{stem}{end}" for stem in ("val", "func", "list", "err", "read") for end in "aeiou"
    ]
    answers = [" ".join(rng.choices(vocabulary, k=rng.randint(60, 160))) for _ in range(20_000)]
    num_rows = written = 0
    with open(path, "w", buffering=1 << 22) as file:
        while written < size_bytes:
            question, answer = answers[num_rows * 7 % 20_000][:180], answers[num_rows * 13 % 20_000]
            row = {"instruction": f"Question {num_rows}: {question}", "input": "", "output": answer}
            written += file.write(json.dumps(row) + "\n")
            num_rows += 1
    return num_rows


def run_paceline(folder: Path, data: Path, steps: int) -> dict[str, Any]:
    settings = [
        f"model={MODEL}", f"dataset={data}", "streaming=true", "parallel.mode=ddp",
        f"parallel.num_gpus={WORLD_SIZE}", "parallel.device=cpu", f"max_steps={steps}",
        f"per_device_train_batch_size={PER_DEVICE}", f"max_length={MAX_LENGTH}", "save_steps=0",
        "learning_rate=1e-3", "logging_steps=1", f"output_dir={folder / 'run'}",
    ]  # fmt: skip
    started = time.time()
    _run([sys.executable, "-m", "paceline", "sft", *settings], folder)
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    steps_logged = [event for event in map(json.loads, lines) if event["type"] == "step"]
    return _figures(
        started,
        steps_logged[0]["time"],
        [step["data_wait_s"] for step in steps_logged],
        [step["step_time_s"] for step in steps_logged],
        [step["memory_bytes"][0] for step in steps_logged],
    )


def run_datasets(folder: Path, data: Path, steps: int) -> dict[str, Any]:
    from paceline.models.builtin import resolve_model

    script, output = folder / "rival.py", folder / "rival.json"
    script.write_text(RIVAL)
    model = folder / "model"
    _save_initial_model(resolve_model(MODEL), model)
    started = time.time()
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD_SIZE}"]
    values = [model, data, steps, PER_DEVICE, MAX_LENGTH, output]
    _run([*torchrun, str(script), *map(str, values)], folder)
    result = json.loads(output.read_text())
    first_at = result.pop("first_at")
    return _figures(started, first_at, result["waits"], result["times"], result["memory"])


def _save_initial_model(source: str, folder: Path) -> None:
    """Write the built-in model with its initial weights, as transformers loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _run(command: list[str], folder: Path) -> None:
    """Run a contender with new caches."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
    }  # fmt: skip
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")


def _figures(
    started: float, first_at: float, waits: list[float], times: list[float], memory: list[int]
) -> dict[str, Any]:
    return {
        "first_step_s": first_at - started,
        "data_wait_share": sum(waits[WARMUP_STEPS:]) / sum(times[WARMUP_STEPS:]),
        "steps_per_second": len(times[WARMUP_STEPS:]) / sum(times[WARMUP_STEPS:]),
        "memory_bytes_step_100": memory[min(99, len(memory) - 1)],
        "memory_bytes_end": memory[-1],
    }


def as_markdown(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    machine = result["machine"]
    lines = [
        f"# Training from a file of rows as a stream: {result['date']}",
        "",
        f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB; Python"
        f" {machine['python']}, torch {machine['torch']}, datasets {version('datasets')}. {MODEL},"
        f" {WORLD_SIZE} CPU ranks, {result['steps']} steps of {WORLD_SIZE * PER_DEVICE} rows from a"
        f" file of {result['rows']:,} rows ({result['bytes'] / 1e9:.1f} GB) that neither has read"
        " before; one run each.",
        "",
        "| | first step (s) | wait for data | memory after step 100 (MiB) | at the end |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, title in TITLES.items():
        figures = result[name]
        lines.append(
            f"| {title} | {figures['first_step_s']:.1f} | {figures['data_wait_share']:.2%} |"
            f" {figures['memory_bytes_step_100'] / 2**20:.0f} |"
            f" {figures['memory_bytes_end'] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gb", type=float, default=2.3, help="size of the file in 10^9 bytes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (all measurements)"
    )
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="paceline-streaming-"))
    try:
        data = folder / "rows.jsonl"
        result: dict[str, Any] = {
            "date": date.today().isoformat(),
            "machine": describe_machine(),
            "steps": args.steps,
            "rows": write_rows(data, int(args.size_gb * 1e9)),
            "bytes": data.stat().st_size,
        }
        for name, contender in (("paceline", run_paceline), ("datasets", run_datasets)):
            result[name] = contender(folder, data, args.steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report_results(args, result, as_markdown(result))


if __name__ == "__main__":
    sys.exit(main())
