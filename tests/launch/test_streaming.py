"""Runs that stream their data, plain, packed and mixed: exact resume."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from commands import MICRO, digest, events, report, run
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
    assert [row["tokens"] for row in figures["sources"]] == [
        row["tokens"] for row in data["sources"]
    ]
    assert events(folder, "data")[-1]["data"] == data


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_stream_has_digest_and_counts_of_undisturbed_run(kind: str, tmp_path: Path) -> None:
    args = (*stream_args(tmp_path, kind), "gradient_accumulation_steps=4", "parallel.mode=single")
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
