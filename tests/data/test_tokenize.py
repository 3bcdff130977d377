"""From config to tokens on disk: masks, accounting, cache, split, and what is said where it cannot
be done."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir
from paceline.data.text.prepare import PreparedTokens, prepare_tokens, split_indices
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import builtin_tokenizer, resolve_model

MODEL = "builtin:qwen2-micro"
CHATS = [
    {"messages": [
        {"role": "user", "content": f"What is {n} + {n}?"},
        {"role": "assistant", "content": f"It is {2 * n}: süß."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": f"Nothing, after {n}."},
    ]} for n in range(12)
]  # fmt: skip
PAIRS = [{"prompt": f"Q{n}: ", "completion": f"answer number {n}"} for n in range(12)]


def save(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prepare(
    dataset: Any, task: Any = "sft", train_args: dict[str, Any] | None = None, **more: Any
) -> PreparedTokens:
    return prepare_tokens(
        Config(**{"model": MODEL, "dataset": dataset, "train_args": train_args or {}, **more}),
        task,
        resolve_model,
    )


def train_set(tokens: PreparedTokens) -> TokenDataset:
    return TokenDataset(tokens.train_folder, tokens.train_indices)


def parts(tokens: PreparedTokens, index: int = 0) -> list[tuple[bool, str]]:
    """One sample as runs of (carries loss, text)."""
    tokenizer = load_tokenizer(Path(tokens.tokenizer_path))
    sample = train_set(tokens)[index]
    edges = [0, *(np.flatnonzero(np.diff(sample["labels_mask"])) + 1), len(sample["input_ids"])]
    return [
        (
            bool(sample["labels_mask"][start]),
            tokenizer.decode(sample["input_ids"][start:end].tolist()),
        )
        for start, end in pairwise(edges)
    ]


def said(tokens: PreparedTokens) -> str:
    return "\n".join(text for _, text in tokens.notices)


def fails(*args: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(*args, **more)
    return str(caught.value)


@pytest.fixture
def bare_tokenizer(tmp_path: Path) -> str:
    """The built-in tokenizer without its chat template, in a folder of its own."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((builtin_tokenizer() / name).read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return str(folder)


# -- the mask
def test_loss_on_every_answer_and_its_end_of_turn_alone(tmp_path: Path) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", CHATS))
    assert parts(tokens, 3) == [
        (False, "<|im_start|>user\nWhat is 3 + 3?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "It is 6: süß.<|im_end|>"),
        (False, "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Nothing, after 3.<|im_end|>"),
        (False, "\n"),
    ]


def test_system_message_and_template_file(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{%"
        " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    )
    tokens = prepare(save(tmp_path / "a.jsonl", PAIRS), system="Be.", chat_template=str(template))
    # No mark in this template: found from prefixes. The blank before the answer belongs to the word
    # after it.
    loss = "".join(text for labelled, text in parts(tokens) if labelled)
    assert loss.strip() == "answer number 0<|im_end|>"
    assert parts(tokens)[0][1].startswith(
        "<|im_start|>system: Be.<|im_end|><|im_start|>user: Q0: <|im_end|>"
    )


def test_prompt_and_completion_without_a_template(tmp_path: Path, bare_tokenizer: str) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", PAIRS), tokenizer=bare_tokenizer)
    assert parts(tokens, 5) == [(False, "Q5: "), (True, "answer number 5<|im_end|>")]
    assert "joined as they are" in said(tokens)


def test_train_on_inputs(tmp_path: Path, bare_tokenizer: str) -> None:
    data = save(tmp_path / "a.jsonl", PAIRS)
    for more in ({}, {"tokenizer": bare_tokenizer}):
        tokens = prepare(data, train_args={"train_on_inputs": True}, **more)
        assert [labelled for labelled, _ in parts(tokens)] == [True]
        # the first token is never predicted
        assert tokens.label_tokens == tokens.train_tokens - tokens.num_train


def test_plain_text_in_sft_carries_loss_everywhere(tmp_path: Path) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", [{"text": "once upon"}]))
    assert parts(tokens) == [(True, "once upon<|im_end|>")]


@pytest.mark.parametrize("answer", ["plain", "ünï — 漢字", "  spaced", "\n\nlines", "🙂🙃"])
def test_the_mask_is_exact_for_any_script(tmp_path: Path, answer: str) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "漢🙂"},
                {"role": "assistant", "content": answer},
            ]
        }
    ]
    chatml = tmp_path / "t.jinja"
    chatml.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%"
        " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    for more in ({}, {"chat_template": str(chatml)}):
        loss = [
            text
            for labelled, text in parts(prepare(save(tmp_path / "a.jsonl", rows), **more))
            if labelled
        ]
        assert len(loss) == 1
        # line ends may merge with the header's
        assert loss[0].strip("\n") == f"{answer}<|im_end|>".strip("\n")


