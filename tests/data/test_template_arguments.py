"""Arguments of chat templates (`enable_thinking`, …): the text and its answers for every template
of TRL, the column of a row, and the defaults of a saved tokenizer."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from commands import run
from raised import raises_error
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import TokenEntry
from paceline.data.kinds.image import ImageChatTemplate
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.data.text.chats.named_templates import FORMATS, template_source
from paceline.data.text.chats.turn_ends import shared_length
from paceline.data.text.templates import save_template, template_choice, template_key
from paceline.models.builtin import builtin_tokenizer
from paceline.tasks.preview import preview

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = [path.stem for path in sorted(FOLDER.glob("*.jinja")) if "_training" not in path.stem]
#: The switches of the templates of TRL and their values.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "enable_thinking": (True, False),
    "preserve_thinking": (True, False),
    "truncate_history_thinking": (True, False),
    "low_effort": (True, False),
    "medium_effort": (True, False),
    "reasoning_effort": ("low", "high"),
    "reasoning_strength": ("low", "high"),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|eot|>"),
    *("<｜end▁of▁sentence｜>", "<|start|>", "<|message|>", "<end_of_utterance>", "</s>"),
)
CHATS = {
    "one turn": [("user", "How are you?"), ("assistant", "Fine, thanks.")],
    "system": [("system", "Be brief."), ("user", "How are you?"), ("assistant", "Fine, thanks.")],
    "turns": [
        *(("user", "What is two?"), ("assistant", "A number."), ("user", "And three?")),
        *(("assistant", "Another one."), ("user", "Four?"), ("assistant", "Yes.")),
    ],
    "reasoning": [
        *(("user", "What is two?"), ("assistant", "A number.", "They ask for two.")),
        *(("user", "And three?"), ("assistant", "Another one.", "Now it is three.")),
    ],
    "thoughts in the content": [
        *(("user", "Two?"), ("assistant", "<think>\nFirst thought.\n</think>\n\nA number.")),
        *(("user", "Three?"), ("assistant", "<think>\nSecond thought.\n</think>\n\nAnother one.")),
    ],
}
THINKING = (
    "{% if style %}{{ style + '\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}"
    "{% endif %}{% endif %}"
)
QUESTION = {"prompt": "How are you?", "completion": "Fine."}


def messages_of(chat: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    messages = []
    for role, content, *reasoning in chat:
        message = {"role": role, "content": content}
        if reasoning:
            message |= {"reasoning_content": reasoning[0], "thinking": reasoning[0]}
        messages.append(message)
    return messages


def every_argument(template: ChatTemplate) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the switches that a template reads: unset, and each value."""
    names = [name for name in SWITCHES if name in template.argument_names]
    for values in itertools.product(*((None, *SWITCHES[name]) for name in names)):
        yield {name: value for name, value in zip(names, values, strict=True) if value is not None}


def render(source: str, chat: list[dict[str, Any]], **options: Any) -> tuple[str, list[Any]]:
    """Return the text of transformers, and the parts of its mask."""
    texts, spans = render_jinja_template([chat], chat_template=source, **SPECIAL, **options)
    return texts[0], spans[0] if spans else []


def joined(spans: list[tuple[int, int]], text: str) -> list[str]:
    """Return the marked parts of a text, those that touch as one."""
    parts: list[str] = []
    last_end = -1
    for start, end in spans:
        if start == last_end:
            parts[-1] += text[start:end]
        else:
            parts.append(text[start:end])
        last_end = end
    return parts


def bare(answer: str, template: ChatTemplate) -> str:
    """Return an answer without what the generation prompt writes and without the white space after
    its last token: TRL marks some of both."""
    header = template._turn_ends.header
    tails = (header[start:] for start in range(len(header)))
    length = next((len(tail) for tail in tails if answer.startswith(tail)), 0)
    if not length:  # the prompt begins reasoning that this answer does not have, or the reverse
        tails = (header[match.start() :] for match in re.finditer("<", header))
        shared = max((shared_length(tail, answer) for tail in tails), default=0)
        length = max(answer.rfind(end, 0, shared) + 1 for end in ">\n")
    return answer[length:].rstrip("\n")


