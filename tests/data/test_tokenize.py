"""Tokenization from a config to files: loss masks, text, and row counts."""

from pathlib import Path

import numpy as np
import pytest
from prepared_tokens import CHATS, PAIRS, loss_segments, notice_text, prepare, save, train_set

from paceline.data.text.tokenizer import load_tokenizer


def test_loss_covers_only_answers_and_end_of_turn(tmp_path: Path) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", CHATS))
    assert loss_segments(tokens, 3) == [
        (False, "<|im_start|>user\nWhat is 3 + 3?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "It is 6: süß.<|im_end|>"),
        (False, "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Nothing, after 3.<|im_end|>"),
        (False, "\n"),
    ]


def test_system_message_and_template_file(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{%"
        " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    )
    tokens = prepare(save(tmp_path / "a.jsonl", PAIRS), system="Be.", chat_template=str(template))
    # This template has no generation marks, so the answers are located from prefixes. The space
    # before the answer belongs to its first token.
    loss = "".join(text for carries_loss, text in loss_segments(tokens) if carries_loss)
    assert loss.strip() == "answer number 0<|im_end|>"
    assert loss_segments(tokens)[0][1].startswith(
        "<|im_start|>system: Be.<|im_end|><|im_start|>user: Q0: <|im_end|>"
    )


def test_prompt_and_completion_without_a_template(tmp_path: Path, bare_tokenizer: str) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", PAIRS), tokenizer=bare_tokenizer)
    # The space between them and the answer are one token, which carries loss.
    assert loss_segments(tokens, 5) == [(False, "Q5:"), (True, " answer number 5<|im_end|>")]
    assert "are concatenated" in notice_text(tokens)


def test_train_on_inputs_puts_loss_on_all_tokens(tmp_path: Path, bare_tokenizer: str) -> None:
    data = save(tmp_path / "a.jsonl", PAIRS)
    for settings in ({}, {"tokenizer": bare_tokenizer}):
        tokens = prepare(data, train_args={"train_on_inputs": True}, **settings)
        assert [carries_loss for carries_loss, _ in loss_segments(tokens)] == [True]
        # The first token is never predicted.
        assert tokens.label_tokens == tokens.train_tokens - tokens.num_train


def test_text_in_sft_carries_loss_on_all_tokens(tmp_path: Path) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", [{"text": "once upon"}]))
    assert loss_segments(tokens) == [(True, "once upon<|im_end|>")]


@pytest.mark.parametrize("answer", ["plain", "ünï — 漢字", "  spaced", "\n\nlines", "🙂🙃"])
def test_mask_is_exact_for_any_script(tmp_path: Path, answer: str) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "漢🙂"},
                {"role": "assistant", "content": answer},
            ]
        }
    ]
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%"
        " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    for settings in ({}, {"chat_template": str(template)}):
        loss = [
            text
            for carries_loss, text in loss_segments(
                prepare(save(tmp_path / "a.jsonl", rows), **settings)
            )
            if carries_loss
        ]
        assert len(loss) == 1
        # Newlines may merge with those of the header.
        assert loss[0].strip("\n") == f"{answer}<|im_end|>".strip("\n")


def test_tokens_and_mask_match_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokens = prepare(save(tmp_path / "a.jsonl", CHATS))
    reference = AutoTokenizer.from_pretrained(tokens.tokenizer_path)
    for index, row in enumerate(CHATS):
        expected = reference.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        sample = train_set(tokens)[index]
        assert sample["input_ids"].tolist() == expected["input_ids"]
        assert sample["labels_mask"].tolist() == [
            bool(flag) for flag in expected["assistant_masks"]
        ]
    assert tokens.pad_token_id == reference.pad_token_id


# -- pretraining
def test_documents_are_split_without_losing_tokens(tmp_path: Path) -> None:
    text = "\n".join(f"Line {n} of a long text." for n in range(200))
    (tmp_path / "a.txt").write_text(text)
    tokens = prepare(str(tmp_path / "a.txt"), "pretrain", {"max_length": 64})
    samples = [train_set(tokens)[index] for index in range(tokens.num_train)]
    assert [len(sample["input_ids"]) for sample in samples[:-1]] == [64] * (tokens.num_train - 1)
    joined = np.concatenate([sample["input_ids"] for sample in samples]).tolist()
    assert load_tokenizer(Path(tokens.tokenizer_path)).decode(joined) == text + "<|im_end|>"
    assert all(sample["labels_mask"].all() for sample in samples)
    assert tokens.counts.as_dict() == {"read": 1, "kept": 1, "truncated": 0, "dropped": {}}
    assert tokens.label_tokens == tokens.train_tokens - tokens.num_train


