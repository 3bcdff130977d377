"""A preview shows the same tokens, labels and truncation as training uses."""

import base64
import io
import json

import numpy as np
import pytest
from commands import run
from PIL import Image
from raised import raises_error

from paceline.config.load import load_config
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.images import _digits_table
from paceline.data.text.token_dataset import TokenDataset
from paceline.models.builtin import resolve_model
from paceline.tasks import load_task
from paceline.tasks.preview import MAX_TOKENS, as_text, preview


def config_of(dataset: object, **settings: object):
    return load_config(
        None, {"model": "builtin:qwen2-micro", "dataset": str(dataset), **settings}
    ).config


def write_rows(folder, *rows: dict) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("length", [32, 64, 4096])
def test_preview_matches_tokenized_training_data(length):
    config = config_of("builtin:python-docs#12", **{"train_args.max_length": length})
    rows = [row for row in preview(config, rows=12)["rows"] if row["reason"] is None]
    tokens = prepare_tokens(config, "sft", resolve_model)
    dataset = TokenDataset(tokens.train_folder)
    assert [row["num_tokens"] - row["cut_tokens"] for row in rows] == dataset.lengths.tolist()
    assert [row["label_tokens"] for row in rows] == dataset.label_counts.tolist()


def test_label_tokens_are_answer_and_end_of_turn(tmp_path):
    config = config_of(write_rows(tmp_path, {"messages": [
        {"role": "user", "content": "What is a pace line?"},
        {"role": "assistant", "content": "Riders in a row."},
    ]}))  # fmt: skip
    (row,) = preview(config)["rows"]
    assert row["format"] == "messages"
    labels = [segment["text"] for segment in row["segments"] if segment["label"]]
    assert labels == ["Riders in a row.<|im_end|>"]
    assert "What is a pace line?" in "".join(
        segment["text"] for segment in row["segments"] if not segment["label"]
    )
    assert "".join(segment["text"] for segment in row["segments"]).startswith("<|im_start|>user")


def test_truncated_tokens_are_marked(tmp_path):
    path = write_rows(tmp_path, {"prompt": "Say it.", "completion": "word " * 50})
    (row,) = preview(config_of(path, **{"train_args.max_length": 32}))["rows"]
    assert row["cut_tokens"] == row["num_tokens"] - 32 > 0
    assert row["segments"][-1]["cut"]
    (row,) = preview(
        config_of(path, **{"train_args.max_length": 32, "train_args.truncation_strategy": "drop"})
    )["rows"]
    assert (row["reason"], row["label_tokens"], row["cut_tokens"]) == (
        "longer than max_length",
        0,
        row["num_tokens"],
    )


def test_dropped_row_shows_reason(tmp_path):
    path = write_rows(
        tmp_path,
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": ""},
        {"other": 1},
    )
    rows = preview(config_of(path))["rows"]
    assert [row["reason"] for row in rows] == [None, "empty answer", "columns match no format"]
    assert [row["place"].split(" of ")[0] for row in rows] == ["line 1", "line 2", "line 3"]


