"""Named chat templates: their text, their answer spans, and when the tokenizer's own template is
used instead."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from raised import raises_error

from paceline.config.chat_names import TEMPLATE_NAMES, canonical_name
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.templates import FORMATS, save_template, template_choice, template_source
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer
from paceline.models.builtin import resolve_model
from paceline.tasks.preview import preview

MODEL = "builtin:qwen2-micro"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]


@pytest.fixture
def tokenizer() -> LoadedTokenizer:
    return load_tokenizer(Path(resolve_model(MODEL)))


def test_every_name_has_a_template() -> None:
    assert set(TEMPLATE_NAMES) == set(FORMATS)
    assert canonical_name("Qwen2.5") == "qwen"
    assert canonical_name("phi-3") == "phi3"
    assert canonical_name("./file.jinja") is None


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_span_covers_answer_and_end_of_turn_in_every_template(name: str) -> None:
    template = ChatTemplate(template_source(name), TOKENS)
    for chat, answers in (
        (CHAT, ["Two.", "Four."]),
        (CHAT[1:], ["Two.", "Four."]),
        (CHAT[1:3], ["Two."]),
    ):
        rendered = template.render_with_spans(chat)
        assert rendered.unplaced == 0
        spans = [rendered.text[start:end] for start, end in rendered.spans]
        assert len(spans) == len(answers)
        for span, answer in zip(spans, answers, strict=True):
            assert span.strip().startswith(answer)
            assert len(span.strip()) > len(answer), (
                "the end-of-turn token of an answer must carry loss"
            )
        for message in chat:
            assert message["content"] in rendered.text
    prompt = template.render(CHAT[:2], add_generation_prompt=True)
    assert template.render(CHAT[:3]).startswith(prompt), (
        "the generation prompt must be a prefix of the training text"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"),
        (
            "llama3",
            (
                "<s><|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\nTwo.<|eot_id|>"
            ),
        ),
        ("llama2", "<s>[INST] One? [/INST] Two. </s>"),
        ("mistral", "<s>[INST] One?[/INST] Two.</s>"),
        (
            "gemma",
            "<s><start_of_turn>user\nOne?<end_of_turn>\n<start_of_turn>model\nTwo.<end_of_turn>\n",
        ),
        ("phi3", "<|user|>\nOne?<|end|>\n<|assistant|>\nTwo.<|end|>\n"),
        ("zephyr", "<|user|>\nOne?</s>\n<|assistant|>\nTwo.</s>\n"),
        ("deepseek3", "<s><｜User｜>One?<｜Assistant｜>Two.<｜end▁of▁sentence｜>"),
    ],
)
def test_text_of_one_turn(name: str, text: str) -> None:
    assert ChatTemplate(template_source(name), TOKENS).render(CHAT[1:3]) == text


def test_position_of_system_message() -> None:
    def render(name: str, chat: list[dict[str, str]] = CHAT) -> str:
        return ChatTemplate(template_source(name), TOKENS).render(chat)

    assert render("llama2").startswith(
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nOne? [/INST] Two. </s><s>[INST] Three?"
    )
    assert render("gemma").startswith("<s><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>")
    assert render("gemma").count("Be brief.") == 1
    assert render("qwen", CHAT[1:]).startswith("<|im_start|>system\nYou are Qwen")
    assert "You are Qwen" not in render("qwen")


def choose_template(value: str | None) -> tuple[str | None, list[str]]:
    config = Config(model=MODEL, dataset="d", chat_template=value)
    source, notices = template_choice(config).choose(load_tokenizer(Path(resolve_model(MODEL))))
    return source, [f"{level}: {text}" for level, text in notices]


def test_tokenizer_template_is_preferred_if_its_text_is_equal(
    tokenizer: LoadedTokenizer,
) -> None:
    built_in = tokenizer.chat_template
    assert choose_template(None) == (built_in, [])
    assert choose_template("tokenizer_default") == (built_in, [])
    assert choose_template("tokenizer_default_fallback_llama3") == (built_in, [])
    source, notices = choose_template("chatml")
    assert source == built_in
    assert "the tokenizer's template, which produces the same text" in notices[0]
    # `qwen` adds a system message, and the tokenizer's own template does not.
    source, notices = choose_template("qwen")
    assert source == template_source("qwen")
    assert notices[0].startswith(
        "warning: chat template: `qwen`; the tokenizer's template produces different text"
    )
    assert choose_template("qwen3")[0] == built_in


def test_tokens_missing_from_tokenizer_are_reported(tokenizer: LoadedTokenizer) -> None:
    tokenizer_without_template = replace(tokenizer, chat_template=None, special_tokens={})
    fallback = template_choice(
        Config(model=MODEL, dataset="d", chat_template="tokenizer_default_fallback_llama3")
    )
    source, notices = fallback.choose(tokenizer_without_template)
    assert source == template_source("llama3")
    assert any(level == "warning" and "`<|eot_id|>`" in text for level, text in notices)
    _, notices = template_choice(Config(model=MODEL, dataset="d", chat_template="zephyr")).choose(
        tokenizer_without_template
    )
    assert any(level == "warning" and "end-of-text token" in text for level, text in notices)


def test_chat_template_from_file_folder_or_inline(tmp_path: Path) -> None:
    inline = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert choose_template(inline)[0] == inline
    (tmp_path / "template.jinja").write_text(inline)
    assert choose_template(str(tmp_path / "template.jinja"))[0] == inline
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
    assert choose_template(str(tmp_path))[0] == inline
    with raises_error(ConfigError, code="unknown-template") as caught:
        choose_template("chatlm")
    assert "did you mean `chatml`" in caught.value.paragraph()
    with pytest.raises(ConfigError) as caught:
        choose_template("missing.jinja")
    assert "check the name or the path" in caught.value.paragraph()


def test_configured_template_is_used_and_saved(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"messages": CHAT[1:3]}) + "\n")
    config = Config(model=MODEL, dataset=str(data), chat_template="alpaca")
    assert "### Response:" in json.dumps(preview(config, 1))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(resolve_model(MODEL)).iterdir():
        if file.name.startswith(("tokenizer", "config")):
            (folder / file.name).write_bytes(file.read_bytes())
    save_template(config, folder)
    assert load_tokenizer(folder).chat_template == template_source("alpaca")
