"""Run commands on the CPU device or on simulated CUDA devices."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hostnccl
from commands import MICRO, run
from simulated import BACKEND

#: Of processes that start with simulated devices.
VARIABLES = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).with_name("preload")), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}
MODEL = tuple(
    arg for arg in MICRO if not arg.startswith(("parallel.device=", "per_device_train_batch_size="))
)


#: Of ranks whose process groups have the rules of NCCL.
WITH_NCCL = {BACKEND: hostnccl.NAME}


def run_on(
    device: str, *args: str, variables: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command on ``cpu`` or ``cuda``, with more environment variables. ``settings`` are those
    of :func:`commands.run`."""
    environment = os.environ | (VARIABLES if device == "cuda" else {}) | (variables or {})
    return run(f"parallel.device={device}", *args, env=environment, **settings)


def train_on(device: str, folder: Path, *args: str, **settings: Any) -> str:
    """Train the smallest built-in model for three steps, unless ``args`` say otherwise; return
    standard error. ``settings`` are those of :func:`run_on`."""
    keys = {arg.partition("=")[0] for arg in args}
    default = [arg for arg in (*MODEL, "max_steps=3") if arg.partition("=")[0] not in keys]
    return run_on(device, *default, f"output_dir={folder}", *args, **settings).stderr


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