def test_document_is_split_without_losing_tokens(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Every sentence of this book is read. " * 400, encoding="utf-8")
    (row,) = preview(config_of(path, task="pretrain", **{"train_args.max_length": 100}))["rows"]
    assert row["parts"] == -(-row["num_tokens"] // 100)
    assert row["cut_tokens"] == 0
    assert row["hidden_tokens"] == max(0, row["num_tokens"] - MAX_TOKENS)


def test_rejects_custom_task_and_row_count_out_of_range():
    with raises_error(ConfigError, code="preview-with-task", naming="task"):
        preview(config_of("rows.csv", task="./examples/my_task.py:Task"))
    with raises_error(ConfigError, code="rows-out-of-range"):
        preview(config_of("builtin:python-docs"), rows=0)


PAIRS = [
    {"prompt": "Why?", "chosen": "Because it is so.", "rejected": "No."},
    {"prompt": "Who?", "chosen": "Me.", "rejected": "You. " * 40},
]


@pytest.mark.parametrize("task", ["dpo", "orpo", "simpo", "reward"])
def test_pairs_show_both_answers(tmp_path, task):
    path = write_rows(tmp_path, *PAIRS)
    settings = config_of(path, task=task, **{"train_args.max_length": 64})
    result = preview(settings)
    rows = result["rows"]
    assert [row["answer"] for row in rows] == ["chosen", "rejected"] * 2
    assert [row["place"] for row in rows] == [f"line {line} of {path}" for line in (1, 1, 2, 2)]
    for row, pair in zip(rows, [PAIRS[0], PAIRS[0], PAIRS[1], PAIRS[1]], strict=True):
        labels = "".join(part["text"] for part in row["segments"] if part["label"])
        assert labels.startswith(pair[row["answer"]][:40])
        assert pair["prompt"] not in labels
    assert rows[3]["cut_tokens"] > 0
    kind = "reward" if task == "reward" else "pairs"
    prepared = prepare_tokens(settings, kind, resolve_model)
    trained = sum(row["num_tokens"] - row["cut_tokens"] for row in rows)
    assert trained == prepared.train_tokens
    text = as_text(result)
    assert "--- 2: line 2" in text
    assert "--- 3:" not in text
    assert ", rejected)" in text
    dropping = config_of(
        path,
        task=task,
        **{"train_args.max_length": 64, "train_args.truncation_strategy": "drop"},
    )
    assert [row["reason"] for row in preview(dropping)["rows"]] == [
        None,
        None,
        "longer than max_length",
        "longer than max_length",
    ]


def test_answers_of_kto_show_their_marks(tmp_path):
    rows = [{"prompt": "Why?", "completion": "So.", "label": label} for label in (True, False)]
    shown = preview(config_of(write_rows(tmp_path, *rows), task="kto"))["rows"]
    assert [row["answer"] for row in shown] == ["desirable", "undesirable"]
    assert all(row["label_tokens"] > 0 for row in shown)


def test_labels_minus_one_and_one_are_classes_as_in_training(tmp_path):
    path = tmp_path / "signed.jsonl"
    path.write_text('{"text": "a", "label": -1}\n{"text": "b", "label": 1}\n')
    rows = preview(config_of(path, task="classify"))["rows"]
    assert [row["label"] for row in rows] == ["-1", "1"]
    path.write_text('{"sentence": "a", "class": -1.0}\n' * 2)
    rows = preview(config_of(path, task="classify"))["rows"]
    assert [row["label"] for row in rows] == ["-1", "-1"]
    path.write_text('{"text": "a", "label": -1}\n{"text": "b", "label": 2}\n')
    rows = preview(config_of(path, task="classify"))["rows"]
    assert "the row is dropped: negative label" in rows[0]["label"]


def test_labeled_texts_show_dropped_rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\ngood,a\nbad, and worse,b\n")
    rows = preview(config_of(path, task="classify"))["rows"]
    assert (rows[0]["label"], rows[0]["fields"]) == ("a", [{"name": "text", "value": "good"}])
    assert "more fields than the header" in rows[1]["label"]


def test_preview_command_prints_json():
    args = ("preview", "model=builtin:qwen2-micro", "--rows", "2")
    process = run(*args, "dataset=builtin:python-docs", "--json", verb="data")
    output = json.loads(process.stdout)
    assert len(output["rows"]) == 2
    assert np.all([row["num_tokens"] > 0 for row in output["rows"]])
    assert run(*args, "dataset=nothing.jsonl", verb="data", expect=2).stdout == ""


def test_image_preview_shows_model_input(tmp_path):
    config = config_of("builtin:digits", model="builtin:small-cnn", task="classify")
    rows = preview(config, rows=6)["rows"]
    assert len(rows) == 6
    assert len({row["label"] for row in rows}) > 1
    pixels, digits = _digits_table()
    for row in rows:
        number = int(row["place"].split()[1])
        assert row["label"] == str(digits[number])
        assert row["shape"] == [1, 8, 8]
        image = Image.open(io.BytesIO(base64.b64decode(row["image"].partition(",")[2])))
        assert np.array_equal(np.asarray(image), (pixels[number][0] * 255).round())
    for name, color in (("cat", (200, 0, 0)), ("dog", (0, 0, 200))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (40, 20), color).save(tmp_path / name / "image.png")
    rows = preview(
        config_of(
            tmp_path, model="builtin:small-cnn", task="classify", **{"classify.image_size": 16}
        )
    )["rows"]
    assert [(row["place"], row["label"], row["shape"]) for row in rows] == [
        ("cat/image.png", "cat", [3, 16, 16]),
        ("dog/image.png", "dog", [3, 16, 16]),
    ]


def test_click_log_preview_matches_training_data():
    config = config_of("builtin:clicks#2000", model="builtin:dlrm", task="recommend")
    rows = preview(config, rows=3)["rows"]
    task = load_task(config)
    task.prepared = task.prepare()
    log = task.build_datasets()[0]
    batch = task.collate([log[0], log[1], log[2]])
    assert [float(row["label"]) for row in rows] == batch["label"].tolist()
    first_row_fields = {field["name"]: field["value"] for field in rows[0]["fields"]}
    assert first_row_fields[log.names[0]] == f"{int(batch['ids'][0][0])} of {log.tables[0]:,}"
    assert [float(field["value"]) for field in rows[0]["fields"][:4]] == pytest.approx(
        batch["dense"][0].tolist(), rel=1e-3
    )
