"""Named chat templates: their text, their marks, and the choice between them and the tokenizer's
own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

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


def test_the_names_and_the_templates_agree() -> None:
    assert set(TEMPLATE_NAMES) == set(FORMATS)
    assert canonical_name("Qwen2.5") == "qwen"
    assert canonical_name("phi-3") == "phi3"
    assert canonical_name("./file.jinja") is None


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_every_template_marks_each_answer_with_its_end(name: str) -> None:
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
                "an answer ends with an end-of-turn token that carries loss"
            )
        for message in chat:
            assert message["content"] in rendered.text
    prompt = template.render(CHAT[:2], add_generation_prompt=True)
    assert template.render(CHAT[:3]).startswith(prompt), "generation continues what training saw"


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
def test_the_text_of_a_turn(name: str, text: str) -> None:
    assert ChatTemplate(template_source(name), TOKENS).render(CHAT[1:3]) == text


def test_a_system_message_goes_where_the_family_has_it() -> None:
    def text(name: str, chat: list[dict[str, str]] = CHAT) -> str:
        return ChatTemplate(template_source(name), TOKENS).render(chat)

    assert text("llama2").startswith(
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nOne? [/INST] Two. </s><s>[INST] Three?"
    )
    assert text("gemma").startswith("<s><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>")
    assert text("gemma").count("Be brief.") == 1
    assert text("qwen", CHAT[1:]).startswith("<|im_start|>system\nYou are Qwen")
    assert "You are Qwen" not in text("qwen")


def choose(value: str | None) -> tuple[str | None, list[str]]:
    config = Config(model=MODEL, dataset="d", chat_template=value)
    source, notices = template_choice(config).choose(load_tokenizer(Path(resolve_model(MODEL))))
    return source, [f"{level}: {text}" for level, text in notices]


def test_the_tokenizers_own_template_is_used_where_it_writes_the_same(
    tokenizer: LoadedTokenizer,
) -> None:
    built_in = tokenizer.chat_template
    assert choose(None) == (built_in, [])
    assert choose("tokenizer_default") == (built_in, [])
    assert choose("tokenizer_default_fallback_llama3") == (built_in, [])
    source, notices = choose("chatml")
    assert source == built_in
    assert "the tokenizer's template, which produces the same text" in notices[0]
    # it begins with a system message, and the tokenizer's own does not
    source, notices = choose("qwen")
    assert source == template_source("qwen")
    assert notices[0].startswith(
        "warning: chat template: `qwen`; the tokenizer's template produces different text"
    )
    assert choose("qwen3")[0] == built_in


def test_tokens_that_a_tokenizer_lacks_are_reported(tokenizer: LoadedTokenizer) -> None:
    bare = replace(tokenizer, chat_template=None, special_tokens={})
    fallback = template_choice(
        Config(model=MODEL, dataset="d", chat_template="tokenizer_default_fallback_llama3")
    )
    source, notices = fallback.choose(bare)
    assert source == template_source("llama3")
    assert any(level == "warning" and "`<|eot_id|>`" in text for level, text in notices)
    _, notices = template_choice(Config(model=MODEL, dataset="d", chat_template="zephyr")).choose(
        bare
    )
    assert any(level == "warning" and "end-of-text token" in text for level, text in notices)


def test_a_file_a_folder_and_the_template_itself(tmp_path: Path) -> None:
    inline = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert choose(inline)[0] == inline
    (tmp_path / "mine.jinja").write_text(inline)
    assert choose(str(tmp_path / "mine.jinja"))[0] == inline
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
    assert choose(str(tmp_path))[0] == inline
    with pytest.raises(ConfigError, match="is neither the name of a template nor a file") as caught:
        choose("chatlm")
    assert "did you mean `chatml`" in caught.value.paragraph()
    with pytest.raises(ConfigError) as caught:
        choose("missing.jinja")
    assert "check the name or the path" in caught.value.paragraph()


def test_the_template_of_the_config_is_what_the_model_sees_and_is_saved(tmp_path: Path) -> None:
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
