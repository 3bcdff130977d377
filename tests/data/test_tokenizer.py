"""Tokenizers unlike the built-in one: with a beginning-of-text token, without offsets, in an
adapter's folder."""

import json
from pathlib import Path

import pytest

from paceline.config.schema import Config
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import LoadedTokenizer, find_tokenizer, load_tokenizer
from paceline.models.builtin import resolve_model

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
ROWS = [
    {
        "messages": [
            {"role": "user", "content": "hello world"},
            {"role": "assistant", "content": "good day"},
        ]
    }
]


def loss_text(
    folder: Path, tmp_path: Path, rows: list[dict[str, object]] = ROWS, task: str = "sft"
) -> tuple[str, str]:
    """Return the text of the first sample, and its part that carries loss."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        model="builtin:qwen2-micro", tokenizer=str(folder), dataset=str(tmp_path / "rows.jsonl")
    )
    tokens = prepare_tokens(config, task, resolve_model)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(folder)
    sample = TokenDataset(tokens.train_folder)[0]
    full = tokenizer.decode(sample["input_ids"].tolist())
    return full, tokenizer.decode(sample["input_ids"][sample["labels_mask"]].tolist())


@pytest.fixture(scope="module")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that prepends <s> and splits at spaces without keeping them, like converted
    SentencePiece models."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(["hello world good day [user] [assistant]"] * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.enable_truncation(3)  # set in some tokenizer files; it must not truncate the data
    folder = tmp_path_factory.mktemp("bos-tokenizer")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_beginning_of_text_token_in_chats_pairs_and_text(
    bos_tokenizer: Path, tmp_path: Path
) -> None:
    full, loss = loss_text(bos_tokenizer, tmp_path)
    # Only the template determines the position of <s>.
    assert full.replace(" ", "") == "[user]helloworld</s>[assistant]goodday</s>"
    assert loss.replace(" ", "") == "goodday</s>"
    full, _ = loss_text(bos_tokenizer, tmp_path, [{"text": "hello world"}], "pretrain")
    assert full.replace(" ", "") == "<s>helloworld</s>"
    settings = json.loads((bos_tokenizer / "tokenizer_config.json").read_text())
    bare_tokenizer = tmp_path / "bare"
    bare_tokenizer.mkdir()
    (bare_tokenizer / "tokenizer.json").write_bytes((bos_tokenizer / "tokenizer.json").read_bytes())
    settings.pop("chat_template", None)
    (bare_tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    full, loss = loss_text(
        bare_tokenizer, tmp_path, [{"prompt": "hello world", "completion": "good day"}]
    )
    assert full.replace(" ", "") == "<s>helloworldgoodday</s>"
    assert loss.replace(" ", "") == "goodday</s>"


def test_pure_python_tokenizer(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path / "bytes"
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).backend is None
    full, loss = loss_text(folder, tmp_path)
    assert full == "[user] hello world</s>[assistant] good day</s>"
    assert loss == "good day</s>"
    full, _ = loss_text(folder, tmp_path, [{"text": "hello"}], "pretrain")
    assert full == "hello</s>"


def test_direct_loading_matches_transformers() -> None:
    from paceline.data.text.tokenizer import _load_by_transformers, _load_directly

    folder = Path(resolve_model("builtin:qwen2-micro"))
    direct, reference = _load_directly(folder), _load_by_transformers(folder, False)
    assert direct is not None
    text = "Hello,\n\n  don't 12345 <|im_end|>\tsüß 漢字 🙂 e\u0301"
    for special in (True, False):
        assert (
            direct.backend.encode(text, add_special_tokens=special).ids
            == reference.backend.encode(text, add_special_tokens=special).ids
        )
    fields = (
        "special_tokens",
        "chat_template",
        "eos_token_id",
        "pad_token_id",
        "vocab_size",
        "special_ids",
    )
    assert all(getattr(direct, field) == getattr(reference, field) for field in fields)
    assert isinstance(direct, LoadedTokenizer)


def test_adapter_folder_uses_tokenizer_of_base_model(tmp_path: Path) -> None:
    base = resolve_model("builtin:qwen2-micro")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert find_tokenizer(str(tmp_path)) == Path(base)
