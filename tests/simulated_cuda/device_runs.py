"""Run commands on the CPU device or on simulated CUDA devices."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from commands import MICRO, run

#: Of processes that start with simulated devices.
VARIABLES = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).with_name("preload")), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}
MODEL = tuple(
    arg for arg in MICRO if not arg.startswith(("parallel.device=", "per_device_train_batch_size="))
)


def run_on(device: str, *args: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a command on ``cpu`` or ``cuda``. ``settings`` are those of :func:`commands.run`."""
    environment = os.environ | (VARIABLES if device == "cuda" else {})
    return run(f"parallel.device={device}", *args, env=environment, **settings)


def train_on(device: str, folder: Path, *args: str, **settings: Any) -> str:
    """Train the smallest built-in model for three steps, or for `max_steps`; return standard
    error."""
    steps = [] if any(arg.startswith("max_steps=") for arg in args) else ["max_steps=3"]
    return run_on(device, *MODEL, *steps, f"output_dir={folder}", *args, **settings).stderr


def equal_rows(folder: Path, max_length: int) -> tuple[str, ...]:
    """Write a dataset whose samples all have ``max_length`` tokens, and an equal number of them
    with a loss. Return the arguments to train on it."""
    path = folder.with_name(f"{folder.name}-rows.jsonl")
    with path.open("w") as rows:
        for number in range(96):
            answer = {"role": "assistant", "content": f"word {number} " * max_length}
            messages = [{"role": "user", "content": "Repeat."}, answer]
            rows.write(json.dumps({"messages": messages}) + "\n")
    return (f"dataset={path}", f"max_length={max_length}", "packing=false")
