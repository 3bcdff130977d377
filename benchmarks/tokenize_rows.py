"""Compare the tokenization speed of Paceline with `datasets.map(num_proc=…)` on the same rows.

    python benchmarks/tokenize_rows.py --rows 300000 --rounds 3 --output
    benchmarks/results/2030-01-31-tokenize

The contenders take turns. Both read a file of JSON lines (instruction, input and output, with words
of Python's documentation drawn with a fixed seed), render each row with the chat template of the
model, and tokenize and truncate it. The rival is a typical script with `datasets` and
`transformers`: `load_dataset("json")`, then `map` in batches with `apply_chat_template` and the
fast tokenizer; it creates no label mask. Both start without a cache and must produce the same
number of tokens.

The contender with one process is limited to one core, because the Rust tokenizer would otherwise
encode each batch on all cores.
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
from paceline.data.encoding.build import build_entry
from paceline.data.sources.resolve import open_source
from paceline.models.builtin import resolve_model

def main():
    model, data, folder, workers = sys.argv[1:]
    config = Config(model=model, dataset=data, train_args={"max_length": 1024})
    sources = [open_source(spec) for spec in config.sources()]
    path = Path(resolve_model(model))
    metadata = build_entry(Path(folder), sources, config, "sft", path, workers=int(workers))
    print(json.dumps(metadata["tokens"]))

if __name__ == "__main__":
    main()
"""

DATASETS = """
import sys, json, functools
import datasets
from transformers import AutoTokenizer

def encode(tokenizer, batch):
    texts = []
    columns = (batch["instruction"], batch["input"], batch["output"])
    for instruction, context, output in zip(*columns):
        question = instruction + "\\n" + context if context else instruction
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
    encoded = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=1024)
    return {"input_ids": encoded["input_ids"]}

def main():
    model, data, folder, workers = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = datasets.load_dataset("json", data_files=data, split="train", cache_dir=folder)
    columns = rows.column_names
    encode_batch = functools.partial(encode, tokenizer)
    rows = rows.map(encode_batch, batched=True, num_proc=int(workers), remove_columns=columns)
    print(json.dumps(count_tokens(rows)))

def count_tokens(rows):
    import pyarrow.compute as pc
    return int(pc.sum(pc.list_value_length(rows.data.column("input_ids"))).as_py())

if __name__ == "__main__":
    main()
"""


def write_rows(path: Path, count: int) -> None:
    """Write rows of about 780 bytes, the size of those in the alpaca dataset."""
    import pydoc_data.topics

    vocabulary = [
        token
        for text in pydoc_data.topics.topics.values()
        for token in text.split()
        if token.isalpha()
    ]
    random_source = random.Random(42)
    with open(path, "w") as handle:
        for number in range(count):
            row = {
                "instruction": " ".join(random_source.choices(vocabulary, k=30)),
                "input": " ".join(random_source.choices(vocabulary, k=20))
                if number % 3 == 0
                else "",
                "output": " ".join(random_source.choices(vocabulary, k=90)),
            }
            handle.write(json.dumps(row) + "\n")


def run_contender(
    code: str, model: str, data: Path, workers: int, scratch: Path
) -> tuple[float, int]:
    """Run a contender without a cache in a process on ``workers`` cores, and return the wall-clock
    seconds and the number of tokens."""
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
    started_at = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:workers])  # inherited by the contender
    try:
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
    finally:
        os.sched_setaffinity(0, cores)
    return time.perf_counter() - started_at, int(completed.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=300_000, help="number of rows (default 300000)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default 3)")
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes of each contender (default: number of cores)",
    )
    parser.add_argument(
        "--output", type=Path, help="write OUTPUT.md (the table) and OUTPUT.json (all measurements)"
    )
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
                wall_s, tokens[name] = run_contender(code, model, data, workers, Path(folder))
                seconds[name].append(wall_s)
                print(
                    f"round {number + 1}: {name}: {wall_s:.1f} s, {tokens[name]:,} tokens",
                    flush=True,
                )
    reference = f"paceline, {options.workers} cores"
    text = [
        (
            f"{options.rows:,} rows, {size / 1e6:.0f} MB, {options.rounds} rounds, {os.cpu_count()}"
            " cores"
        ),
        "",
    ]
    text += [
        "| | median | range | time relative to Paceline on all cores |",
        "|---|---|---|---|",
    ]
    for name, values in seconds.items():
        ratios = [
            value / reference_value
            for value, reference_value in zip(values, seconds[reference], strict=True)
        ]
        text.append(
            f"| {name} | {statistics.median(values):.1f} s | {min(values):.1f} to {max(values):.1f}"
            f" s | {statistics.median(ratios):.2f} |"
        )
    text += [
        "",
        (
            "same number of tokens:"
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
