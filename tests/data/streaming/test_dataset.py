"""Streamed rows give the samples and counts that tokenizing them ahead gives."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from prepared_tokens import CHATS, MODEL, PAIRS, prepare, save, train_set
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import cache_dir
from paceline.data.collate import collate_packed
from paceline.data.counts import StreamCounts
from paceline.data.loader import MicroBatch, train_steps
from paceline.data.loader_process import LoaderOptions
from paceline.data.streaming.choice import try_stream
from paceline.data.streaming.prepare import PreparedStream, prepare_stream
from paceline.data.streaming.streams import SampleStream
from paceline.data.text.token_dataset import TokenDataset
from paceline.models.builtin import resolve_model

BAD = [{"prompt": "no answer", "completion": ""}, {"foo": 1}]


def config_of(*paths: str, **settings: object) -> Config:
    return Config(model=MODEL, dataset=list(paths), streaming=True, **settings)  # type: ignore[arg-type]


def stream(config: Config, task: str = "sft") -> PreparedStream:
    return prepare_stream(config, task, resolve_model)


def load(
    prepared: PreparedStream,
    config: Config,
    *,
    world: int = 1,
    rank: int = 0,
    accumulation: int = 2,
    first: int = 0,
    last: int = 9,
    workers: int = 0,
    start_method: str = "fork",
) -> list[list[MicroBatch]]:
    steps = train_steps(
        prepared.dataset,
        prepared.dataset.order(4),
        collate_packed,
        rank=rank,
        world_size=world,
        accumulation=accumulation,
        first_step=first,
        last_step=last,
        options=LoaderOptions(num_workers=workers, start_method=start_method),
    )
    return list(steps)


def as_values(batches: list[MicroBatch]) -> list[tuple[list[int], int, object]]:
    return [(batch.data["input_ids"][0].tolist(), batch.samples, batch.counts) for batch in batches]


def test_samples_and_counts_equal_those_of_tokenizing_ahead(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a.jsonl", [*PAIRS, *BAD]), save(tmp_path / "b.jsonl", CHATS)]
    limits = {"max_length": 24}
    ahead = prepare(paths, train_args=limits)
    dataset = stream(config_of(*paths, train_args={**limits, "shuffle": False})).dataset
    samples, counts = dataset.read([(0, index) for index in range(26)])
    expected = train_set(ahead)
    assert len(samples) == len(expected)
    for index, sample in enumerate(samples):
        for key in ("input_ids", "labels_mask"):
            assert np.array_equal(sample[key], expected[index][key])  # type: ignore[literal-required]
    figures = {**counts.as_dict()}
    by_source = figures.pop("sources")
    assert figures == {
        **ahead.counts.as_dict(),
        "samples": ahead.num_train,
        "tokens": ahead.train_tokens,
        "label_tokens": ahead.label_tokens,
    }
    assert [source["tokens"] for source in by_source] == [
        source["tokens"] for source in ahead.source_figures
    ]
    assert "line 13 of" in str(counts.first)


def test_malformed_line_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    surrogate = json.dumps({"prompt": "half of a pair: \ud83d", "completion": "a"})
    nested = "[" * 100_000
    lines = [json.dumps(PAIRS[0]), "{broken", surrogate, nested, json.dumps(PAIRS[1])]
    path.write_text("\n".join(lines))
    samples, counts = stream(config_of(str(path))).dataset.read([(0, row) for row in range(5)])
    assert len(samples) == counts.kept == 2
    assert counts.dropped == {"malformed line": 3}
    assert counts.first == {"malformed line": f"line 2 of {path}"}


def test_micro_batches_do_not_depend_on_ranks_workers_or_resuming(tmp_path: Path) -> None:
    config = config_of(save(tmp_path / "a.jsonl", [*PAIRS, *BAD, *CHATS]))
    prepared = stream(config)
    expected = load(prepared, config)
    flat = [as_values(step) for step in expected]
    assert [as_values(step) for step in load(prepared, config, workers=2)] == flat
    assert [as_values(step) for step in load(prepared, config, first=5, workers=1)] == flat[5:]
    again = load(prepared, config, first=5, workers=1, start_method="forkserver")
    assert [as_values(step) for step in again] == flat[5:]
    by_rank = [load(prepared, config, world=2, rank=rank, accumulation=1) for rank in range(2)]
    assert [as_values([*first, *second]) for first, second in zip(*by_rank, strict=True)] == flat
    total = StreamCounts()
    for batch in [batch for step in expected[:7] for batch in step]:
        assert batch.counts is not None
        total.add(batch.counts)
    assert (total.read, total.kept) == (26, 24)  # one epoch


def test_rows_for_other_training_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    rows = [PAIRS[0]] * 3000
    rows[1240] = pair
    config = config_of(save(path, rows), train_args={"shuffle": False})
    prepared = stream(config)  # checks only some of the rows
    with pytest.raises(RunError, match=r"line 1241 .* preference pairs"):
        load(prepared, config, first=1240 // 4, last=1240 // 4 + 1)
    with raises_error(ConfigError, code="data-of-another-method"):
        stream(config_of(save(path, [pair])))


def try_auto(dataset: object, **settings: object) -> tuple[PreparedStream | None, str]:
    config = Config(model=MODEL, dataset=dataset, **settings)  # type: ignore[arg-type]
    prepared, notices = try_stream(config, "sft", resolve_model)
    return prepared, " ".join(text for _, text in notices)


def test_auto_streams_large_data_that_can_be_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "a.jsonl", PAIRS)
    assert try_auto(path) == (None, "")
    monkeypatch.setattr("paceline.data.streaming.choice.AUTO_BYTES", 100)
    assert try_auto(path)[0] is not None
    assert try_auto(path, streaming=False) == (None, "")
    refused = {
        "`max_steps` is required with `train_args.packing_strategy: bfd`": {
            "train_args": {"packing_strategy": "bfd"}
        },
        "neftune_noise_alpha: 5 is not supported with streaming": {
            "train_args": {"neftune_noise_alpha": 5}
        },
    }
    for reason, settings in refused.items():
        prepared, notice = try_auto(path, **settings)
        assert prepared is None
        assert "streaming: off for 628 B of text (`streaming: auto`)" in notice
        assert reason in notice
        with pytest.raises((ConfigError, ValueError), match=reason):
            stream(config_of(path, **settings))
    compressed = tmp_path / "a.jsonl.gz"
    compressed.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert "`max_steps` is required" in try_auto(str(compressed))[1]
    assert try_auto(str(compressed), train_args={"max_steps": 9})[0] is not None
    (tmp_path / "a.txt").write_text("text " * 99)
    assert "whose documents are cut into samples" in try_auto(str(tmp_path / "a.txt"))[1]


@pytest.mark.parametrize("selection", ["7", "29.2%"])
def test_selected_rows_are_those_of_a_run_without_streaming(selection: str, tmp_path: Path) -> None:
    second = save(tmp_path / "b.jsonl", CHATS * 2)
    paths = [save(tmp_path / "a.jsonl", PAIRS), f"{second}#{selection}"]
    ahead = train_set(prepare(paths))
    dataset = stream(config_of(*paths, train_args={"shuffle": False})).dataset
    assert dataset.streams[0].num_rows == len(ahead) == 19
    samples, _ = dataset.read([(0, index) for index in range(19)])
    for index, sample in enumerate(samples):
        assert np.array_equal(sample["input_ids"], ahead[index]["input_ids"])


def test_held_out_rows_are_those_of_a_run_without_streaming(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a.jsonl", PAIRS), save(tmp_path / "b.jsonl", CHATS)]
    ahead = prepare(paths, split_dataset_ratio=0.25)
    in_order = {"shuffle": False}
    prepared = stream(config_of(*paths, split_dataset_ratio=0.25, train_args=in_order))
    assert prepared.num_eval == ahead.num_eval == 6
    assert ahead.eval_folder is not None
    assert prepared.eval_folder is not None
    held_out = TokenDataset(prepared.eval_folder)
    expected = TokenDataset(ahead.eval_folder, ahead.eval_indices)
    samples, _ = prepared.dataset.read([(0, index) for index in range(18)])
    train = train_set(ahead)
    for index in range(6):
        assert np.array_equal(held_out[index]["input_ids"], expected[index]["input_ids"])
    for index, sample in enumerate(samples):
        assert np.array_equal(sample["input_ids"], train[index]["input_ids"])


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.txt", "text", "missing-max-steps"),
        ("a.jsonl", "\n", "no-rows-in-source"),
        ("a.jsonl", '{"foo": 1}', "unknown-columns"),
    ],
)
def test_unusable_data_is_an_error_before_the_start(
    name: str, text: str, code: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with raises_error(ConfigError, code=code):
        stream(config_of(str(tmp_path / name)))


@pytest.mark.parametrize("is_remote", [False, True])
def test_compressed_and_remote_files_have_one_order(is_remote: bool, tmp_path: Path) -> None:
    """The order is the same with and without known numbers of rows, and after seeking."""
    for number in range(3):
        rows = [{"prompt": f"{number}", "completion": f"{row}"} for row in range(5 + number)]
        text = "\n\n".join(json.dumps(row) for row in rows)
        (tmp_path / f"rows-{number}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    path = f"{'file://' if is_remote else ''}{tmp_path}/rows-*.jsonl.gz"
    config = config_of(path, train_args={"max_steps": 9, "shuffle_buffer_size": 4})
    prepared = stream(config)
    assert [rows.num_rows for rows in prepared.rows] == [None]
    flat = [as_values(step) for step in load(prepared, config)]
    assert [as_values(step) for step in load(stream(config), config, first=6)] == flat[6:]
    shutil.rmtree(cache_dir() / "rows")
    assert [as_values(step) for step in load(stream(config), config, first=6)] == flat[6:]
    assert [as_values(step) for step in load(stream(config), config, workers=2)] == flat
    (samples,) = prepared.dataset.streams
    assert isinstance(samples, SampleStream)
    rows = samples.rows
    epochs = [[str(rows.row(18 * epoch + number)) for number in range(18)] for epoch in range(2)]
    assert len(set(epochs[0])) == 18
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_unknown_number_of_rows_requires_max_steps(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(PAIRS[0]).encode()))
    with raises_error(ConfigError, code="missing-max-steps-for-epochs"):
        stream(config_of(str(path)))
