"""Runs that stream their data, plain, packed and mixed: exact resume, also after killed ranks and
rollbacks, the same losses and counts on other numbers of ranks."""

import gzip
import json
import random
import shutil
from pathlib import Path

import pytest
from commands import (
    MICRO,
    digest,
    events,
    find_forked_ranks,
    losses,
    report,
    run,
    start,
    wait_for_step,
)
from prepared_tokens import CHATS, PAIRS, save

from paceline.checkpoint import store

pytestmark = [pytest.mark.slow, pytest.mark.soak]

BAD = [{"prompt": "no answer", "completion": ""}, {"foo": 1}]
WEIGHTED = ("mixing=weights", "stopping_strategy=all_exhausted")
#: Kind of stream → its settings, and whether its files are compressed.
KINDS: dict[str, tuple[tuple[str, ...], bool]] = {
    "plain": ((), False),
    "shards": ((), True),
    "bfd": (("packing_strategy=bfd",), False),
    "wrapped-shards": (("packing_strategy=wrapped",), True),
    "mixed": (WEIGHTED, False),
    "mixed-bfd-shards": (("mixing=weights", "packing_strategy=bfd"), True),
}
STRATEGIES = {
    "single": ("parallel.mode=single",),
    "ddp": ("parallel.mode=ddp", "parallel.num_gpus=2"),
    "zero3": ("parallel.mode=zero3", "parallel.num_gpus=2"),
    "four": ("parallel.mode=ddp", "parallel.num_gpus=4"),
}


def stream_args(folder: Path, kind: str) -> tuple[str, ...]:
    """Write the files of a kind of stream; return its arguments."""
    settings, is_compressed = KINDS[kind]
    sources = []
    for name, rows, weight in (("a", [*PAIRS * 6, *BAD], 0.7), ("b", CHATS * 5, {0: 0.3, 9: 0.1})):
        path = folder / f"{name}.jsonl"
        save(path, rows)
        if is_compressed:
            text, path = path.read_bytes(), folder / f"{name}.jsonl.gz"
            path.write_bytes(gzip.compress(text))
        sources.append({"path": str(path)} | ({"weight": weight} if "mixed" in kind else {}))
    arguments = [setting for setting in MICRO if not setting.startswith(("dataset=", "per_device"))]
    return (
        *arguments, f"dataset={json.dumps(sources)}", "streaming=true", "learning_rate=1e-3",
        "per_device_train_batch_size=1", "save_steps=3", "lr_scheduler_type=constant",
        "shuffle_buffer_size=16", *settings,
    )  # fmt: skip


def check_counts(folder: Path) -> None:
    figures = report(folder)
    data = figures["data"]
    assert data["read"] == data["kept"] + sum(data["dropped"].values())
    assert (
        figures["samples_seen"] == data["samples"] == sum(row["samples"] for row in data["sources"])
    )
    assert (
        figures["train_tokens"] == data["tokens"] == sum(row["tokens"] for row in data["sources"])
    )
    tokens = [row["tokens"] for row in figures["sources"] if row["tokens"]]
    assert tokens == [row["tokens"] for row in data["sources"]]
    assert events(folder, "data")[-1]["data"] == data


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_stream_has_digest_and_counts_of_undisturbed_run(kind: str, tmp_path: Path) -> None:
    args = (*stream_args(tmp_path, kind), "gradient_accumulation_steps=4", *STRATEGIES["single"])
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    run(*args, "max_steps=24", f"output_dir={full}")
    shutil.copytree(full, resumed)
    for name in ("report.json", "model"):
        path = resumed / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for checkpoint in store.committed(resumed / "checkpoints"):
        if checkpoint.name != "step-00000015":
            shutil.rmtree(checkpoint)
    workers = ("dataloader_num_workers=2", "save_total_limit=9")
    run(*args, "max_steps=24", *workers, f"output_dir={resumed}")
    assert digest(resumed) == digest(full)
    assert report(resumed)["data"] == report(full)["data"]
    check_counts(resumed)


