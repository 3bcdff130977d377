"""Runs that stream their data: exact resume, the same losses on other numbers of ranks, counts."""

import gzip
import shutil
from pathlib import Path

import pytest
from commands import MICRO, digest, events, losses, report, run
from prepared_tokens import CHATS, PAIRS, save

from paceline.checkpoint import store

pytestmark = pytest.mark.slow

BAD = [{"prompt": "no answer", "completion": ""}, {"foo": 1}]
ARGS = ("streaming=true", "train_args.learning_rate=1e-3", "train_args.save_steps=3")


def stream_args(folder: Path, *args: str, suffix: str = "") -> tuple[str, ...]:
    path = folder / f"rows.jsonl{suffix}"
    if not path.exists():
        save(path, [*PAIRS * 3, *BAD, *CHATS * 3])
    if suffix:
        path.write_bytes(gzip.compress(path.read_bytes()))
    return (f"dataset={path}", *ARGS, *args)


def train(folder: Path, *args: str) -> None:
    settings = [setting for setting in MICRO if not setting.startswith("dataset=")]
    run(*settings, f"output_dir={folder}", *args)


@pytest.mark.soak
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_resumed_stream_has_digest_and_counts_of_undisturbed_run(
    suffix: str, tmp_path: Path
) -> None:
    args = stream_args(tmp_path, "parallel.mode=single", "train_args.max_steps=24", suffix=suffix)
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    train(full, *args)
    shutil.copytree(full, resumed)
    for name in ("report.json", "model"):
        path = resumed / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for checkpoint in store.committed(resumed / "checkpoints"):
        if checkpoint.name != "step-00000015":
            shutil.rmtree(checkpoint)
    train(resumed, *args, "train_args.dataloader_num_workers=2", "train_args.save_total_limit=9")
    assert digest(resumed) == digest(full)
    figures = report(resumed)
    data = figures["data"]
    assert data == report(full)["data"]
    assert data["read"] == data["kept"] + sum(data["dropped"].values())
    assert figures["samples_seen"] == data["kept"]
    assert figures["train_tokens"] == data["tokens"]
    assert events(resumed, "data")[-1]["data"] == data


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_other_number_of_ranks_gives_same_losses(mode: str, tmp_path: Path) -> None:
    args = stream_args(tmp_path, "train_args.lr_scheduler_type=constant")
    single = ("parallel.mode=single", "train_args.gradient_accumulation_steps=2")
    train(tmp_path / "single", *args, *single, "train_args.max_steps=9")
    train(tmp_path / "chain", *args, *single, "train_args.max_steps=3")
    several = (f"parallel.mode={mode}", "parallel.num_gpus=2", "train_args.max_steps=9")
    train(tmp_path / "chain", *args, *several, "--allow-config-change")
    assert losses(tmp_path / "chain")[-9:] == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    assert report(tmp_path / "chain")["data"] == report(tmp_path / "single")["data"]
