"""llama.cpp encodes texts with the tokenizer in a GGUF file as the package tokenizers does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from families import make_model
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.data.text.chats.named_templates import template_source
from paceline.data.text.qwen_tokenizer import QWEN2_PATTERN
from paceline.inference.exports.core.forms import ProofPrompt
from paceline.inference.exports.gguf.llama_cpp import LlamaCppModel
from paceline.inference.exports.gguf.llama_cpp_engine import LlamaCppEngine
from paceline.inference.exports.gguf.pretokenizers import KNOWN_SPLITTINGS
from paceline.inference.exports.gguf.tokenizer import read_tokenizer
from paceline.inference.exports.gguf.write import write_gguf
from paceline.models.builtin import builtin_tokenizer

TEXTS = (
    "Hello world, it's 12345 o'clock — don't WE'LL shout?",
    "  two  spaces\tand\n\n\nlines\r\n   ends   ",
    "def f(x):\n    return x ** 2  # HTTPServer camelCase snake_case\n",
    "你好，世界。这是 2024 年的第 3 个例子！",
    "Zażółć gęślą jaźń; naïve café; Ελληνικά; русский; 한국어; ไทย; हिन्दी",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 and \u200b zero-width",
    "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>",
    "a" * 40 + "!!!???...---   ",
    "",
)


def byte_level(splitting: Any) -> dict[str, Any]:
    """Return a pre-tokenizer that splits by the expressions of a known one."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in splitting.expressions
    ]
    steps.append(
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    )
    return {"type": "Sequence", "pretokenizers": steps}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a tiny model whose tokenizer.json has other values; return its folder."""
    model = make_model("llama", folder, hidden_size=32)
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"] |= changes.pop("model", {})
    file.write_text(json.dumps(content | changes))
    return model


def write_file(model: Path, file: Path) -> LlamaCppModel:
    write_gguf(model, file, "f16", "test")
    return LlamaCppModel(file)


def check_texts(model: Path, loaded: LlamaCppModel, texts: tuple[str, ...] = TEXTS) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in texts:
        assert loaded.tokenize(text) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize("splitting", KNOWN_SPLITTINGS, ids=KNOWN_SPLITTINGS.values())
def test_byte_level_tokenizers_give_the_same_tokens(splitting: Any, tmp_path: Path) -> None:
    model = write_model(
        tmp_path,
        model={"ignore_merges": splitting.ignores_merges},
        pre_tokenizer=byte_level(splitting),
    )
    loaded = write_file(model, tmp_path / "model.gguf")
    check_texts(model, loaded)
    loaded.close()


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_tokenizers_give_the_same_tokens(adds_space: bool, tmp_path: Path) -> None:
    """As in Llama 2, which adds a space and a first token, and as in Gemma."""
    model = make_model("llama", tmp_path, hidden_size=32)
    write_sentencepiece(model / "tokenizer.json", adds_space)
    loaded = write_file(model, tmp_path / "model.gguf")
    check_texts(model, loaded, tuple(text for text in TEXTS if "<|im" not in text and text))
    loaded.close()


def write_sentencepiece(file: Path, adds_space: bool) -> None:
    """Write a byte-pair tokenizer as transformers converts SentencePiece's: with tokens for bytes,
    and with a merge for each way to divide a token in two tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    special = ["<pad>", "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    lines = [" ".join(TEXTS), *Path(__file__).read_text().split("\n")]
    trained.train_from_iterator(lines, trainer)
    vocabulary = trained.get_vocab()
    merges = sorted(
        (number, token[:cut], token[cut:])
        for token, number in vocabulary.items()
        if token not in special
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    steps = [normalizers.Prepend("▁")] if adds_space else []
    result = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, left, right in merges],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    result.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    result.add_special_tokens(["<pad>", "<unk>", "<s>", "</s>"])
    result.save(str(file))


def test_chats_are_rendered_by_the_template_in_the_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = make_model("qwen2", tmp_path)
    write_gguf(model, tmp_path / "model.gguf", "f16", "test")
    engine = LlamaCppEngine(tmp_path / "model.gguf")
    tool = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}}
    turns: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is “5”?"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    for tools in ([], [tool]):
        expected = tokenizer.apply_chat_template(
            turns, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        tokens = tokenizer(expected, add_special_tokens=False)["input_ids"]
        assert engine.encode(ProofPrompt(turns, {}, list(tools))) == tokens
    engine.close()


#: As in Qwen3 and in Qwen3.5, whose defaults differ.
THINKING = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}-{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is true %}+{% else %}0{% endif %}"
)


def test_thinking_is_chosen_by_the_prompt_only(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = make_model("qwen2", tmp_path)
    (model / "chat_template.jinja").write_text(THINKING)
    write_gguf(model, tmp_path / "model.gguf", "f16", "test")
    engine = LlamaCppEngine(tmp_path / "model.gguf")
    turns: list[Any] = [{"role": "user", "content": "Hi"}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    for arguments in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        text = tokenizer.apply_chat_template(turns, tokenize=False, **arguments)
        assert engine.encode(ProofPrompt(turns, arguments, [])) == tokenizer(text)["input_ids"]
    engine.close()


def test_tokens_that_the_tokenizer_lacks_are_empty(tmp_path: Path) -> None:
    """llama.cpp has a first token for every byte-level tokenizer; this one has none."""
    from transformers import AutoTokenizer

    model = make_model("qwen2", tmp_path)
    (model / "chat_template.jinja").write_text(template_source("llama3"))
    write_gguf(model, tmp_path / "model.gguf", "f16", "test")
    engine = LlamaCppEngine(tmp_path / "model.gguf")
    turns: list[Any] = [{"role": "user", "content": "Hi"}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.bos_token is None
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert engine.encode(ProofPrompt(turns, {}, [])) == tokenizer(text)["input_ids"]
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "WordPiece"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": QWEN2_PATTERN + "|x"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
    ids=["type", "pre-tokenizer", "expression"],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(builtin_tokenizer(), folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= changes.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    with raises_error(ConfigError, code="gguf-unsupported-tokenizer"):
        read_tokenizer(folder)
