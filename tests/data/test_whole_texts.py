"""Prompts and answers, documents and chats are tokenized as entire texts, and special tokens that a
text already has are not added again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_tokens import MODEL, notice_text, save
from text_tokenizers import KINDS, SENTENCE_PIECE_KINDS, make_python_tokenizer, make_tokenizer

from paceline.config.schema import Config
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.kinds import document
from paceline.data.kinds.registry import load_kind
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import resolve_model

Maker = Callable[..., Path]
PAIRS = [
    ("Is 7 > 0?", " It is 7."),
    ("Is 7 > 0?", "It is 7."),
    ("Is 7 > 0? ", "Yes"),
    ("the answer is;\n", "good"),
    ("the sum is 1", "2 and 30"),
    ("hello", "  world"),
]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A function that makes a tokenizer, once per kind."""
    made: dict[tuple[Any, ...], Path] = {}

    def make_once(kind: str, **settings: bool) -> Path:
        key = (kind, *sorted(settings.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("tokenizers") / "tokenizer"
            is_python = kind == "python"
            made[key] = (
                make_python_tokenizer(folder)
                if is_python
                else make_tokenizer(folder, kind, **settings)
            )
        return made[key]

    return make_once


def samples(
    tmp_path: Path,
    tokenizer: Path,
    rows: list[dict[str, Any]],
    task: str = "sft",
    name: str = "sft",
    **settings: Any,
) -> list[Any]:
    """Return the samples of rows: tokens, and the mask of those that carry loss."""
    config = Config.model_validate(
        {
            "model": MODEL,
            "tokenizer": str(tokenizer),
            "dataset": save(tmp_path / "rows.jsonl", rows),
            "task": name,
            "trust_remote_code": True,
            **settings,
        }
    )
    tokens = prepare_tokens(config, task, resolve_model)
    assert tokens.counts.dropped == {}
    dataset = TokenDataset(tokens.train_folder, None, load_kind(task).columns)
    return [dataset[index] for index in range(len(dataset))]


def reference(tokenizer: Path, text: str) -> list[int]:
    """Return the tokens that transformers gives the entire text, and the end-of-text token."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=True)
    return [*made(text)["input_ids"], made.eos_token_id]


@pytest.mark.parametrize("kind", [*KINDS, "python"])
def test_prompt_and_answer_are_one_text(kind: str, make: Maker, tmp_path: Path) -> None:
    tokenizer = make(kind)
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in PAIRS]
    loaded = load_tokenizer(tokenizer, trust_remote_code=True)
    for (prompt, answer), sample in zip(PAIRS, samples(tmp_path, tokenizer, rows), strict=True):
        ids, mask = sample["input_ids"].tolist(), sample["labels_mask"]
        assert ids == reference(tokenizer, prompt + answer)
        # The loss begins with the token that has the first character of the answer.
        before = loaded.decode(ids[1 : int(np.argmax(mask))]).lstrip(" ")
        rest = loaded.decode([token for token, is_label in zip(ids, mask, strict=True) if is_label])
        assert prompt.startswith(before)
        assert rest.replace(" ", "").endswith(f"{answer}</s>".replace(" ", ""))
        # Without offsets it begins with the first token that the prompt alone does not have.
        assert len(prompt) - len(before) <= (4 if kind == "python" else 2)
        assert mask[int(np.argmax(mask)) :].all()


@pytest.mark.parametrize("kind", [*KINDS, "python"])
@pytest.mark.parametrize(
    ("task", "name"),
    [("pairs", "dpo"), ("pairs", "orpo"), ("reward", "reward"), ("answers", "kto")],
)
def test_preferences_have_the_tokens_of_fine_tuning(
    kind: str, task: str, name: str, make: Maker, tmp_path: Path
) -> None:
    """Each answer of a pair, and a marked answer, has the tokens and the mask of a completion."""
    tokenizer = make(kind)
    answers = [("Is 7 > 0?", " It is 7.", " Yes"), ("the answer is", " good", " bad")]
    single = [
        {"prompt": prompt, "completion": answer, "label": True}
        for prompt, *both in answers
        for answer in both
    ]
    expected = samples(tmp_path, tokenizer, single, ignore_columns=["label"])
    if task == "answers":
        actual = samples(tmp_path, tokenizer, single, task, name)
    else:
        rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in answers]
        actual = []
        for pair in samples(tmp_path, tokenizer, rows, task, name):
            for part in (slice(0, pair["chosen_length"]), slice(pair["chosen_length"], None)):
                names = ("input_ids", "labels_mask")
                actual.append({name: pair[name][part] for name in names})
    assert len(actual) == len(expected) == 4
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours["input_ids"].tolist() == theirs["input_ids"].tolist()
        assert ours["labels_mask"].tolist() == theirs["labels_mask"].tolist()


@pytest.mark.parametrize("kind", [*KINDS, "python"])
@pytest.mark.parametrize("text", ["ok", "ok</s>", "<s>ok", "<s>ok</s>"])
def test_special_tokens_of_the_text_are_not_doubled(
    kind: str, text: str, make: Maker, tmp_path: Path
) -> None:
    tokenizer = make(kind)
    loaded = load_tokenizer(tokenizer, trust_remote_code=True)

    def ends(sample: Any) -> tuple[int, int, int]:
        tokens = [loaded.token(token) for token in sample["input_ids"].tolist()]
        assert (tokens[0], tokens[-1]) == ("<s>", "</s>")
        return tokens.count("<s>"), tokens.count("</s>"), len(tokens)

    for task, name in (("sft", "sft"), ("pretrain", "pretrain")):
        row = {"text": text}
        assert ends(samples(tmp_path, tokenizer, [row], task, name)[0])[:2] == (1, 1)  # type: ignore[arg-type]
    prompt, answer = text.removesuffix("</s>"), "day</s>" if text.endswith("</s>") else "day"
    row = {"prompt": prompt, "completion": answer}
    assert ends(samples(tmp_path, tokenizer, [row])[0])[:2] == (1, 1)
    row = {"prompt": prompt, "completion": answer, "label": True}
    assert ends(samples(tmp_path, tokenizer, [row], "answers", "kto")[0])[:2] == (1, 1)
    row = {"prompt": prompt, "chosen": answer, "rejected": "bad"}
    for task, name in (("pairs", "dpo"), ("reward", "reward")):
        pair = samples(tmp_path, tokenizer, [row], task, name)[0]  # type: ignore[arg-type]
        for part in (slice(0, pair["chosen_length"]), slice(pair["chosen_length"], None)):
            assert ends({"input_ids": pair["input_ids"][part]})[:2] == (1, 1)


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_tokenizers_that_add_special_tokens(
    bos: bool, eos: bool, make: Maker, tmp_path: Path
) -> None:
    tokenizer = make("metaspace", bos=bos, eos=eos)
    for text in ("ok", "ok</s>", "<s>ok"):
        expected = [*["<s>"] * (bos or text.startswith("<s>")), "ok", "</s>"]
        rows: list[tuple[str, dict[str, Any]]] = [
            ("sft", {"text": text}), ("pretrain", {"text": text}),
            ("classify", {"text": text, "label": 1}),
        ]  # fmt: skip
        for task, row in rows:
            sample = samples(tmp_path, tokenizer, [row], task, "sft")[0]
            decoded = load_tokenizer(tokenizer).decode(sample["input_ids"].tolist())
            wanted = "".join(expected)
            if task == "classify" and not eos:  # without an end-of-text token of its own
                wanted = wanted.removesuffix("</s>") + "</s>" * text.endswith("</s>")
            assert decoded.replace(" ", "") == wanted


def test_chats_that_a_template_begins_with_the_first_token(make: Maker, tmp_path: Path) -> None:
    """Pretraining on chats: the template has the beginning-of-text token, and so has the
    tokenizer."""
    tokenizer = make("metaspace")
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "ok"}, {"role": "assistant", "content": "day"}]
    settings = {"chat_template": str(template)}
    for task, name in (("sft", "sft"), ("pretrain", "pretrain")):
        row = {"messages": chat}
        sample = samples(tmp_path, tokenizer, [row], task, name, **settings)[0]  # type: ignore[arg-type]
        text = load_tokenizer(tokenizer).decode(sample["input_ids"].tolist())
        assert text.replace(" ", "") == "<s>ok</s>day</s>"


@pytest.mark.parametrize("kind", [*KINDS, "python"])
def test_pieces_of_a_document_are_one_text(
    kind: str, make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "_PIECE_CHARS", 100)
    lines = ["One line", "and another line", "", "  with spaces", "good day", "</s>the answer"]
    for text in ("\n".join(lines * 12), "the answer is good; " * 30):
        tokenizer = make(kind)
        (tmp_path / "a.txt").write_text(text)
        config = Config.model_validate(
            {
                "model": MODEL,
                "tokenizer": str(tokenizer),
                "dataset": str(tmp_path / "a.txt"),
                "task": "pretrain",
                "trust_remote_code": True,
            }
        )
        tokens = prepare_tokens(config, "pretrain", resolve_model)
        ids = TokenDataset(tokens.train_folder)[0]["input_ids"].tolist()
        assert ids == reference(tokenizer, text)


@pytest.mark.parametrize("kind", [*SENTENCE_PIECE_KINDS, "python"])
def test_turns_of_a_chat_are_one_text(kind: str, make: Maker, tmp_path: Path) -> None:
    """Also with a tokenizer that has no offsets."""
    tokenizer = make(kind)
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content + ' is ' }}"
        "{% else %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endif %}{% endfor %}"
    )
    template = tmp_path / "template.jinja"
    template.write_text(source)
    chat = [
        {"role": "user", "content": "the answer"}, {"role": "assistant", "content": "good"},
        {"role": "user", "content": "One line"}, {"role": "assistant", "content": "bad, it is"},
    ]  # fmt: skip
    text = "<|user|>the answer is good<|end|><|user|>One line is bad, it is<|end|>"
    for flag in (False, True):
        row = {"messages": [chat[0], {**chat[1], "loss": not flag}, *chat[2:]]}
        sample = samples(
            tmp_path, tokenizer, [row], chat_template=str(template),
            train_args={"train_on_inputs": flag},
        )[0]  # fmt: skip
        loaded = load_tokenizer(tokenizer, trust_remote_code=True)
        ids, mask = sample["input_ids"].tolist(), sample["labels_mask"]
        assert ids == loaded.encode_batch([text], add_special_tokens=False)[0]
        parts = np.split(np.array(ids), np.flatnonzero(np.diff(mask)) + 1)
        texts = [loaded.decode(part.tolist()).strip().replace(" ", "") for part in parts]
        expected = ["<|user|>theansweris", "good<|end|>", "<|user|>Onelineis", "bad,itis<|end|>"]
        if flag:
            expected[2:] = ["".join(expected[2:])]
        assert texts == expected


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_space_after_the_end_of_text_token_does_not_double_it(
    kind: str, make: Maker, tmp_path: Path
) -> None:
    tokenizer = make(kind)
    for space in ("\n", " ", "\n\n"):
        for task, name, rows in (
            ("sft", "sft", lambda end: [{"prompt": "Is 7?", "completion": f" Yes{end}"}]),
            ("sft", "sft", lambda end: [{"text": f"hello{end}"}]),
            ("pretrain", "pretrain", lambda end: [{"text": f"hello{end}"}]),
            ("answers", "kto",
             lambda end: [{"prompt": "Is 7?", "completion": f" Yes{end}", "label": True}]),
            ("pairs", "dpo",
             lambda end: [{"prompt": "Is 7?", "chosen": f" Yes{end}", "rejected": f" it{end}"}]),
        ):  # fmt: skip
            with_space, without = (
                samples(tmp_path, tokenizer, rows(end), task, name) for end in (f"</s>{space}", "")
            )
            for key in with_space[0]:
                assert np.array_equal(with_space[0][key], without[0][key]), (task, key)
        chats = [
            [{"messages": [{"role": "user", "content": "Is 7?"},
                           {"role": "assistant", "content": f"Yes{end}"}]}]
            for end in (f"</s>{space}", "")
        ]  # fmt: skip
        first, second = (
            samples(tmp_path, tokenizer, rows, chat_template="zephyr")[0]["input_ids"]
            for rows in chats
        )
        assert np.array_equal(first, second)


def test_prompts_that_are_formatted_already_are_reported(tmp_path: Path) -> None:
    formatted = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    for task, rows in (
        ("sft", [{"prompt": formatted, "completion": "a"}, {"prompt": "q", "completion": "a"}]),
        ("pairs", [{"prompt": formatted, "chosen": "a", "rejected": "b"}]),
    ):
        config = Config(model=MODEL, dataset=save(tmp_path / "rows.jsonl", rows))
        text = notice_text(prepare_tokens(config, task, resolve_model))
        assert "1 sample with tokens of the chat template in a question" in text
        plain = Config(
            model=MODEL, dataset=save(tmp_path / "rows.jsonl", rows[1:] or rows),
            chat_template="empty" if task == "pairs" else None,
        )  # fmt: skip
        assert "tokens of the chat template in a question" not in notice_text(
            prepare_tokens(plain, task, resolve_model)
        )
