"""Define the work and the data of the contenders, run a contender, and read its measurements."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RIVALS = Path(__file__).resolve().parent / "rivals"
DEVICE = "cpu"
WORLD_SIZE = 2
PER_DEVICE = 8
MAX_LENGTH = 1024
SEED = 42
LEARNING_RATE = 1e-3
LORA_RANK, LORA_ALPHA = 8, 32
MAX_GRAD_NORM = 1.0
MODEL = "builtin:qwen2-tiny"
#: Lengths of the chats in tokens: log-normal, clipped to this range.
MEDIAN_TOKENS, SIGMA, MIN_TOKENS, MAX_TOKENS = 120, 0.8, 30, 600
EVAL_ROWS = 64
TURN_TOKENS = 5  # tokens that the chat template adds to each message
TIMEOUT_S = 900.0
GRACE_S = 45.0  # torchrun itself waits 30 seconds for its ranks


@dataclass(frozen=True)
class Work:
    """The files and numbers of one benchmark.

    Args:
        folder: scratch folder; it also contains the cache, so that the user's cache is neither read
            nor changed.
        lengths: length of each training chat in tokens, int [rows].
        batches: indices of the samples in the global batch of each step.
    """

    folder: Path
    model: str
    train_file: Path
    eval_file: Path
    lengths: np.ndarray
    batches: list[list[int]]

    @property
    def steps(self) -> int:
        return len(self.batches)

    @property
    def global_batch(self) -> int:
        return WORLD_SIZE * PER_DEVICE

    @property
    def batch_lengths(self) -> list[int]:
        """Tokens of each global batch. Every contender must report the same numbers."""
        return [int(self.lengths[batch].sum()) for batch in self.batches]

    def padding_factor(self) -> float:
        """Return the number of positions that a padded loop computes, divided by that of a packed
        loop. The padded loop assigns samples to ranks in turn and pads each batch of a rank to its
        longest sample."""
        rows = [
            self.lengths[batch][rank::WORLD_SIZE]
            for batch in self.batches
            for rank in range(WORLD_SIZE)
        ]
        return float(
            sum(lengths.max() * len(lengths) for lengths in rows)
            / sum(lengths.sum() for lengths in rows)
        )


def make_work(
    folder: Path, steps: int, even_tokens: int | None = None, config: Path | None = None
) -> Work:
    """Write the model and the data into ``folder``.

    The data depend only on ``steps`` and on the version of Python.

    Args:
        config: `config.json` of a model to train instead of the built-in one, with random weights
            and the tokenizer of the built-in model.
        even_tokens: make every chat longer than this, so that all have this length after
        truncation.
    """
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    from tokenizers import Tokenizer

    from paceline.data.order.samples import SampleOrder
    from paceline.data.sources.builtin import builtin_dataset
    from paceline.models.builtin import resolve_model

    model = resolve_model(MODEL)
    if config is not None:
        model = random_model(folder / "model", config, Path(model))
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    rows = [
        json.loads(line)["messages"]
        for line in builtin_dataset("python-docs").read_text(encoding="utf-8").splitlines()
    ]
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(rows))
    held_out = len(rows) // 10  # training chats contain none of the held-out questions
    num_rows = max(1024, steps * WORLD_SIZE * PER_DEVICE)
    train = make_chats(
        [rows[index] for index in order[held_out:]], num_rows, tokenizer, rng, even_tokens
    )
    evaluation = make_chats(
        [rows[index] for index in order[:held_out]], EVAL_ROWS, tokenizer, rng, even_tokens
    )
    write_jsonl(folder / "train.jsonl", [chat for chat, _ in train])
    write_jsonl(folder / "eval.jsonl", [chat for chat, _ in evaluation])
    samples = SampleOrder(num_rows, WORLD_SIZE * PER_DEVICE, SEED)
    batches = [samples.global_batch(step)[:, 1].tolist() for step in range(steps)]
    lengths = np.array(
        [size if even_tokens is None else min(size, even_tokens) for _, size in train]
    )
    return Work(folder, model, folder / "train.jsonl", folder / "eval.jsonl", lengths, batches)


def random_model(folder: Path, config: Path, built_in: Path) -> str:
    """Write a model with random weights in bfloat16, and with the tokenizer of ``built_in``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(built_in, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    return str(folder)


def make_chats(
    rows: list[Any],
    count: int,
    tokenizer: Any,
    rng: np.random.Generator,
    even_tokens: int | None = None,
) -> list[tuple[list[Any], int]]:
    """Return ``count`` chats with their lengths in tokens.

    Turns are joined until they fill a length drawn from the distribution, or until they are longer
    than ``even_tokens``.
    """
    sizes = np.array([count_turn_tokens(row, tokenizer) for row in rows])
    by_size = np.argsort(sizes, kind="stable")
    ordered = sizes[by_size]
    chats = []
    for target in np.clip(
        rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, count), MIN_TOKENS, MAX_TOKENS
    ):
        chat: list[Any] = []
        length = 0
        while even_tokens is not None and length <= even_tokens:
            row_index = by_size[rng.integers(len(by_size) // 2)]
            chat += rows[row_index]
            length += int(sizes[row_index])
        if even_tokens is not None:
            chats.append((chat, length))
            continue
        while (
            num_fitting := int(np.searchsorted(ordered, target - length, side="right"))
        ) > 0 or not chat:
            row_index = by_size[rng.integers(max(1, num_fitting))]
            chat += rows[row_index]
            length += int(sizes[row_index])
        chats.append((chat, length))
    return chats


def count_turn_tokens(messages: list[Any], tokenizer: Any) -> int:
    """Return the number of tokens of a turn in the ChatML format."""
    text = "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )
    return len(tokenizer.encode(text).ids)


def write_jsonl(path: Path, chats: list[Any]) -> None:
    with open(path, "w", encoding="utf-8") as handle:
        for chat in chats:
            handle.write(json.dumps({"messages": chat}, ensure_ascii=False) + "\n")


# -- contenders


@dataclass(frozen=True)
class Measurement:
    """The measurements of one run of a contender.

    Args:
        peak_memory_bytes: one value per rank.
        tokens: tokens of the global batch of each step.
        losses: training loss of each step.
        state_bytes: measured size of the training state of a rank.
        started_at: when the command was started, in seconds since the epoch.
    """

    time_to_first_step_s: float
    samples_per_second: float
    eval_loss: float
    eval_count: int
    peak_memory_bytes: list[int]
    tokens: list[int]
    losses: list[float]
    state_bytes: int | None = None
    started_at: float | None = None


def run_rival(work: Work, script: str, **overrides: Any) -> Measurement:
    """Run ``rivals/SCRIPT.py`` under torchrun; ``overrides`` add to or replace entries of its
    spec."""
    result_file, spec_file = work.folder / "result.json", work.folder / "spec.json"
    result_file.unlink(missing_ok=True)
    spec = {
        "model": work.model,
        "train_file": str(work.train_file),
        "eval_file": str(work.eval_file),
        "batches": work.batches,
        "device": DEVICE,
        "per_device_batch_size": PER_DEVICE,
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_GRAD_NORM,
        "max_length": MAX_LENGTH,
        "lora_rank": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "seed": SEED,
        "result_file": str(result_file),
        "scratch": str(work.folder / "scratch"),
        **overrides,
    }
    spec_file.write_text(json.dumps(spec))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}"]
    started_at = run_command(
        [sys.executable, *torchrun, str(RIVALS / f"{script}.py"), str(spec_file)], work
    )
    result = json.loads(result_file.read_text())
    step_ends = result.pop("step_ends")
    return Measurement(step_ends[0] - started_at, _samples_per_second(work, step_ends), **result)


def run_paceline(work: Work, keep_tokens: bool = False, **overrides: Any) -> Measurement:
    """Run `paceline sft`, and read its event log and report.

    Args:
        keep_tokens: whether to keep the token cache of earlier runs; otherwise it is empty.
        overrides: settings to add or replace; two underscores stand for a dot.
    """
    output = work.folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    if not keep_tokens:
        shutil.rmtree(work.folder / "cache" / "paceline" / "tokens", ignore_errors=True)
    settings = {
        "model": work.model,
        "dataset": work.train_file,
        "val_dataset": work.eval_file,
        "output_dir": output,
        "parallel.device": DEVICE,
        "parallel.num_gpus": WORLD_SIZE,
        "lora.enable": "true",
        "lora.rank": LORA_RANK,
        "lora.alpha": LORA_ALPHA,
        "lora.dropout": 0,
        "train_args.per_device_train_batch_size": PER_DEVICE,
        "train_args.learning_rate": LEARNING_RATE,
        "train_args.lr_scheduler_type": "constant",
        "train_args.max_grad_norm": MAX_GRAD_NORM,
        "train_args.max_length": MAX_LENGTH,
        "train_args.max_steps": work.steps,
        "train_args.save_steps": 0,
        "train_args.seed": SEED,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    command = [
        sys.executable,
        "-m",
        "paceline",
        "sft",
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    started_at = run_command(command, work)
    report = json.loads((output / "report.json").read_text())
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["type"] == "step"]
    evaluation = [event for event in events if event["type"] == "eval"][-1]
    step_ends = [event["time"] for event in steps]
    return Measurement(
        time_to_first_step_s=step_ends[0] - started_at,
        samples_per_second=_samples_per_second(work, step_ends),
        eval_loss=evaluation["loss"],
        eval_count=evaluation["count"],
        peak_memory_bytes=report["peak_memory_bytes"],
        tokens=[event["tokens"] for event in steps],
        losses=[event["loss"] for event in steps],
        state_bytes=report["state_memory_bytes"]["measured"],
        started_at=started_at,
    )


def _samples_per_second(work: Work, step_ends: list[float]) -> float:
    """Return the throughput from the end of the first step to the end of the last."""
    return (len(step_ends) - 1) * work.global_batch / (step_ends[-1] - step_ends[0])


class BenchmarkFailed(Exception):
    """A contender failed or timed out."""


def run_command(command: list[str], work: Work) -> float:
    """Run a command, and return its start time in seconds since the epoch.

    Raises:
        BenchmarkFailed: the command failed or timed out. No process remains in either case.
    """
    # All contenders use one thread per rank, which is torchrun's default, and no access to the
    # Hugging Face Hub.
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(work.folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = work.folder / "output.txt"
    with open(log, "wb") as handle:
        started_at = time.time()
        process = subprocess.Popen(
            command, stdout=handle, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            exit_code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _terminate(process)
    if exit_code != 0:
        tail = log.read_text(errors="replace")[-3000:]
        outcome = (
            f"timed out after {TIMEOUT_S:.0f} s"
            if exit_code is None
            else f"exited with code {exit_code}"
        )
        raise BenchmarkFailed(f"{' '.join(command[:6])} … {outcome}:\n{tail}")
    return started_at


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Terminate a command that is still running.

    SIGTERM comes first, because the ranks of torchrun are in other sessions, where SIGKILL to the
    process group does not reach them.
    """
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