def test_same_tokens_and_mask_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokens = prepare(save(tmp_path / "a.jsonl", CHATS))
    reference = AutoTokenizer.from_pretrained(tokens.tokenizer_path)
    for index, row in enumerate(CHATS):
        expected = reference.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        sample = train_set(tokens)[index]
        assert sample["input_ids"].tolist() == expected["input_ids"]
        assert sample["labels_mask"].tolist() == [bool(one) for one in expected["assistant_masks"]]
    assert tokens.pad_token_id == reference.pad_token_id


# -- pretraining
def test_documents_are_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "\n".join(f"Line {n} of a long text." for n in range(200))
    (tmp_path / "a.txt").write_text(text)
    tokens = prepare(str(tmp_path / "a.txt"), "pretrain", {"max_length": 64})
    samples = [train_set(tokens)[index] for index in range(tokens.num_train)]
    assert [len(one["input_ids"]) for one in samples[:-1]] == [64] * (tokens.num_train - 1)
    joined = np.concatenate([one["input_ids"] for one in samples]).tolist()
    assert load_tokenizer(Path(tokens.tokenizer_path)).decode(joined) == text + "<|im_end|>"
    assert all(one["labels_mask"].all() for one in samples)
    assert tokens.counts.as_dict() == {"read": 1, "kept": 1, "truncated": 0, "dropped": {}}
    assert tokens.label_tokens == tokens.train_tokens - tokens.num_train


def test_a_document_of_several_pieces_is_tokenised_whole(tmp_path: Path) -> None:
    text = "A sentence that goes on.\n" * 30_000  # 750,000 characters
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
    assert parts(tokens, 0)[0][1].startswith("<|im_start|>user\nWhat is 0 + 0?")
    assert parts(tokens, 1) == [(True, "Q0: \n\nanswer number 0<|im_end|>")]


# -- accounting
def test_read_is_kept_plus_dropped(tmp_path: Path) -> None:
    rows = [
        *PAIRS, {"prompt": "q", "completion": ""}, {"prompt": "q", "completion": None}, {"foo": 1},
        "text", 7, {"messages": [{"role": "user", "content": "q"}]},
    ]  # fmt: skip
    tokens = prepare(save(tmp_path / "a.jsonl", rows))
    counts = tokens.counts
    assert counts.read == len(rows) == counts.kept + sum(counts.dropped.values())
    assert counts.kept == tokens.num_train == 12
    assert counts.dropped == {
        "empty answer": 2, "columns fit no format": 1, "not an object with columns": 2,
        "no assistant turn": 1,
    }  # fmt: skip
    assert f"first: line 13 of {tmp_path / 'a.jsonl'}" in said(tokens)