@pytest.mark.parametrize("kind", KINDS)
def test_run_on_other_numbers_of_ranks_has_same_losses_and_counts(
    kind: str, tmp_path: Path
) -> None:
    args = stream_args(tmp_path, kind)
    alone = ("gradient_accumulation_steps=4", *STRATEGIES["single"])
    run(*args, *alone, "max_steps=12", f"output_dir={tmp_path / 'single'}")
    chain = f"output_dir={tmp_path / 'chain'}"
    run(*args, *alone, "max_steps=3", chain)
    for strategy, max_steps in (("ddp", 6), ("four", 9), ("zero3", 12)):
        settings = (*STRATEGIES[strategy], f"max_steps={max_steps}", "--allow-config-change")
        run(*args, *settings, "gradient_accumulation_steps=1", chain)
    assert losses(tmp_path / "chain") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    assert report(tmp_path / "chain")["data"] == report(tmp_path / "single")["data"]
    for step, expected in zip(
        events(tmp_path / "chain", "step"), events(tmp_path / "single", "step"), strict=True
    ):
        assert step["samples"] == expected["samples"]
        for source, other in zip(step["sources"], expected["sources"], strict=True):
            assert (source["samples"], source["tokens"]) == (other["samples"], other["tokens"])
            assert source["loss"] == (other["loss"] and pytest.approx(other["loss"], rel=1e-4))
    check_counts(tmp_path / "chain")


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "four"])
@pytest.mark.parametrize("kind", ["plain", "mixed-bfd-shards"])
def test_killed_rank_does_not_change_the_result(kind: str, strategy: str, tmp_path: Path) -> None:
    args = (*stream_args(tmp_path, kind), *STRATEGIES[strategy], "max_steps=24")
    run(*args, f"output_dir={tmp_path / 'full'}")
    folder = tmp_path / "killed"
    process = start(*args, f"output_dir={folder}")
    wait_for_step(folder, random.Random(f"{kind} {strategy}").randint(7, 16), process)
    random.Random(1).choice(find_forked_ranks(process)).kill()
    _, output = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert report(folder)["restarts"] == 1
    assert digest(folder) == digest(tmp_path / "full")
    assert report(folder)["data"] == report(tmp_path / "full")["data"]
    check_counts(folder)


@pytest.mark.parametrize("packing", ["micro_batch", "bfd"])
def test_rollback_of_a_stream_skips_only_its_batch(packing: str, tmp_path: Path) -> None:
    easy = {"prompt": "say", "completion": " the same thing again and again and again"}
    rows = [easy] * 200
    # Random words in one batch; the others have the same text.
    numbers = random.Random(3)
    hard = " ".join(str(numbers.randrange(10**9)) for _ in range(12))
    for number in range(80, 90):
        rows[number] = {"prompt": "say", "completion": hard}
    path = save(tmp_path / "a.jsonl", rows)
    recovery = '{"rollback_on_loss_spike": true, "loss_spike_factor": 4, "loss_spike_window": 6}'
    args = (
        "model=builtin:qwen2-micro", f"dataset={path}", "streaming=true", "shuffle=false",
        "parallel.device=cpu", "parallel.mode=zero3", "parallel.num_gpus=2", "max_steps=30",
        "per_device_train_batch_size=2", "max_length=128", "learning_rate=1e-2", "save_steps=4",
        f"packing_strategy={packing}", f"recovery={recovery}", "lr_scheduler_type=constant",
    )  # fmt: skip
    run(*args, f"output_dir={tmp_path / 'run'}")
    rollbacks = events(tmp_path / "run", "rollback")
    assert rollbacks
    figures = report(tmp_path / "run")
    skipped = figures["data"]["skipped_batches"]["steps"]
    assert len(skipped) == len(rollbacks)
    if packing == "micro_batch":
        assert figures["data"]["read"] == figures["samples_seen"] == 4 * (30 - len(skipped))
    run(*args, f"output_dir={tmp_path / 'again'}", "dataloader_num_workers=2")
    assert digest(tmp_path / "again") == digest(tmp_path / "run")
    assert report(tmp_path / "again")["data"] == figures["data"]
