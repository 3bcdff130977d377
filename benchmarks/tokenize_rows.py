"""Tokenize the same rows with Paceline and with `datasets.map(num_proc=…)`, in turns, and print the
ratios.

    python benchmarks/tokenize_rows.py --rows 300000 --rounds 3 --output
    benchmarks/results/2030-01-31-tokenize

Both read one file of JSON lines (instruction, input, output; words of Python's documentation;
everything follows from one seed), render each row with the model's chat template, and tokenize it;
rows are cut to the same length. The rival is what one writes with `datasets` and `transformers`:
`load_dataset("json")`, then `map` in batches with `apply_chat_template` and the fast tokenizer. It
makes no label mask and counts nothing. Both begin without a cache. Both must produce the same
number of tokens.

The contender with one process may use one core only: without that, the Rust tokenizer encodes each
batch on all cores.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACELINE = """
import sys, json
from pathlib import Path
from paceline.config.schema import Config
from paceline.data.text.build import build_entry
from paceline.data.sources.resolve import open_source
from paceline.data.text.templates import TemplateChoice
from paceline.models.builtin import resolve_model

def main():
    model, data, folder, workers = sys.argv[1:]
    config = Config(model=model, dataset=data, train_args={"max_length": 1024})
    sources = [open_source(one) for one in config.sources()]
    path = Path(resolve_model(model))
    meta = build_entry(
        Path(folder), sources, config, "sft", path, TemplateChoice(), workers=int(workers)
    )
    print(json.dumps(meta["tokens"]))

if __name__ == "__main__":
    main()
"""

DATASETS = """
import sys, json, functools
import datasets
from transformers import AutoTokenizer

def encode(tokenizer, batch):
    texts = []
    for instruction, more, output in zip(batch["instruction"], batch["input"], batch["output"]):
        question = instruction + "\\n" + more if more else instruction
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
    encoded = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=1024)
    return {"input_ids": encoded["input_ids"]}

def main():
    model, data, folder, workers = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = datasets.load_dataset("json", data_files=data, split="train", cache_dir=folder)
    names = rows.column_names
    encode_batch = functools.partial(encode, tokenizer)
    rows = rows.map(encode_batch, batched=True, num_proc=int(workers), remove_columns=names)
    print(json.dumps(total(rows)))

def total(rows):
    import pyarrow.compute as pc
    return int(pc.sum(pc.list_value_length(rows.data.column("input_ids"))).as_py())

if __name__ == "__main__":
    main()
"""


def write_rows(path: Path, count: int) -> None:
    """Rows of about 780 bytes, as those of the alpaca dataset."""
    import pydoc_data.topics

    vocabulary = [
        token
        for text in pydoc_data.topics.topics.values()
        for token in text.split()
        if token.isalpha()
    ]
    chance = random.Random(42)
    with open(path, "w") as handle:
        for number in range(count):
            row = {
                "instruction": " ".join(chance.choices(vocabulary, k=30)),
                "input": " ".join(chance.choices(vocabulary, k=20)) if number % 3 == 0 else "",
                "output": " ".join(chance.choices(vocabulary, k=90)),
            }
            handle.write(json.dumps(row) + "\n")


def timed(code: str, model: str, data: Path, workers: int, scratch: Path) -> tuple[float, int]:
    """(seconds by the wall clock, number of tokens) of a process of its own on ``workers`` cores,
    without a cache."""
    folder = scratch / "out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    script = scratch / "contender.py"
    script.write_text(code)
    command = [sys.executable, str(script), model, str(data), str(folder), str(workers)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder),
    }
    begun = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:workers])  # inherited by the contender
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    finally:
        os.sched_setaffinity(0, cores)
    return time.perf_counter() - begun, int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    from paceline.models.builtin import resolve_model

    model = str(resolve_model("builtin:qwen2-tiny"))
    contenders = {
        "paceline, 1 core": (PACELINE, 1),
        f"paceline, {options.workers} cores": (PACELINE, options.workers),
        f"datasets.map, num_proc={options.workers}": (DATASETS, options.workers),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    tokens: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        write_rows(data, options.rows)
        size = data.stat().st_size
        for number in range(options.rounds):
            for name, (code, workers) in contenders.items():
                wall_s, tokens[name] = timed(code, model, data, workers, Path(folder))
                seconds[name].append(wall_s)
                print(
                    f"round {number + 1}: {name}: {wall_s:.1f} s, {tokens[name]:,} tokens",
                    flush=True,
                )
    parallel = f"paceline, {options.workers} cores"
    text = [
        (
            f"{options.rows:,} rows, {size / 1e6:.0f} MB, {options.rounds} rounds, {os.cpu_count()}"
            " cores"
        ),
        "",
    ]
    text += [
        "| | median | lowest and highest | time relative to Paceline on all cores |",
        "|---|---|---|---|",
    ]
    for name, values in seconds.items():
        ratios = [ours / other for ours, other in zip(values, seconds[parallel], strict=True)]
        text.append(
            f"| {name} | {statistics.median(values):.1f} s | {min(values):.1f} to {max(values):.1f}"
            f" s | {statistics.median(ratios):.2f} |"
        )
    text += [
        "",
        (
            "equal numbers of tokens:"
            f" {'yes' if len(set(tokens.values())) == 1 else 'NO: ' + str(tokens)}"
        ),
    ]
    print("\n".join(text))
    result: dict[str, Any] = {
        "rows": options.rows,
        "bytes": size,
        "seconds": seconds,
        "tokens": tokens,
    }
    if options.output is not None:
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
        options.output.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
