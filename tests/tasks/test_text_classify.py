"""`task: classify` with texts: rows, tokens, classes, metrics, saved models, and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from merged_models import write_merged
from raised import raises_error
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.kinds.label import LabelConverter
from paceline.data.sources.rows import MalformedRow, Unsupported
from paceline.inference.generate import generate
from paceline.tasks import load_task
from paceline.tasks.base import Task
from paceline.tasks.preview import as_text, preview


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_config(dataset: str, **keys: Any) -> Config:
    values = {"model": "builtin:qwen2-micro", "task": "classify", "dataset": dataset, **keys}
    return Config.model_validate(values)


def prepare_task(dataset: str, **keys: Any) -> Task:
    task = load_task(make_config(dataset, **keys))
    task.check()
    task.prepared = task.prepare()
    return task


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A BERT with random weights and a WordPiece tokenizer."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    folder = tmp_path / "bert"
    folder.mkdir()
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "it",
        "rains",
        "today",
        "the",
        "sun",
        "shines",
        "again",
        "and",
        "##s",
        "we",
        "go",
    ]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(tokens), encoding="utf-8")
    BertTokenizer(vocab=str(vocabulary)).save_pretrained(folder)
    settings = BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    BertForMaskedLM(settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("row", "texts", "labels"),
    [
        ({"text": "a", "label": 2}, ("a",), (2,)),
        ({"sentence": "a", "label": "good "}, ("a",), ("good",)),
        ({"premise": "a", "hypothesis": "b", "label": 0.0}, ("a", "b"), (0,)),
        ({"text": "a", "labels": ["x", "y", "x"]}, ("a",), ("x", "y")),
        ({"text": "a", "labels": []}, ("a",), ()),
        ({"messages": [{"role": "user", "content": "a"}], "label": True}, ("a",), (1,)),
    ],
)
def test_rows(row: dict[str, Any], texts: tuple[str, ...], labels: tuple[Any, ...]) -> None:
    sample = LabelConverter("data")(row)
    assert sample.texts == texts
    assert sample.labels == labels
    assert sample.has_list == isinstance(row.get("labels"), list)


def test_unusable_rows() -> None:
    converter = LabelConverter("data", {"text": "review", "label": "stars"})
    assert converter({"review": "a", "stars": 5, "text": "b"}).texts == ("a",)
    for row, reason in (
        ({"review": "a", "stars": None}, "no label"),
        ({"review": "", "stars": 1}, "empty text"),
        ({"review": "a", "stars": -1}, "negative label"),
        ({"other": "a"}, "columns match no format"),
    ):
        with pytest.raises(MalformedRow, match=reason):
            converter(row)
    with pytest.raises(Unsupported, match="regression"):
        converter({"review": "a", "stars": 0.5})


def test_column_is_not_both_mapped_and_ignored() -> None:
    with raises_error(ConfigError, code="conflicting-settings", naming="columns"):
        LabelConverter("data", {"label": "stars"}, ignore_columns=["stars"])


def test_pairs_are_encoded_as_by_transformers(tmp_path: Path, bert: Path) -> None:
    rows = [
        {"sentence1": "it rains today", "sentence2": "the sun shines", "label": "no"},
        {"sentence1": "we go and go and go again", "sentence2": "it rains", "label": "yes"},
        {"sentence1": "the sun", "sentence2": "", "label": "yes"},
    ]
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    task = prepare_task(data, model=str(bert), train_args={"max_length": 9})
    assert task.prepared is not None
    assert task.prepared.counts.as_dict() == {
        "read": 3, "kept": 2, "truncated": 1, "dropped": {"empty text_pair": 1},
    }  # fmt: skip
    dataset = task.build_datasets()[0]
    batch = task.collate([dataset[0], dataset[1]])
    expected = AutoTokenizer.from_pretrained(bert)(
        [row["sentence1"] for row in rows[:2]],
        [row["sentence2"] for row in rows[:2]],
        truncation=True, max_length=9, padding=True, return_tensors="pt",
    )  # fmt: skip
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], expected[name]), name
    assert batch["targets"].tolist() == [0, 1]
    model = task.build_model()
    task.setup(model)
    model.eval()
    logits = model(**expected).logits
    loss = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")
    assert task.loss(model, batch).item() == pytest.approx(loss.item(), rel=1e-6)
    assert task.count(batch) == 2


def test_several_classes_per_text(tmp_path: Path) -> None:
    rows = [
        {"text": "one", "labels": ["a", "c"]},
        {"text": "two and three", "labels": []},
        {"text": "four", "labels": ["b"]},
    ]
    data = write_rows(tmp_path / "many.jsonl", rows)
    task = prepare_task(data)
    dataset = task.build_datasets()[0]
    batch = task.collate([dataset[index] for index in range(3)])
    assert batch["targets"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    model = task.build_model().eval()
    assert model.config.problem_type == "multi_label_classification"
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    reference = model(**inputs, labels=batch["targets"]).loss  # the mean over texts and classes
    assert task.loss(model, batch).item() / 3 == pytest.approx(reference.item(), rel=1e-5)
    predictions = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1]])
    scores = task.metrics(
        {"predictions": predictions.reshape(-1), "targets": batch["targets"].reshape(-1)}
    )
    assert scores == {"f1": pytest.approx((1 + 1 + 0) / 3), "f1_micro": pytest.approx(4 / 6)}


def test_metrics_and_classes_of_a_saved_model(tmp_path: Path) -> None:
    rows = [
        {"text": text, "label": label} for text, label in zip("abcd", (0, 1, 2, 1), strict=True)
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    task = prepare_task(data, classify={"labels": ["bad", "fair", "good"]})
    gathered = {"predictions": torch.tensor([0, 1, 1, 1]), "targets": torch.tensor([0, 1, 2, 1])}
    assert task.metrics(gathered) == {"f1": pytest.approx((1 + 0.8 + 0) / 3)}
    model = task.build_model().eval()
    (tmp_path / "model").mkdir()
    task.save_model(model, tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert loaded.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    # Data with the model's names uses its order and its head.
    named = write_rows(
        tmp_path / "named.jsonl",
        [{"text": "a", "label": "good"}, {"text": "b", "label": "bad"}],
    )
    again = prepare_task(named, model=str(tmp_path / "model"))
    assert [int(row["classes"][0]) for row in again.build_datasets()[0]] == [2, 0]
    torch.testing.assert_close(again.build_model().eval()(ids).logits, model(ids).logits)
    with raises_error(ConfigError, code="not-a-language-model"):
        generate(tmp_path, "hello")
    assert "label good" in as_text(preview(make_config(named), rows=1))


def test_adapters_are_exported_with_the_head(tmp_path: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in (("a", "x"), ("b", "y"))]
    task = prepare_task(
        write_rows(tmp_path / "rows.jsonl", rows), lora={"enable": True, "dropout": 0}
    )
    model = task.build_model().eval()
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert any("score" in name for name in trained)
    assert not any("embed" in name for name in trained)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in trained:
                value.add_(torch.linspace(-0.1, 0.1, value.numel()).view_as(value))
    (tmp_path / "run" / "model").mkdir(parents=True)
    task.save_model(model, tmp_path / "run" / "model")
    merged = AutoModelForSequenceClassification.from_pretrained(write_merged(tmp_path / "run"))
    assert merged.config.id2label == {0: "x", 1: "y"}
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "keys", "error"),
    [
        ([1, 1], {"classify": {"labels": ["only"]}}, ("unknown-label", "")),
        (["x", "x"], {}, ("single-label", "")),
        ([0, 10**9], {}, ("invalid-label", "")),
        ([0, 1], {"train_args": {"packing": True}}, ("packing-with-task", "train_args.packing")),
    ],
)
def test_refused(
    tmp_path: Path, labels: list[Any], keys: dict[str, Any], error: tuple[str, str]
) -> None:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        prepare_task(write_rows(tmp_path / "rows.jsonl", rows), **keys)


def test_built_in_texts_have_four_classes() -> None:
    task = prepare_task("builtin:python-kinds#200", train_args={"max_length": 32})
    classes = np.concatenate([row["classes"] for row in task.build_datasets()[0]])
    assert set(classes.tolist()) <= {0, 1, 2, 3}
    assert task.prepared is not None
    assert task.prepared.handle.classes == ["class", "function", "method", "module"]
