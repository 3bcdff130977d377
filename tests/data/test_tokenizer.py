"""Tokenizers of other kinds than the built-in: with a first token of their own, without offsets, in
an adapter's folder."""

import json
from pathlib import Path

import pytest

from paceline.config.schema import Config
from paceline.data.text.prepare import prepare_tokens
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
    """(whole text, text that carries loss) of the first sample."""
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
def first_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts <s> first, cuts at blanks (and leaves them out), as sentence-piece
    models are turned into."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    rust = Tokenizer(models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    rust.train_from_iterator(["hello world good day [user] [assistant]"] * 20, trainer)
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    rust.enable_truncation(3)  # some files carry one: it must not cut the data
    folder = tmp_path_factory.mktemp("first-token")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_chats_pairs_and_text_with_a_first_token(first_token: Path, tmp_path: Path) -> None:
    full, loss = loss_text(first_token, tmp_path)
    # the template alone says where <s> stands
    assert full.replace(" ", "") == "[user]helloworld</s>[assistant]goodday</s>"
    assert loss.replace(" ", "") == "goodday</s>"
    full, _ = loss_text(first_token, tmp_path, [{"text": "hello world"}], "pretrain")
    assert full.replace(" ", "") == "<s>helloworld</s>"
    settings = json.loads((first_token / "tokenizer_config.json").read_text())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((first_token / "tokenizer.json").read_bytes())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    full, loss = loss_text(bare, tmp_path, [{"prompt": "hello world", "completion": "good day"}])
    assert full.replace(" ", "") == "<s>helloworldgoodday</s>"
    assert loss.replace(" ", "") == "goodday</s>"


def test_a_tokenizer_written_in_python(tmp_path: Path) -> None:
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


def test_loaded_directly_it_is_what_transformers_loads() -> None:
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


def test_an_adapters_folder_leads_to_its_base(tmp_path: Path) -> None:
    base = resolve_model("builtin:qwen2-micro")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert find_tokenizer(str(tmp_path)) == Path(base)