@pytest.mark.parametrize("name", [*NAMES, *(f"named {name}" for name in FORMATS)])
def test_text_and_answers_are_those_of_transformers(name: str) -> None:
    """The text is that of `apply_chat_template`, and the answers are where a template of TRL with
    marks, if its text is the same, has them."""
    named = name.removeprefix("named ")
    source = template_source(named) if named != name else (FOLDER / f"{name}.jinja").read_text()
    marked = FOLDER / f"{name}_training.jinja"
    takes_parts = name in ("llava_next", "idefics3", "smolvlm")
    template_class = ImageChatTemplate if takes_parts else ChatTemplate
    num_texts = 0
    base = template_class(source, SPECIAL, None, CONTROL)
    for chat, arguments in itertools.product(
        map(messages_of, CHATS.values()), every_argument(base)
    ):
        template = base.with_arguments(arguments)
        try:
            rendered = template.render_with_spans(chat)
        except TemplateRefused:
            with pytest.raises(Exception, match=r".+"):
                render(source, chat, **arguments)
            continue
        num_texts += 1
        assert rendered.unplaced == 0
        given = template._converted(chat) if takes_parts else chat
        assert rendered.text == render(source, given, **arguments)[0]
        prompt = template.render(chat[:-1], add_generation_prompt=True)
        given = template._converted(chat[:-1]) if takes_parts else chat[:-1]
        assert prompt == render(source, given, add_generation_prompt=True, **arguments)[0]
        parts = [rendered.text[start:end].rstrip("\n") for start, end in rendered.spans]
        answers = [message["content"] for message in chat if message["role"] == "assistant"]
        assert len(parts) == len(answers)
        for part, answer in zip(parts, answers, strict=True):
            assert answer.split("</think>")[-1].strip() in part
        if marked.is_file() and not takes_parts:
            text, spans = render(
                marked.read_text(), chat, return_assistant_tokens_mask=True, **arguments
            )
            if text == rendered.text:
                assert parts == [bare(answer, template) for answer in joined(spans, text)]
    assert num_texts


def config_of(tmp_path: Path, rows: list[dict[str, Any]], **keys: Any) -> Config:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"chat_template": THINKING, **keys}
    return Config(model="builtin:qwen2-micro", dataset=str(tmp_path / "rows.jsonl"), **keys)


def shown(config: Config) -> list[str]:
    """Return the text of each row, with the parts that carry loss in brackets."""
    return [
        "".join(f"[{part['text']}]" if part["label"] else part["text"] for part in row["segments"])
        for row in preview(config)["rows"]
    ]


def test_arguments_of_a_row_win(tmp_path: Path) -> None:
    rows = [
        QUESTION,
        {**QUESTION, "chat_template_kwargs": {"style": "kind", "enable_thinking": None}},
        {**QUESTION, "chat_template_kwargs": '{"style": ""}'},
        {**QUESTION, "chat_template_kwargs": None},
    ]
    texts = shown(config_of(tmp_path, rows, chat_template_kwargs={"style": "terse"}))
    starts = ["terse", "kind", "<|im_start|>user", "terse"]
    assert [text.partition("\n")[0] for text in texts] == starts
    assert all(text.endswith("[Fine.<|im_end|>]\n") for text in texts)


def test_argument_that_the_template_does_not_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, [QUESTION], chat_template_kwargs={"enable_thinkin": False})
    with raises_error(ConfigError, code="unknown-template-argument", naming="enable_thinking"):
        preview(config)
    config = config_of(tmp_path, [{**QUESTION, "chat_template_kwargs": {"tools": []}}])
    with raises_error(ConfigError, code="data-of-another-method", naming="`tools`"):
        preview(config)
    config = config_of(tmp_path, [{"text": "A.", "chat_template_kwargs": {"style": "kind"}}])
    with raises_error(ConfigError, code="data-of-another-method", naming="not rendered"):
        preview(config)


