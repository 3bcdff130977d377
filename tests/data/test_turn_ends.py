"""Every answer carries the loss of its end-of-turn token, also with templates that end the last
turn in another way."""

from pathlib import Path
from typing import Any

import pytest
from prepared_tokens import MODEL, loss_segments, save
from text_tokenizers import SPECIAL, make_tokenizer

from paceline.config.schema import Config
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.kinds.image import ImageChatTemplate
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import resolve_model

PROMPT = "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"


def loop(answer: str, default: str = "", user: str = "<|start|>user\n{}<|end|>\n") -> str:
    """Return a template with this text of an answer."""
    start, _, end = user.partition("{}")
    return (
        default
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ '"
        + start.replace("user", "' + m.role + '").replace("\n", "\\n")
        + "' + m.content + '"
        + end.replace("\n", "\\n")
        + "' }}{% endif %}{% endfor %}"
    )


HEADER = "{{ '<|start|>assistant\n' }}"
CALLS = "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}"
BODY = "{{ m.content }}" + CALLS
LAST = "{% if loop.last %}{{ eos_token }}{% else %}{{ '<|end|>\n' }}{% endif %}"
SYSTEM = "{% if messages[0].role != 'system' %}{{ '<|start|>system\nBe.<|end|>\n' }}{% endif %}"
#: Template, how the turns before the last one end, and how the last one ends.
TEMPLATES: dict[str, tuple[str, str, str]] = {
    "Olmo 3": (loop(HEADER + BODY + LAST, SYSTEM) + PROMPT, "<|end|>", "</s>"),
    "without system message": (loop(HEADER + BODY + LAST) + PROMPT, "<|end|>", "</s>"),
    "two tokens at the end": (
        loop(HEADER + BODY + "<|end|>{% if loop.last %}{{ eos_token }}{% else %}\n{% endif %}")
        + PROMPT,
        "<|end|>",
        "<|end|></s>",
    ),
    "nothing after the last turn": (
        loop(HEADER + BODY + "{% if not loop.last %}{{ eos_token }}{% endif %}") + PROMPT,
        "</s>",
        "",
    ),
    "end in the next question": (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + BODY
        + "{% else %}{{ ('' if loop.first else eos_token) + '[' + m.content + '] ' }}"
        + "{% endif %}{% endfor %}{% if messages[-1].role == 'assistant' %}</s>{% endif %}",
        "</s>",
        "</s>",
    ),
    "space before the end": (
        loop(BODY + "{% if loop.last %} {{ eos_token }}{% else %} <|end|>{% endif %}",
             user="<|user|>{}"),
        " <|end|>",
        " </s>",
    ),
    "marks around the content": (
        loop(HEADER + "{% generation %}" + BODY + "{% endgeneration %}" + LAST) + PROMPT,
        "<|end|>",
        "</s>",
    ),
    "marks, one end": (
        loop(HEADER + "{% generation %}" + BODY + "{% endgeneration %}<|end|>\n") + PROMPT,
        "<|end|>",
        "<|end|>",
    ),
    "no end-of-turn token": (
        loop("<|assistant|>" + BODY + "{% if loop.last %}{{ eos_token }}{% endif %}",
             user="<|user|>{}")
        + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "",
        "</s>",
    ),
    "marks, no end-of-turn token": (
        loop("<|assistant|>{% generation %}" + BODY + "{% endgeneration %}", user="<|user|>{}")
        + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "",
        "",
    ),
}  # fmt: skip
CHAT: list[Any] = [
    {"role": "user", "content": "One?"}, {"role": "assistant", "content": "First."},
    {"role": "user", "content": "First.?"}, {"role": "assistant", "content": "Second"},
    {"role": "user", "content": "b"}, {"role": "assistant", "content": "Third."},
]  # fmt: skip
CALL = {"type": "function", "function": {"name": "news", "arguments": {}}}


def spans(source: str, chat: list[Any], **settings: Any) -> list[str]:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = ChatTemplate(source, special, None, SPECIAL).render_with_spans(chat, **settings)
    assert not rendered.unplaced
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_have_their_end_of_turn(name: str) -> None:
    source, end, last = TEMPLATES[name]
    assert spans(source, CHAT) == [f"First.{end}", f"Second{end}", f"Third.{last}"]
    assert spans(source, CHAT[:2]) == [f"First.{last}"]
    system = {"role": "system", "content": "Be."}
    assert spans(source, [system, *CHAT]) == [f"First.{end}", f"Second{end}", f"Third.{last}"]
    assert spans(source, CHAT, excluded={3}) == [f"First.{end}", f"Third.{last}"]
    images = ImageChatTemplate(source, {"eos_token": "</s>"}, None, SPECIAL)
    rendered = images.render_with_spans(CHAT)
    assert rendered.text[slice(*rendered.spans[0])] == f"First.{end}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_end_tokens_are_the_first_ones_with_loss_after_an_answer(name: str) -> None:
    source, end, last = TEMPLATES[name]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected = {text.strip().replace("><", "> <").split(" ")[0] for text in (end, last) if text}
    assert ChatTemplate(source, special, None, SPECIAL).end_tokens() == sorted(expected)


