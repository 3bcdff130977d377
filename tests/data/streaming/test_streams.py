"""Packed and mixed streams: every sample once per epoch, in proportion to the weights, and the same
micro-batches on any number of ranks and after resuming."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_tokens import MODEL, prepare, save, train_set
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir
from paceline.data.collate import collate_packed
from paceline.data.counts import StreamCounts
from paceline.data.loader import MicroBatch, train_steps
from paceline.data.loader_process import LoaderOptions
from paceline.data.streaming import build
from paceline.data.streaming.prepare import PreparedStream, prepare_stream
from paceline.models.builtin import resolve_model

ROWS = [{"prompt": f"{number}: ", "completion": "word " * (1 + number % 9)} for number in range(60)]
STRATEGIES = ["bfd", "wrapped"]
SOAK = pytest.mark.soak
#: Strategy of packing and suffix of the file; a few of them are tested quickly.
CASES = [
    ("bfd", ""),
    *(
        pytest.param(*case, marks=SOAK)
        for case in [("bfd", ".gz"), ("wrapped", ""), ("wrapped", ".gz")]
    ),
]


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_WINDOW_TOKENS", 16)


def stream(dataset: Any, task: Any = "sft", **settings: Any) -> PreparedStream:
    args = {"max_steps": 99, "max_length": 32, **settings.pop("train_args", {})}
    config = Config(
        model=MODEL, dataset=dataset, streaming=True, task=task, train_args=args, **settings
    )
    return prepare_stream(config, task, resolve_model)


def load(prepared: PreparedStream, first: int = 0, last: int = 12, **settings: Any) -> list[Any]:
    options = {"rank": 0, "world_size": 1, "accumulation": 2, **settings}
    workers = LoaderOptions(
        num_workers=options.pop("workers", 0), start_method=options.pop("start_method", "fork")
    )
    return list(
        train_steps(
            prepared.dataset, prepared.dataset.order(4), collate_packed,
            first_step=first, last_step=last, options=workers, **options,
        )
    )  # fmt: skip


def as_values(batches: list[MicroBatch]) -> list[Any]:
    return [(batch.data["input_ids"][0].tolist(), batch.samples, batch.counts) for batch in batches]


def total_counts(steps: list[list[MicroBatch]]) -> StreamCounts:
    total = StreamCounts()
    for batch in [batch for step in steps for batch in step]:
        assert batch.counts is not None
        total.add(batch.counts)
    return total


def texts_of(prepared: PreparedStream, numbers: range) -> Counter[tuple[int, ...]]:
    samples, _ = prepared.dataset.read([(0, number) for number in numbers])
    return Counter(tuple(sample["input_ids"].tolist()) for sample in samples)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_stream_has_each_sample_once_per_epoch(strategy: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", [*ROWS, *ROWS[:3]])  # 63 rows: 4 windows
    args = {"packing_strategy": strategy}
    dataset = stream(path, train_args=args).dataset
    counts, number = StreamCounts(), 0
    tokens: list[int] = []
    while True:
        samples, read = dataset.read([(0, number)])
        if read.anchors[0][0] > 3:  # the next epoch
            break
        counts.add(read)
        number += 1
        assert 0 < sum(len(sample["input_ids"]) for sample in samples) <= 32
        tokens += [token for sample in samples for token in sample["input_ids"].tolist()]
    ahead = prepare(path, train_args={"max_length": 32, **args})
    expected = train_set(ahead)
    assert Counter(tokens) == Counter(
        token for index in range(63) for token in expected[index]["input_ids"].tolist()
    )
    assert (counts.read, counts.kept, counts.samples) == (63, 63, 63)
    assert counts.tokens == ahead.train_tokens
    assert counts.label_tokens == (ahead.label_tokens if strategy == "bfd" else counts.label_tokens)


@pytest.mark.parametrize(("strategy", "suffix"), CASES)
def test_packed_rows_do_not_depend_on_ranks_workers_or_resuming(
    strategy: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    text = "".join(json.dumps(row) + "\n" for row in [*ROWS, {"foo": 1}]).encode()
    path.write_bytes(gzip.compress(text) if suffix else text)
    args = {"packing_strategy": strategy, "shuffle_buffer_size": 8}
    prepared = stream(str(path), train_args=args)
    expected = load(prepared)
    flat = [as_values(step) for step in expected]
    by_rank = [
        load(stream(str(path), train_args=args), world_size=2, rank=rank, accumulation=1)
        for rank in range(2)
    ]
    assert [as_values([*first, *second]) for first, second in zip(*by_rank, strict=True)] == flat
    anchors = total_counts(expected[:7]).anchors
    assert anchors[0][0] > 0
    # Another machine has no windows, and those before the checkpoint are not tokenized again.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    resumed = stream(str(path), train_args=args)
    resumed.dataset.seek(anchors)
    assert [as_values(step) for step in load(resumed, first=7, workers=2)] == flat[7:]
    (folder,) = (cache_dir() / "windows").iterdir()
    assert not (folder / "0").exists()
    # Without the place, the windows are tokenized again from the start.
    assert [as_values(step) for step in load(stream(str(path), train_args=args), first=7)] == flat[
        7:
    ]


def test_streamed_documents_are_cut_into_samples(tmp_path: Path) -> None:
    rows = [{"text": f"{number} " + "long text " * number} for number in range(32)]
    path = save(tmp_path / "a.jsonl", rows)
    ahead = train_set(prepare(path, task="pretrain", train_args={"max_length": 32}))
    expected = Counter(tuple(ahead[index]["input_ids"].tolist()) for index in range(len(ahead)))
    assert len(ahead) > 32
    assert texts_of(stream(path, "pretrain"), range(len(ahead))) == expected
    warning = " ".join(
        text for _, text in stream(path, "pretrain", train_args={"max_steps": None}).notices
    )
    assert "documents that were checked are longer than max_length 32" in warning


def test_plain_text_is_streamed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.streaming.tables._DOCUMENT_BYTES", 100)
    lines = [f"Line {number} has ü and some words.\n" for number in range(40)]
    (tmp_path / "a.txt").write_text("".join(lines), encoding="utf-8")
    prepared = stream(
        str(tmp_path / "a.txt"),
        "pretrain",
        train_args={"packing_strategy": "wrapped", "shuffle": False},
    )
    rows = prepared.dataset.streams[0].rows  # type: ignore[union-attr]
    pieces = [rows.row(number)[1][1]["\0document"] for number in range(rows.num_rows)]
    assert "".join(pieces) == "".join(lines)
    assert len(pieces) > 10


def sources(tmp_path: Path, *, suffix: str = "", weights: bool = True) -> list[dict[str, Any]]:
    result = []
    for name, number, weight in (("a", 20, 0.6), ("b", 40, {0: 0.4, 50: 0.1})):
        path = tmp_path / f"{name}.jsonl{suffix}"
        rows = [
            {"prompt": f"{name}{row}", "completion": "word " * (1 + row % 5)}
            for row in range(number)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if suffix else text)
        result.append({"path": str(path)} | ({"weight": weight} if weights else {}))
    return result


@pytest.mark.parametrize(
    ("strategy", "suffix"),
    [("micro_batch", ""), pytest.param("micro_batch", ".gz", marks=SOAK), *CASES],
)
def test_mixed_streams_follow_weights_and_resume(
    strategy: str, suffix: str, tmp_path: Path
) -> None:
    settings: Any = {
        "mixing": "weights",
        "train_args": {"packing_strategy": strategy, "shuffle_buffer_size": 8},
    }
    data = sources(tmp_path, suffix=suffix)
    prepared = stream(data, **settings)
    steps = load(prepared, last=100)
    flat = [as_values(step) for step in steps]
    order = prepared.dataset.order(4)
    numbers = [
        np.bincount(order.global_batch(step)[:, 1] >> 44, minlength=2) for step in range(1000)
    ]
    assert sum(numbers[50:])[0] / 3800 == pytest.approx(0.6 / 0.7, abs=0.02)
    counts = total_counts(steps)
    assert [counts.sources[number].name for number in range(2)] == [row["path"] for row in data]
    assert sum(source.tokens for source in counts.sources.values()) == counts.tokens
    if strategy == "micro_batch":
        assert [counts.sources[number].read for number in range(2)] == sum(numbers[:100]).tolist()
    resumed = stream(data, **settings)
    resumed.dataset.seek(total_counts(steps[:60]).anchors)
    assert [as_values(step) for step in load(resumed, first=60, last=100, workers=1)] == flat[60:]
    again = load(resumed, first=60, last=100, workers=1, start_method="forkserver")
    assert [as_values(step) for step in again] == flat[60:]


def test_mixture_of_streams_has_the_epoch_of_its_strategy(tmp_path: Path) -> None:
    data = sources(tmp_path, weights=False)
    every_row = "all_exhausted_without_replacement"
    prepared = stream(data, mixing="temperature", stopping_strategy=every_row)
    order = prepared.dataset.order(4)
    keys = np.concatenate([order.global_batch(step)[:, 1] for step in range(15)])
    assert len(set(keys.tolist())) == 60
    assert order.epochs(15) == 1
    samples, counts = prepared.dataset.read([(0, int(key)) for key in keys])
    assert len({sample["input_ids"].tobytes() for sample in samples}) == counts.kept == 60
    compressed = sources(tmp_path, suffix=".gz", weights=False)
    with raises_error(ConfigError, code="temperature-with-streaming", naming="mixing"):
        stream(compressed, mixing="temperature")
    with raises_error(ConfigError, code="stopping-strategy-with-streaming", naming=every_row):
        stream(compressed, mixing="weights", stopping_strategy=every_row)


def test_moved_sources_are_counted_by_their_new_paths(tmp_path: Path) -> None:
    """The windows of packed rows are stored by the content of the files."""
    for name in ("before", "after"):
        folder = tmp_path / name
        folder.mkdir()
        files = sources(folder, weights=False)
        steps = load(stream(files, train_args={"packing_strategy": "bfd"}))
        counts = total_counts(steps).sources.values()
        assert [source.name for source in counts] == [file["path"] for file in files]
