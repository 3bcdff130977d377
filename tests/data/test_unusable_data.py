"""Errors for unusable data, and the validation split."""

from pathlib import Path

import pytest
from prepared_tokens import CHATS, PAIRS, expect_error, notice_text, prepare, save, train_set
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import split_indices
from paceline.data.text.token_dataset import TokenDataset


def test_error_for_columns_that_match_no_format(tmp_path: Path) -> None:
    message = expect_error(save(tmp_path / "a.jsonl", [{"headline": "x", "body": "y"}]))
    assert "(headline, body) match no format" in message
    assert "prompt_completion: prompt, completion" in message
    assert "columns: {prompt: YOURS" in message


def test_error_for_format_that_does_not_match_columns(tmp_path: Path) -> None:
    message = expect_error(save(tmp_path / "a.jsonl", PAIRS), format="alpaca")
    assert "(prompt, completion) do not match the format `alpaca`" in message
    assert "set `format: prompt_completion`" in message


def test_error_for_dataset_without_usable_rows(tmp_path: Path) -> None:
    message = expect_error(save(tmp_path / "a.jsonl", [{"prompt": "q", "completion": ""}] * 3))
    assert "no row of" in message
    assert "empty answer: 3 (first: line 1 of" in message


def test_error_for_empty_dataset(tmp_path: Path) -> None:
    for name, text in (
        ("a.jsonl", ""),
        ("b.json", "[]"),
        ("c.csv", "prompt,completion\n"),
        ("d.txt", ""),
    ):
        (tmp_path / name).write_text(text)
        assert "has no rows" in expect_error(str(tmp_path / name))


def test_error_for_missing_chat_template(tmp_path: Path, bare_tokenizer: str) -> None:
    for row in (CHATS[0], {"instruction": "do", "output": "done"}):
        message = expect_error(save(tmp_path / "a.jsonl", [row]), tokenizer=bare_tokenizer)
        assert message.startswith("no chat template")
        assert "chat_template: chatml" in message
        assert "task: pretrain" in message
    # The suggested fix works.
    prepare(save(tmp_path / "b.jsonl", CHATS), "pretrain", tokenizer=bare_tokenizer)


def test_error_if_every_sample_is_too_long(tmp_path: Path) -> None:
    data = save(
        tmp_path / "a.jsonl",
        [{"prompt": "word " * 100, "completion": "a"}, {"prompt": "word " * 40, "completion": "a"}],
    )
    for strategy in ("drop", "truncate"):
        message = expect_error(data, train_args={"max_length": 8, "truncation_strategy": strategy})
        shortest = prepare(data).train_tokens - max(train_set(prepare(data)).lengths)
        assert f"the shortest has {shortest} tokens, train_args.max_length is 8" in message


def test_rows_rejected_by_chat_template_are_dropped(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{"
        " messages[-1].content }}"
    )
    rows = [*PAIRS, {"messages": [{"role": "system", "content": "be"}, *CHATS[0]["messages"]]}]
    tokens = prepare(save(tmp_path / "a.jsonl", rows), chat_template=str(template))
    assert tokens.counts.dropped == {"rejected by the chat template": 1}
    assert "no end-of-turn token" in notice_text(tokens)
    assert "Error of the chat template: no system here" in expect_error(
        save(tmp_path / "b.jsonl", rows[-1:]), chat_template=str(template)
    )
    assert "cannot be read" in expect_error(
        save(tmp_path / "b.jsonl", rows), chat_template=str(tmp_path / "none.jinja")
    )


def test_error_for_folder_without_tokenizer(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", PAIRS)
    assert "no tokenizer in" in expect_error(data, model=str(tmp_path))
    assert "does not exist" in expect_error(data, model=str(tmp_path / "none"))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "cannot be loaded" in expect_error(data, model=str(tmp_path))


def test_split_depends_only_on_seed(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", CHATS)
    first = prepare(data, split_dataset_ratio=0.25)
    assert (first.num_train, first.num_eval) == (9, 3)
    assert sorted([*first.train_indices.tolist(), *first.eval_indices.tolist()]) == list(range(12))
    same_seed = prepare(
        data,
        split_dataset_ratio=0.25,
        train_args={"per_device_train_batch_size": 1},
        lora={"enable": True},
    )
    assert same_seed.eval_indices.tolist() == first.eval_indices.tolist()
    other_seed = prepare(data, split_dataset_ratio=0.25, train_args={"seed": 1})
    assert other_seed.eval_indices.tolist() != first.eval_indices.tolist()
    assert first.train_folder == other_seed.train_folder  # same tokens
    assert first.train_tokens == int(train_set(first).lengths.sum())
    assert first.label_tokens == int(train_set(first).label_counts.sum())
    assert prepare(data, split_dataset_ratio=0.001).num_eval == 1
    assert prepare(data, split_dataset_ratio=0.999).num_train == 1
    assert len(split_indices(1000, 0.05, 7)[1]) == 50
    assert [len(part) for part in split_indices(1000, 200, 7)] == [800, 200]
    with raises_error(ConfigError, code="split-too-large"):
        split_indices(1000, 1000, 7)


@pytest.mark.parametrize(
    ("rows", "ratio", "held_out", "level", "texts"),
    [
        (1, 0.05, 0, "warning", ("no validation", "1 sample ")),
        (2, 0.05, 1, "warning", ("1 of 2 samples", "50%", "at least one")),
        (8, 0.05, 1, "warning", ("1 of 8 samples", "12%", "0.05")),
        (12, 0.05, 1, "info", ("1 of 12 samples", "8.3%", "rounded up")),
        (12, 0.25, 3, "info", ("3 of 12 samples held out",)),
    ],
)
def test_rounded_split_ratio_is_reported(
    tmp_path: Path, rows: int, ratio: float, held_out: int, level: str, texts: tuple[str, ...]
) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", CHATS[:rows]), split_dataset_ratio=ratio)
    assert (tokens.num_train, tokens.num_eval) == (rows - held_out, held_out)
    assert (tokens.eval_folder is None) == (held_out == 0)
    split_notices = [notice for notice in tokens.notices if "validation" in notice[1]]
    assert len(split_notices) == 1
    assert split_notices[0][0] == level
    assert all(text in split_notices[0][1] for text in texts), split_notices


def test_val_dataset_is_tokenized_separately(tmp_path: Path) -> None:
    tokens = prepare(
        save(tmp_path / "a.jsonl", CHATS),
        val_dataset=save(tmp_path / "b.jsonl", [*PAIRS[:4], {"foo": 1}]),
    )
    assert (tokens.num_train, tokens.num_eval) == (12, 4)
    assert tokens.eval_counts is not None
    assert tokens.eval_counts.dropped == {"columns match no format": 1}
    assert tokens.counts.read == 12
    assert len(TokenDataset(tokens.eval_folder, tokens.eval_indices)) == 4