def test_end_token_of_a_template_for_one_answer() -> None:
    refusal = "{% if messages | length > 2 %}{{ raise_exception('one answer') }}{% endif %}"
    source = refusal + loop(HEADER + BODY + LAST) + PROMPT
    assert ChatTemplate(source, {"eos_token": "</s>"}, None, SPECIAL).end_tokens() == ["</s>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_calls_have_their_end_of_turn(name: str) -> None:
    source, end, last = TEMPLATES[name]
    chat = [
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1"},
        CHAT[1],
        CHAT[2],
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
    ]
    if name == "end in the next question":  # this template does not show where a call begins
        chat = chat[2:]
    expected = [f"CALL news{end}", f"First.{end}", f"Wait.CALL news{last}"]
    assert spans(source, chat) == expected[-len(spans(source, chat)) :]
    assert len(spans(source, chat)) >= 2


def test_calls_that_end_in_another_way() -> None:
    """As gpt-oss: a call, an answer, and the last answer each have a token of their own."""
    end = (
        "{% if m.tool_calls %}<|call|>{% elif loop.last %}{{ eos_token }}"
        "{% else %}<|end|>{% endif %}"
    )
    source = loop("{{ '<|start|>assistant\n' }}" + BODY + end, SYSTEM) + PROMPT
    chat = [
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1"},
        *CHAT[1:4],
    ]
    assert spans(source, chat) == ["CALL news<|call|>", "First.<|end|>", "Second</s>"]
    marked = source.replace(BODY, "{% generation %}" + BODY + "{% endgeneration %}")
    assert spans(marked, chat) == ["CALL news<|call|>", "First.<|end|>", "Second</s>"]


def test_special_token_in_a_turn_is_not_its_end() -> None:
    """The history is rewritten, so the answer is found by its content, before a call."""
    source = loop(
        HEADER + "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
        "{% for c in m.tool_calls or [] %}<|tool|>{{ c.function.name }}{% endfor %}" + LAST
    )
    chat = [
        CHAT[0],
        {"role": "assistant", "content": "hm</think>First.", "tool_calls": [CALL]},
        *CHAT[2:],
    ]
    assert spans(source, chat)[0] in ("First.", "First.<|tool|>news<|end|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_end_of_turn_in_an_answer_is_not_doubled(name: str) -> None:
    source, end, last = TEMPLATES[name]
    written = {text.strip() for text in (end, last) if text and text != "<|end|></s>"}
    for token in written:
        chat = [
            {**turn, "content": turn["content"] + token} if turn["role"] == "assistant" else turn
            for turn in CHAT
        ]
        assert spans(source, chat) == spans(source, CHAT)
    # Other tokens stay.
    chat = [CHAT[0], {"role": "assistant", "content": "First.<|call|>"}]
    assert "First.<|call|>" in spans(source, chat)[0]


@pytest.mark.parametrize("kind", ["metaspace", "bytes"])
@pytest.mark.parametrize("name", ["Olmo 3", "two tokens at the end", "marks around the content"])
def test_loss_on_every_end_of_turn(name: str, kind: str, tmp_path: Path) -> None:
    source, end, last = TEMPLATES[name]
    template = tmp_path / "template.jinja"
    template.write_text(source)
    data = save(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    tokenizer = make_tokenizer(tmp_path / "tokenizer", kind)
    for turns, expected in (
        ("all", [f"First.{end}", f"Second{end}", f"Third.{last}"]),
        ("last", [f"Third.{last}"]),
    ):
        config = Config.model_validate(
            {
                "model": MODEL,
                "tokenizer": str(tokenizer),
                "dataset": data,
                "chat_template": str(template),
                "train_args": {"train_on_turns": turns},
            }
        )
        tokens = prepare_tokens(config, "sft", resolve_model)
        loss = [text for carries_loss, text in loss_segments(tokens) if carries_loss]
        assert [text.strip().replace(" ", "") for text in loss] == expected


def test_end_of_turn_that_is_not_declared_special(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = make_tokenizer(tmp_path / "tokenizer", "bytes")
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    backend.add_tokens([AddedToken("<|im_end|>", special=False), AddedToken("<think>")])
    backend.save(str(tokenizer / "tokenizer.json"))
    tokens = load_tokenizer(tokenizer).control_tokens
    assert {"<|im_end|>", "</s>"} < tokens
    assert "<think>" not in tokens