def test_counts_of_several_sources_add_up(tmp_path: Path) -> None:
    first = save(tmp_path / "a.jsonl", [*PAIRS, {"foo": 1}])
    second = save(tmp_path / "b.jsonl", [*CHATS, {"foo": 1}, {"foo": 2}])
    tokens = prepare([f"{first}#13", {"path": second, "format": "messages"}])
    assert tokens.counts.read == 27
    assert tokens.counts.kept == 24
    assert tokens.counts.dropped == {"columns fit no format": 1, "columns do not fit `messages`": 2}
    assert f"{second}: 14 rows read, 12 kept" in said(tokens)


def test_truncation_keeps_the_head(tmp_path: Path, bare_tokenizer: str) -> None:
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
    whole = train_set(prepare(data, tokenizer=bare_tokenizer))[0]
    assert sample["input_ids"].tolist() == whole["input_ids"][:16].tolist()
    dropped = prepare(
        data, train_args={"max_length": 16, "overlong": "drop"}, tokenizer=bare_tokenizer
    )
    assert dropped.counts.dropped == {"longer than max_length": 2}
    assert dropped.counts.kept == 12


def test_label_counts_leave_the_first_position_out(tmp_path: Path) -> None:
    data = train_set(prepare(save(tmp_path / "a.jsonl", CHATS)))
    for index in range(len(data)):
        sample = data[index]
        assert data.lengths[index] == len(sample["input_ids"]) == len(sample["labels_mask"])
        assert data.label_counts[index] == sample["labels_mask"][1:].sum() > 0
        assert (sample["input_ids"].dtype, sample["labels_mask"].dtype) == (np.int32, np.bool_)


# -- bad input
def test_columns_that_fit_no_format(tmp_path: Path) -> None:
    message = fails(save(tmp_path / "a.jsonl", [{"headline": "x", "body": "y"}]))
    assert "found: headline, body" in message
    assert "prompt_completion: prompt, completion" in message
    assert "columns: {prompt: YOURS" in message


def test_a_named_format_that_does_not_fit(tmp_path: Path) -> None:
    message = fails(save(tmp_path / "a.jsonl", PAIRS), format="alpaca")
    assert "fit not the format `alpaca`; found: prompt, completion" in message
    assert "name the format `prompt_completion`" in message


def test_no_row_that_can_be_used(tmp_path: Path) -> None:
    message = fails(save(tmp_path / "a.jsonl", [{"prompt": "q", "completion": ""}] * 3))
    assert "no row of" in message
    assert "empty answer: 3 (first: line 1 of" in message


def test_empty_dataset(tmp_path: Path) -> None:
    for name, text in (
        ("a.jsonl", ""),
        ("b.json", "[]"),
        ("c.csv", "prompt,completion\n"),
        ("d.txt", ""),
    ):
        (tmp_path / name).write_text(text)
        assert "has no rows" in fails(str(tmp_path / name))


def test_no_chat_template(tmp_path: Path, bare_tokenizer: str) -> None:
    for row in (CHATS[0], {"instruction": "do", "output": "done"}):
        message = fails(save(tmp_path / "a.jsonl", [row]), tokenizer=bare_tokenizer)
        assert message.startswith("no chat template")
        assert "chat_template: chatml" in message
        assert "task: pretrain" in message
    # as that fix says
    prepare(save(tmp_path / "b.jsonl", CHATS), "pretrain", tokenizer=bare_tokenizer)


def test_every_sample_too_long(tmp_path: Path) -> None:
    data = save(
        tmp_path / "a.jsonl",
        [{"prompt": "word " * 100, "completion": "a"}, {"prompt": "word " * 40, "completion": "a"}],
    )
    for overlong in ("drop", "truncate"):
        message = fails(data, train_args={"max_length": 8, "overlong": overlong})
        shortest = prepare(data).train_tokens - max(train_set(prepare(data)).lengths)
        assert f"the shortest has {shortest} tokens, train_args.max_length is 8" in message


def test_a_template_that_refuses(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{"
        " messages[-1].content }}"
    )
    rows = [*PAIRS, {"messages": [{"role": "system", "content": "be"}, *CHATS[0]["messages"]]}]
    tokens = prepare(save(tmp_path / "a.jsonl", rows), chat_template=str(template))
    assert tokens.counts.dropped == {"refused by the chat template": 1}
    assert "no end-of-turn token" in said(tokens)
    assert "The template says: no system here" in fails(
        save(tmp_path / "b.jsonl", rows[-1:]), chat_template=str(template)
    )
    assert "cannot be read" in fails(
        save(tmp_path / "b.jsonl", rows), chat_template=str(tmp_path / "none.jinja")
    )


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", PAIRS)
    assert "no tokenizer in" in fails(data, model=str(tmp_path))
    assert "does not exist" in fails(data, model=str(tmp_path / "none"))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "cannot be loaded" in fails(data, model=str(tmp_path))


def test_a_broken_line_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIRS[0]) + "\n{broken\n")
    before = sorted((cache_dir() / "tokens").glob("*"))
    assert f"line 2 of `{path}`" in fails(str(path))
    assert sorted((cache_dir() / "tokens").glob("*")) == before


# -- validation
def test_split_is_fixed_by_the_seed_alone(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", CHATS)
    first = prepare(data, split_dataset_ratio=0.25)
    assert (first.num_train, first.num_eval) == (9, 3)
    assert sorted([*first.train_indices.tolist(), *first.eval_indices.tolist()]) == list(range(12))
    again = prepare(
        data,
        split_dataset_ratio=0.25,
        train_args={"per_device_train_batch_size": 1},
        lora={"enable": True},
    )
    assert again.eval_indices.tolist() == first.eval_indices.tolist()
    other = prepare(data, split_dataset_ratio=0.25, train_args={"seed": 1})
    assert other.eval_indices.tolist() != first.eval_indices.tolist()
    assert first.train_folder == other.train_folder  # the tokens are the same
    assert first.train_tokens == int(train_set(first).lengths.sum())
    assert first.label_tokens == int(train_set(first).label_counts.sum())
    assert prepare(data, split_dataset_ratio=0.001).num_eval == 1
    assert prepare(data, split_dataset_ratio=0.999).num_train == 1
    assert len(split_indices(1000, 0.05, 7)[1]) == 50
    assert [len(part) for part in split_indices(1000, 200, 7)] == [800, 200]
    with pytest.raises(ConfigError, match="holds out 1,000 samples"):
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
def test_a_split_that_is_not_its_ratio_is_reported(
    tmp_path: Path, rows: int, ratio: float, held_out: int, level: str, texts: tuple[str, ...]
) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", CHATS[:rows]), split_dataset_ratio=ratio)
    assert (tokens.num_train, tokens.num_eval) == (rows - held_out, held_out)
    assert (tokens.eval_folder is None) == (held_out == 0)
    about = [notice for notice in tokens.notices if "validation" in notice[1]]
    assert len(about) == 1
    assert about[0][0] == level
    assert all(text in about[0][1] for text in texts), about


def test_validation_file(tmp_path: Path) -> None:
    tokens = prepare(
        save(tmp_path / "a.jsonl", CHATS),
        val_dataset=save(tmp_path / "b.jsonl", [*PAIRS[:4], {"foo": 1}]),
    )
    assert (tokens.num_train, tokens.num_eval) == (12, 4)
    assert tokens.eval_counts is not None
    assert tokens.eval_counts.dropped == {"columns fit no format": 1}
    assert tokens.counts.read == 12
    assert len(TokenDataset(tokens.eval_folder, tokens.eval_indices)) == 4


# -- the cache
def test_a_hit_is_the_same_and_imports_nothing_heavy(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", [*CHATS, {"foo": 1}])
    first = prepare(data)
    second = prepare(data)
    assert first.train_folder == second.train_folder
    assert first.counts == second.counts
    assert "tokenised in" in first.notices[-1][1]
    assert "tokenised data from the cache" in second.notices[-1][1]
    assert first.notices[:-1] == second.notices[:-1]
    code = (
        "import sys; from paceline.config.schema import Config; from paceline.data.text.prepare"
        f" import prepare_tokens; from paceline.models.builtin import resolve_model\n"
        f"t = prepare_tokens(Config(model={MODEL!r}, dataset={data!r}), 'sft', resolve_model)\n"
        "assert 'from the cache' in t.notices[-1][1]; print({'torch', 'transformers',"
        " 'datasets', 'tokenizers', 'jinja2', 'pyarrow'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
        == "set()"
    )


def test_the_key_follows_all_that_changes_the_tokens(tmp_path: Path, bare_tokenizer: str) -> None:
    data = save(tmp_path / "a.jsonl", PAIRS)
    folders = [
        prepare(data).train_folder, prepare(data, "pretrain").train_folder,
        prepare(data, system="Be.").train_folder,
        prepare(data, train_args={"max_length": 32}).train_folder,
        prepare(data, tokenizer=bare_tokenizer).train_folder,
        prepare(data, train_args={"overlong": "drop"}).train_folder,
        prepare(data, train_args={"train_on_inputs": True}).train_folder,
        prepare(data, format="prompt_completion").train_folder, prepare(f"{data}#5").train_folder,
        prepare({"path": data, "columns": {"completion": "prompt"}}).train_folder,
        prepare(save(tmp_path / "a.jsonl", PAIRS[::-1])).train_folder,
    ]  # fmt: skip
    assert len(set(folders)) == len(folders)
    assert prepare(save(tmp_path / "elsewhere.jsonl", PAIRS)).train_folder == folders[0]


def test_processes_that_come_at_once_build_it_once(tmp_path: Path) -> None:
    data = save(
        tmp_path / "a.jsonl",
        [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(300) for row in PAIRS],
    )
    code = (
        "from paceline.config.schema import Config; from paceline.data.text.prepare import"
        f" prepare_tokens; from paceline.models.builtin import resolve_model\n"
        f"t = prepare_tokens(Config(model={MODEL!r}, dataset={data!r}), 'sft', resolve_model)\n"
        "print(t.train_folder, t.notices[-1][1])"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    found = [process.communicate(timeout=50)[0] for process in started]
    assert all(process.returncode == 0 for process in started)
    assert len({one.split()[0] for one in found}) == 1
    assert sum("tokenised in" in one for one in found) == 1


def test_a_killed_build_leaves_nothing_broken(tmp_path: Path) -> None:
    data = save(
        tmp_path / "a.jsonl",
        [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(600) for row in PAIRS],
    )
    code = (
        "from paceline.config.schema import Config; from paceline.data.text.prepare import"
        f" prepare_tokens; from paceline.models.builtin import resolve_model\n"
        f"prepare_tokens(Config(model={MODEL!r}, dataset={data!r}), 'sft', resolve_model)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    tokens = cache_dir() / "tokens"
    deadline = time.monotonic() + 20
    while not any(one.stat().st_size for one in tokens.glob(f".*.{process.pid}.tmp/tokens.bin")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(tokens.glob(f".*.{process.pid}.tmp"))
    assert prepare(data).num_train == 7200
    assert not list(tokens.glob(".*.tmp"))


# -- the dataset
def test_dataset_pickles_as_a_path_and_has_subsets(tmp_path: Path) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", CHATS), split_dataset_ratio=0.25)
    data = train_set(tokens)
    raw = pickle.dumps(data)
    assert len(raw) < 2000
    again = pickle.loads(raw)
    assert len(again) == len(data) == 9
    assert again[4]["input_ids"].tolist() == data[4]["input_ids"].tolist()
    some = data.subset([4, 0])
    assert some.lengths.tolist() == data.lengths[[4, 0]].tolist()
    assert some.subset([1])[0]["input_ids"].tolist() == data[0]["input_ids"].tolist()
    assert data[0]["input_ids"].flags.writeable
    assert len(pickle.dumps(tokens)) < 5000
