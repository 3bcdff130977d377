"""Answer spans in rendered chats for several styles of chat template, with transformers as the
reference."""

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.models.builtin import CHAT_TEMPLATE

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' +"
    " '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Adds a default system message if the chat has none.
WITH_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)
# Removes the reasoning of earlier answers, and adds an empty reasoning block to the last answer if
# it has none.
THINKING = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set answer = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}
            {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set thought = thought if '</think>' in m.content else '' %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought -}}
            {{- '\\n</think>\\n\\n' + answer + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + answer + '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# Llama 2 and Mistral style: no generation prompt, and the roles must alternate.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# Answers have a header, but the template ignores `add_generation_prompt`.
NO_PROMPT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
)
# The generation prompt opens a reasoning block that does not appear in the rendered chat.
OPENS_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] +"
    " '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "First.?"},  # contains the text of an answer
    {"role": "assistant", "content": "Second."},
]


def answers(source: str, chat: list[dict[str, str]]) -> list[str]:
    rendered = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render_with_spans(
        chat
    )
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize(
    "source",
    [CHATML, WITH_SYSTEM, CHAT_TEMPLATE],
    ids=["chatml", "default system message", "generation marks"],
)
def test_span_covers_answer_and_end_of_turn(source: str) -> None:
    assert answers(source, CHAT) == ["First.<|im_end|>", "Second.<|im_end|>"]
    assert answers(source, [{"role": "system", "content": "Be."}, *CHAT]) == [
        "First.<|im_end|>",
        "Second.<|im_end|>",
    ]


def test_template_without_generation_prompt() -> None:
    # The prompt ends with `[/INST]`: the model writes the space too.
    assert answers(INST, CHAT) == [" First.</s>", " Second.</s>"]
    assert answers(NO_PROMPT, CHAT) == ["First.</s>", "Second.</s>"]


def test_spans_when_template_rewrites_earlier_turns() -> None:
    chat = [
        CHAT[0],
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFirst."},
        CHAT[2],
        CHAT[3],
    ]
    assert answers(THINKING, chat) == [
        "First.<|im_end|>",
        "<think>\n\n</think>\n\nSecond.<|im_end|>",
    ]
    assert answers(THINKING, chat[:2]) == ["<think>\nhm\n</think>\n\nFirst.<|im_end|>"]
    assert answers(OPENS_THOUGHT, CHAT) == ["First.<|im_end|>", "Second.<|im_end|>"]


def test_answer_modified_by_template_is_unplaced() -> None:
    uppercase_template = (
        "{% for m in messages %}{{ m.content | upper if not loop.last else m.content }}</s>\n{%"
        " endfor %}"
    )
    rendered = ChatTemplate(uppercase_template, {}).render_with_spans(CHAT)
    assert rendered.text[slice(*rendered.spans[-1])] == "Second.</s>"
    assert (len(rendered.spans), rendered.unplaced) == (1, 1)


def test_generation_mark_is_extended_to_end_of_turn() -> None:
    source = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}</s>{% else %}{{ m.content }}\n{% endif %}{% endfor %}"  # noqa: E501
    assert answers(source, CHAT) == ["First.</s>", "Second.</s>"]


def test_spans_when_answer_equals_question() -> None:
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant")]
    for source in (CHATML, CHAT_TEMPLATE, THINKING):
        endings = answers(source, chat)
        assert [answer[-len("a<|im_end|>") :] for answer in endings] == ["a<|im_end|>"] * 2


def test_spans_when_chat_starts_with_assistant() -> None:
    for source in (CHATML, WITH_SYSTEM):
        assert answers(source, [{"role": "assistant", "content": "Hello."}, *CHAT])[0].endswith(
            "Hello.<|im_end|>"
        )


def test_template_exception_and_invalid_jinja() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        answers(INST, CHAT[1:])
    with raises_error(ConfigError, code="invalid-template"):
        ChatTemplate("{% for m in messages %}", {})


@pytest.mark.parametrize("source", [CHATML, WITH_SYSTEM, CHAT_TEMPLATE, THINKING, INST])
@pytest.mark.parametrize("prompt", [False, True])
def test_rendering_matches_transformers(source: str, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = CHAT[:-1] if prompt else CHAT
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [chat], chat_template=source, add_generation_prompt=prompt, **special
    )
    assert ChatTemplate(source, special).render(chat, prompt) == expected[0]