def test_long_document_is_tokenized_completely(tmp_path: Path) -> None:
    text = "A sentence of the text.\n" * 30_000  # 750,000 characters
    (tmp_path / "a.txt").write_text(text)
    tokens = prepare(str(tmp_path / "a.txt"), "pretrain", {"max_length": 4096})
    ids = np.concatenate(
        [train_set(tokens)[index]["input_ids"] for index in range(tokens.num_train)]
    )
    assert load_tokenizer(Path(tokens.tokenizer_path)).decode(ids.tolist()) == text + "<|im_end|>"


def test_pretraining_on_chats_and_pairs(tmp_path: Path) -> None:
    tokens = prepare(
        [save(tmp_path / "a.jsonl", CHATS[:1]), save(tmp_path / "b.jsonl", PAIRS[:1])], "pretrain"
    )
    assert loss_segments(tokens, 0)[0][1].startswith("<|im_start|>user\nWhat is 0 + 0?")
    assert loss_segments(tokens, 1) == [(True, "Q0: \n\nanswer number 0<|im_end|>")]


# -- row counts
def test_rows_read_equal_rows_kept_plus_dropped(tmp_path: Path) -> None:
    rows = [
        *PAIRS, {"prompt": "q", "completion": ""}, {"prompt": "q", "completion": None}, {"foo": 1},
        "text", 7, {"messages": [{"role": "user", "content": "q"}]},
    ]  # fmt: skip
    tokens = prepare(save(tmp_path / "a.jsonl", rows))
    counts = tokens.counts
    assert counts.read == len(rows) == counts.kept + sum(counts.dropped.values())
    assert counts.kept == tokens.num_train == 12
    assert counts.dropped == {
        "empty answer": 2, "columns match no format": 1, "not an object with columns": 2,
        "no assistant turn": 1,
    }  # fmt: skip
    assert f"first: line 13 of {tmp_path / 'a.jsonl'}" in notice_text(tokens)


def test_counts_of_several_sources_are_added(tmp_path: Path) -> None:
    first = save(tmp_path / "a.jsonl", [*PAIRS, {"foo": 1}])
    second = save(tmp_path / "b.jsonl", [*CHATS, {"foo": 1}, {"foo": 2}])
    tokens = prepare([f"{first}#13", {"path": second, "format": "messages"}])
    assert tokens.counts.read == 27
    assert tokens.counts.kept == 24
    assert tokens.counts.dropped == {
        "columns match no format": 1,
        "columns do not match `messages`": 2,
    }
    assert f"{second}: 14 rows read, 12 kept" in notice_text(tokens)


def test_truncation_keeps_first_tokens(tmp_path: Path, bare_tokenizer: str) -> None:
    rows = [
        {"prompt": "Q: ", "completion": "word " * 50},
        {"prompt": "long " * 50, "completion": "gone"},
        *PAIRS,
    ]
    data = save(tmp_path / "a.jsonl", rows)
    tokens = prepare(data, train_args={"max_length": 16}, tokenizer=bare_tokenizer)
    assert tokens.counts.as_dict() == {
        "read": 14, "kept": 13, "truncated": 1, "dropped": {"no answer left after truncation": 1},
    }  # fmt: skip
    sample = train_set(tokens)[0]
    full = train_set(prepare(data, tokenizer=bare_tokenizer))[0]
    assert sample["input_ids"].tolist() == full["input_ids"][:16].tolist()
    dropped = prepare(
        data, train_args={"max_length": 16, "truncation_strategy": "drop"}, tokenizer=bare_tokenizer
    )
    assert dropped.counts.dropped == {"longer than max_length": 2}
    assert dropped.counts.kept == 12


def test_label_counts_exclude_first_position(tmp_path: Path) -> None:
    data = train_set(prepare(save(tmp_path / "a.jsonl", CHATS)))
    for index in range(len(data)):
        sample = data[index]
        assert data.lengths[index] == len(sample["input_ids"]) == len(sample["labels_mask"])
        assert data.label_counts[index] == sample["labels_mask"][1:].sum() > 0
        assert (sample["input_ids"].dtype, sample["labels_mask"].dtype) == (np.int32, np.bool_)
