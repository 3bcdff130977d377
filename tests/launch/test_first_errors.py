"""What has not happened yet when a wrong config is refused: an error that needs neither torch nor
the data must not wait for them, and no error of a config may wait for the ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: Runs `paceline sft` for each list of arguments in turn, and prints for each run its exit code,
#: its message, and whether torch was imported, the data file was opened and ranks were started.
CHILD = """
import contextlib, io, json, os, sys

opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)

from paceline.cli import main

for arguments in json.loads(sys.argv[1]):
    opened.clear()
    message = io.StringIO()
    with contextlib.redirect_stderr(message), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(["sft", *arguments])
        except SystemExit as error:
            code = error.code
    happened = [
        name
        for name, has_happened in (
            ("torch", "torch" in sys.modules),
            ("data", any(name.endswith("eight-rows.jsonl") for name in opened)),
            ("ranks", os.path.exists("run")),  # rank 0 creates it
        )
        if has_happened
    ]
    print(json.dumps([code, happened, message.getvalue()]), file=sys.__stdout__)
"""
#: Wrong setting → what may have happened before its error: nothing, the import of torch, or that
#: and reading the data.
TABLE: dict[str, dict[str, str]] = {
    "": {
        "train_args.nonsense=1": "unknown key",
        "learning_rate=-1": "out of range",
        "parallel.mode=zeroo": "unknown mode",
        "output_dir=file": "is a file",
        "checkpoint_dir=run/checkpoints": "inside the run's folder",
        "resume=./nope": "does not exist",
        "evaluation.metrics=[./no.py:f] split_dataset_ratio=0.1": "file not found",
        "model=./nope": "does not exist",
        "dataset=./nope.jsonl": "./nope.jsonl",
        "task=sftt": "did you mean",
        "max_length=999999": "max_length",
        "parallel.mode=single": "it trains on one device",
        "attn_implementation=flash_attention_2": "no kernel",
        "parallel.tensor=3": "does not make 2 ranks",
        "parallel.mode=zero3 compression.method=topk": "is not supported with",
        "parallel.mode=zero1 train_args.optim=muon": "divided over the ranks",
        "parallel.mode=parameter_server": "embedding tables",
    },
    "torch": {
        "parallel.device=cuda": "`parallel.device=cpu`",
        "parallel.mode=dp parallel.nnodes=2 parallel.rdzv_endpoint=127.0.0.1:1": "one process",
        "callbacks=[./no.py:C]": "file not found",
        "lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr: 5}": "min_lr",
    },
    "torch data": {
        "profile={start_step: 5, num_steps: 2}": "is to be recorded",
        "load_best_model_at_end=true": "there is no validation data",
    },
}


@pytest.mark.parametrize("allowed", TABLE)
def test_what_has_not_happened_before_the_error(allowed: str, tmp_path: Path) -> None:
    row = json.dumps({"instruction": "one and two", "output": "three"})
    (tmp_path / "eight-rows.jsonl").write_text(f"{row}\n" * 8)
    (tmp_path / "file").write_text("")
    base = {
        "model": "builtin:qwen2-micro", "dataset": "eight-rows.jsonl", "output_dir": "run",
        "max_steps": "2", "parallel.device": "cpu", "parallel.num_gpus": "2",
    }  # fmt: skip
    runs = []
    for settings in TABLE[allowed]:
        changed = dict(part.split("=", 1) for part in split(settings))
        runs.append([f"{key}={value}" for key, value in {**base, **changed}.items()])
    child = [sys.executable, "-c", CHILD, json.dumps(runs)]
    done = subprocess.run(
        child, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(runs)
    for (settings, text), (code, happened, message) in zip(
        TABLE[allowed].items(), results, strict=True
    ):
        assert code == 2, settings
        assert text in message, settings
        assert set(happened) <= set(allowed.split()), settings


def split(settings: str) -> list[str]:
    """Return the settings of a text, in which values may contain spaces."""
    parts: list[str] = []
    for word in settings.split(" "):
        if "=" in word:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts
