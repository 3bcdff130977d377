"""Runs that train on completions of their own, on the smallest built-in model."""

import json
from pathlib import Path
from typing import Any

from commands import run

NUM_PROMPTS = 12
SOURCE = """
def vowels(completions, **columns):
    return [sum(letter in text for letter in "aeiou") / 5 for text in completions]
"""


def write_inputs(folder: Path, source: str = SOURCE) -> None:
    """Write the prompts and the reward functions of a run."""
    rows = [{"prompt": f"Count {number}.", "answer": str(number)} for number in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_rewards.py").write_text(source)


def train_on_rollouts(folder: Path, name: str, *args: str, expect: int = 0) -> Any:
    """Run `paceline sft` in ``folder`` and return the finished process. The global batch has two
    prompts with four completions each. ``args`` replace defaults with the same key."""
    defaults = (
        "model=builtin:qwen2-micro",
        "task=grpo",
        f"dataset={folder / 'prompts.jsonl'}",
        f"rewards=[{{function: '{folder / 'own_rewards.py'}:vowels'}}]",
        f"output_dir={folder / name}",
        "grpo.num_generations=4",
        "grpo.max_completion_length=6",
        "train_args.global_batch_size=8",
        "train_args.precision=32",
        "train_args.lr_scheduler_type=constant",
        "logging_steps=1",
        "max_length=64",
        "parallel.device=cpu",
    )
    keys = {each.partition("=")[0] for each in args}
    kept = [each for each in defaults if each.partition("=")[0] not in keys]
    return run(*kept, *args, expect=expect)


def rollouts(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of each file with a rollout, in the order of the steps."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "rollouts").glob("*.jsonl"))
    ]