def test_dropped_reasoning_is_counted(tmp_path: Path) -> None:
    chat = messages_of(CHATS["thoughts in the content"])
    source = (FOLDER / "qwen3.jinja").read_text()
    config = config_of(tmp_path, [{"messages": chat}] * 2, chat_template=source)
    entry = TokenEntry(config, "sft", builtin_tokenizer(), validation=False)
    entry.build(workers=1)
    assert any("leaves out the reasoning of 2 answers" in str(text) for _, text in entry.notices)
    (text, _) = shown(config)
    assert "First thought" not in text
    assert "Second thought" in text


def test_arguments_are_part_of_the_cache_key(tmp_path: Path) -> None:
    rows = [{**QUESTION, "completion": f"Fine {number}."} for number in range(4)]
    folders = [
        TokenEntry(
            config_of(tmp_path, rows, chat_template_kwargs=arguments),
            *("sft", builtin_tokenizer()),
            validation=False,
        ).folder
        for arguments in ({}, {"style": "kind"}, {"style": "terse"}, {"style": None})
    ]
    assert len(set(folders)) == 3
    assert folders[0] == folders[3]


def test_only_templates_without_marks_have_a_new_key(tmp_path: Path) -> None:
    """Tokens that were stored before answers were found in another way are not used."""
    marked = template_source("chatml")
    assert (
        template_key(config_of(tmp_path, [], chat_template=marked), builtin_tokenizer()) == marked
    )
    key = template_key(config_of(tmp_path, []), builtin_tokenizer())
    assert key != template_choice(config_of(tmp_path, [])).key


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "nemotron_3_nano", "llama3_2", "gemma4_v5"])
def test_saved_tokenizer_has_the_arguments_as_defaults(name: str, tmp_path: Path) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    folder = tmp_path / "saved"
    AutoTokenizer.from_pretrained(builtin_tokenizer()).save_pretrained(folder)
    arguments: dict[str, Any] = {
        "qwen3": {"enable_thinking": False},
        "gptoss": {"reasoning_effort": "high", "model_identity": 'You\'re "Ökö" 🙂\n{{ 1 }}.'},
        "nemotron_3_nano": {"enable_thinking": False, "truncate_history_thinking": False},
        "llama3_2": {"date_string": "1 May 2026", "tools_in_user_message": False},
        "gemma4_v5": {"enable_thinking": True, "preserve_thinking": True},
    }[name]
    config = config_of(tmp_path, [QUESTION], chat_template=source, chat_template_kwargs=arguments)
    save_template(config, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = messages_of(CHATS["reasoning"])
    options = {"tokenize": False, "add_generation_prompt": True}
    trained = ChatTemplate(source, tokenizer.special_tokens_map, arguments=arguments)
    assert tokenizer.apply_chat_template(chat, **options) == trained.render(chat, True)
    other = {
        key: "low" if isinstance(value, str) else not value for key, value in arguments.items()
    }
    expected = ChatTemplate(source, tokenizer.special_tokens_map, arguments=other).render(
        chat, True
    )
    assert tokenizer.apply_chat_template(chat, **options, **other) == expected
    assert trained.render(chat, True) != expected


@pytest.mark.slow
def test_run_with_another_argument_is_another_config(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text((json.dumps(QUESTION) + "\n") * 8)
    config = {
        "model": "builtin:qwen2-micro", "dataset": str(tmp_path / "rows.jsonl"), "max_steps": 2,
        "chat_template": THINKING, "chat_template_kwargs": {"style": "kind"},
        "output_dir": str(tmp_path / "run"), "parallel": {"device": "cpu", "num_gpus": 1},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run("--config", str(tmp_path / "config.yaml"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "A?"}], tokenize=False)
    assert text.startswith("kind")
    refused = run(
        *("--config", str(tmp_path / "config.yaml"), "max_steps=4"),
        "chat_template_kwargs.style=terse",
        expect=2,
    )
    assert "chat_template_kwargs.style" in refused.stderr
