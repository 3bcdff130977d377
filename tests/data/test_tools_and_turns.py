"""History, tools, reasoning, and turns whose loss is disabled by the data or the config."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import data_line
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens
from paceline.data.sources.rows import MalformedRow, Unsupported
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.formats import RowConverter
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import resolve_model

MODEL = "builtin:qwen2-micro"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' +"
    " '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def prepare(path: Path, rows: list[Any], task: Any = "sft", **settings: Any) -> PreparedTokens:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return prepare_tokens(
        Config(**{"model": MODEL, "dataset": str(path), **settings}), task, resolve_model
    )


def expect_error(path: Path, rows: list[Any], **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(path, rows, **settings)
    return str(caught.value)


def loss_segments(tokens: PreparedTokens, index: int = 0) -> list[tuple[bool, str]]:
    """Return the sample as a list of (carries loss, text) for consecutive tokens."""
    tokenizer = load_tokenizer(Path(tokens.tokenizer_path))
    sample = TokenDataset(tokens.train_folder)[index]
    edges = [0, *(np.flatnonzero(np.diff(sample["labels_mask"])) + 1), len(sample["input_ids"])]
    return [
        (
            bool(sample["labels_mask"][start]),
            tokenizer.decode(sample["input_ids"][start:end].tolist()),
        )
        for start, end in pairwise(edges)
    ]


def loss_texts(tokens: PreparedTokens, index: int = 0) -> list[str]:
    return [text.strip() for carries_loss, text in loss_segments(tokens, index) if carries_loss]


def write_template(folder: Path, source: str) -> str:
    (folder / "t.jinja").write_text(source)
    return str(folder / "t.jinja")


def chat(**flags: Any) -> dict[str, Any]:
    return {"messages": [
        {"role": "user", "content": "One?"}, {"role": "assistant", "content": "First.", **flags},
        {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Second."},
    ]}  # fmt: skip


# -- loss per turn
@pytest.mark.parametrize("has_marks", [True, False], ids=["generation marks", "prefixes"])
@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}, {"training": 0}]
)
def test_turn_disabled_in_data_carries_no_loss(
    tmp_path: Path, flag: dict[str, Any], has_marks: bool
) -> None:
    settings = {} if has_marks else {"chat_template": write_template(tmp_path, CHATML)}
    tokens = prepare(tmp_path / "a.jsonl", [chat(**flag), chat()], **settings)
    assert loss_texts(tokens) == ["Second.<|im_end|>"]
    assert loss_texts(tokens, 1) == ["First.<|im_end|>", "Second.<|im_end|>"]
    assert tokens.counts.excluded_turns == 1
    assert tokens.counts.as_dict()["excluded_turns"] == 1
    assert "1 turns without loss" in data_line(tokens.counts.as_dict())
    assert any(
        "1 assistant turns carry no loss (disabled in the data)" in text
        for _, text in tokens.notices
    )


def test_flags_that_keep_loss_enabled(tmp_path: Path) -> None:
    for flag in ({"weight": 1}, {"loss": True}, {"train": None}, {"weight": "1"}):
        tokens = prepare(tmp_path / "a.jsonl", [chat(**flag)])
        assert len(loss_texts(tokens)) == 2
        assert "excluded_turns" not in tokens.counts.as_dict()
    user = chat()
    user["messages"][0]["weight"] = 1  # OpenAI's weight applies only to answers
    assert len(loss_texts(prepare(tmp_path / "a.jsonl", [user]))) == 2


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"weight": 0.5}, "loss weights of turns are not supported"),
        ({"loss_scale": 2}, "loss weights of turns are not supported"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]},
            "select parts of a turn",
        ),
    ],
)
def test_rejects_fractional_weights_and_partial_turns(flag: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        RowConverter("here")(chat(**flag))


def test_rejects_loss_on_user_turns() -> None:
    row = chat()
    row["messages"][0]["train"] = True
    with pytest.raises(Unsupported, match="role `user`"):
        RowConverter("here")(row)
    RowConverter("here", ignore_columns=["train"])(row)


def test_renamed_loss_flag_column(tmp_path: Path) -> None:
    source = {"path": str(tmp_path / "a.jsonl"), "columns": {"weight": "learn"}}
    tokens = prepare(tmp_path / "a.jsonl", [chat(learn=False)], dataset=source)
    assert loss_texts(tokens) == ["Second.<|im_end|>"]


def test_train_on_last_turn_only(tmp_path: Path) -> None:
    all_turns = prepare(tmp_path / "a.jsonl", [chat(), chat(weight=0)])
    for settings in ({}, {"chat_template": write_template(tmp_path, CHATML)}):
        tokens = prepare(
            tmp_path / "a.jsonl",
            [chat(), chat(weight=0)],
            train_args={"train_on_turns": "last"},
            **settings,
        )
        assert loss_texts(tokens) == loss_texts(tokens, 1) == ["Second.<|im_end|>"]
        assert tokens.counts.excluded_turns == 2
        assert tokens.train_folder != all_turns.train_folder
    with pytest.raises(ValidationError, match="keep one of them"):
        Config(
            model=MODEL, dataset="x", train_args={"train_on_turns": "last", "train_on_inputs": True}
        )
    with pytest.raises(ValidationError, match="task: pretrain"):
        Config(model=MODEL, dataset="x", task="pretrain", train_args={"train_on_turns": "last"})


def test_train_on_inputs_excludes_disabled_turns(tmp_path: Path) -> None:
    tokens = prepare(tmp_path / "a.jsonl", [chat(weight=0)], train_args={"train_on_inputs": True})
    assert [text for carries_loss, text in loss_segments(tokens) if not carries_loss] == [
        "First.<|im_end|>"
    ]


def test_chat_without_loss_is_dropped_and_pretraining_rejects_flags(tmp_path: Path) -> None:
    disabled = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "weight": 0},
        ]
    }
    assert prepare(tmp_path / "a.jsonl", [chat(), disabled]).counts.dropped == {
        "the loss is disabled for every turn": 1
    }
    assert "trains on every token" in expect_error(
        tmp_path / "b.jsonl", [disabled], task="pretrain"
    )


def test_several_generation_marks_in_one_turn() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}A:{% endgeneration"
        " %}|{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{%"
        " endif %}{% endfor %}"
    )
    rendered = ChatTemplate(source, {"eos_token": "</s>"}).render_with_spans(
        chat()["messages"], excluded={1}
    )
    assert [rendered.text[start:end] for start, end in rendered.spans] == ["A:", "Second.</s>"]
    assert [rendered.text[start:end] for start, end in rendered.excluded] == ["A:", "First.</s>"]


# -- history
@pytest.mark.parametrize(
    "names", [("query", "response"), ("prompt", "completion"), ("instruction", "output")]
)
@pytest.mark.parametrize(
    "history",
    [
        [["q", "a"]], '[["q", "a"]]',
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        [{"human": "q", "assistant": "a"}],
    ],
)  # fmt: skip
def test_history_is_converted_to_turns(names: tuple[str, str], history: Any) -> None:
    sample = RowConverter("here")(
        {names[0]: "now", names[1]: "then", "history": history, "system": "be"}
    )
    assert [(message["role"], message["content"]) for message in sample.messages or []] == [
        ("system", "be"), ("user", "q"), ("assistant", "a"), ("user", "now"), ("assistant", "then"),
    ]  # fmt: skip


def test_alternative_keys_and_roles_of_conversations() -> None:
    share = {"conversation": [{"human": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}]}
    assert [message["content"] for message in RowConverter("here")(share).messages or []] == [
        "q",
        "a",
        "r",
        "b",
    ]
    mixed = {
        "messages": None,
        "conversations": [{"from": "Human", "content": "q"}, {"role": "GPT", "value": "a"}],
    }
    assert [message["role"] for message in RowConverter("here")(mixed).messages or []] == [
        "user",
        "assistant",
    ]
    named = RowConverter("here", roles={"assistant": ["bot9000"], "user": "visitor"})
    sample = named(
        {"conversations": [{"from": "visitor", "value": "q"}, {"from": "bot9000", "value": "a"}]}
    )
    assert [message["role"] for message in sample.messages or []] == ["user", "assistant"]
    with raises_error(ConfigError, code="unknown-role"):
        RowConverter("here", roles={"robot": "x"})


# -- tools
TOOL = {"name": "news", "description": "Get the news.", "parameters": {"type": "object"}}
GLAIVE = {
    "conversations": [
        {"from": "human", "value": "News?"},
        {"from": "function_call", "value": '{"name": "news", "arguments": {"country": "US"}}'},
        {"from": "observation", "value": '{"headline": "Rain"}'},
        {"from": "gpt", "value": "It rains."},
    ],
    "tools": json.dumps([TOOL]),
}
OPENAI = {
    "messages": [
        {"role": "user", "content": "News?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "news", "arguments": '{"country": "US"}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"headline": "Rain"}'},
        {"role": "assistant", "content": "It rains."},
    ],
    "tools": [{"type": "function", "function": TOOL}],
}
SWIFT = {
    "messages": [
        {"role": "user", "content": "News?"},
        {"role": "tool_call", "content": '{"name": "news", "arguments": {"country": "US"}}'},
        {"role": "tool_response", "content": '{"headline": "Rain"}'},
        {"role": "assistant", "content": "It rains."},
    ],
    "tools": [TOOL],
}
LEGACY = {
    "messages": [
        {"role": "user", "content": "News?"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "news", "arguments": '{"country": "US"}'},
        },
        {"role": "function", "name": "news", "content": '{"headline": "Rain"}'},
        {"role": "assistant", "content": "It rains."},
    ],
    "functions": [TOOL],
}


@pytest.mark.parametrize(
    "row", [GLAIVE, OPENAI, SWIFT, LEGACY], ids=["LLaMA-Factory", "OpenAI", "ms-swift", "functions"]
)
def test_tools_and_calls_are_rendered_by_chat_template(tmp_path: Path, row: dict[str, Any]) -> None:
    tokens = prepare(tmp_path / "a.jsonl", [row])
    assert tokens.counts.dropped == {}
    assert loss_texts(tokens) == [
        '<tool_call>{"name": "news", "arguments": {"country": "US"}}</tool_call><|im_end|>',
        "It rains.<|im_end|>",
    ]  # fmt: skip
    prompt = loss_segments(tokens)[0][1]
    assert '"description": "Get the news."' in prompt
    assert '<|im_start|>tool\n{"headline": "Rain"}<|im_end|>' in loss_segments(tokens)[2][1]


CALLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("[{{ c.function.name }}] {{ c.function.arguments | tojson }}", '[news] {"country": "US"}'),
        ("{{ c.function.arguments }}", '{"country": "US"}'),
        ("{{ 'a: ' + c.function.arguments }}", 'a: {"country": "US"}'),
        (
            (
                "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{"
                " c.function.name }}"
            ),
            "news",
        ),
    ],
    ids=["mapping", "printed", "concatenated", "short ids"],
)
def test_templates_receive_calls_in_the_form_they_expect(
    tmp_path: Path, call: str, expected: str
) -> None:
    source = CALLS.replace("CALL", call)
    tokens = prepare(tmp_path / "a.jsonl", [OPENAI], chat_template=write_template(tmp_path, source))
    assert loss_texts(tokens) == [f"{expected}<|im_end|>", "It rains.<|im_end|>"]


def test_span_of_call_includes_end_of_turn() -> None:
    """Holds even if tools change the text before the call, as in Mistral's template. The span does
    not include the white space after the token."""
    source = (
        "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}{% for m in"
        " messages %}{% if m.role == 'user' %}{% if tools and m == last %}TOOLS{% endif %}[{{"
        " m.content }}]{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{"
        " c.function.name }}{% endfor %}</s>\n{% endif %}{% endfor %}"
    )
    messages = [
        *OPENAI["messages"],
        {"role": "user", "content": "Ok?"},
        {"role": "assistant", "content": "Yes."},
    ]
    sample = RowConverter("here", template=ChatTemplate(source, {}))(
        {**OPENAI, "messages": messages}
    )
    rendered = ChatTemplate(source, {}).render_with_spans(sample.messages or [], sample.tools)
    assert [rendered.text[start:end] for start, end in rendered.spans] == [
        "CALL news</s>",
        "It rains.</s>",
        "Yes.</s>",
    ]


def test_parallel_calls_and_preceding_answer_form_one_turn() -> None:
    call = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "Wait."},
            call,
            call,
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "a"},
        ]
    }
    messages = RowConverter("here")(row).messages or []
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert (messages[1]["content"], len(messages[1]["tool_calls"])) == ("Wait.", 2)
    assert [call["id"] for call in messages[1]["tool_calls"]] == [
        message["tool_call_id"] for message in messages[2:4]
    ]


def test_formats_of_tool_calls() -> None:
    def parse_calls(value: Any) -> Any:
        row = {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "function_call", "content": value},
            ]
        }
        return [
            call["function"] for call in (RowConverter("here")(row).messages or [])[1]["tool_calls"]
        ]

    call = {"name": "f", "arguments": {"a": 1}}
    assert parse_calls(json.dumps([call, call])) == [call, call]
    assert parse_calls("{'name': 'f', 'arguments': '{\"a\": 1}'}") == [call]
    assert parse_calls(f"{json.dumps(call)}\n{json.dumps(call)}") == [call, call]
    assert parse_calls('{"name": "f"}') == [{"name": "f", "arguments": {}}]
    with pytest.raises(MalformedRow, match="without a name"):
        parse_calls("{}")


def test_error_for_template_without_tool_support(tmp_path: Path) -> None:
    plain = write_template(tmp_path, CHATML)
    message = expect_error(tmp_path / "a.jsonl", [OPENAI], chat_template=plain)
    assert "the chat template does not use `tool_calls`" in message
    only_tools = {"messages": chat()["messages"], "tools": [TOOL]}
    message = expect_error(tmp_path / "a.jsonl", [only_tools], chat_template=plain)
    assert "the chat template does not use `tools`" in message
    assert "`ignore_columns: [tools]`" in message
    assert (
        prepare(
            tmp_path / "a.jsonl", [only_tools], chat_template=plain, ignore_columns=["tools"]
        ).counts.kept
        == 1
    )


def test_chats_with_tools_use_tokenizer_template_instead_of_named_one(
    tmp_path: Path,
) -> None:
    tokens = prepare(tmp_path / "a.jsonl", [GLAIVE, chat()], chat_template="qwen")
    assert loss_texts(tokens)[0].startswith('<tool_call>{"name": "news"')
    assert "You are Qwen" not in loss_segments(tokens)[0][1]
    assert "You are Qwen" in loss_segments(tokens, 1)[0][1]
    assert any(
        text.startswith("1 chats with tools or reasoning use the tokenizer's chat template")
        for _, text in tokens.notices
    )
    assert "does not use `tool_calls`" in expect_error(
        tmp_path / "a.jsonl", [GLAIVE], chat_template="gemma"
    )


# -- reasoning
@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "reasoning_content": "hm"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "thinking": "hm"},
            ]
        },
        {"query": "q", "response": "a", "reasoning_content": "hm"},
        {"instruction": "q", "output": "a", "reasoning_content": "hm"},
    ],
)
def test_reasoning_is_passed_to_chat_template(tmp_path: Path, row: dict[str, Any]) -> None:
    assert loss_texts(prepare(tmp_path / "a.jsonl", [row])) == [
        "<think>\nhm\n</think>\n\na<|im_end|>"
    ]
    plain = write_template(tmp_path, CHATML)
    assert "does not use `reasoning_content`" in expect_error(
        tmp_path / "a.jsonl", [row], chat_template=plain
    )


# -- end of turn
def test_missing_end_of_turn_warning_ignores_white_space(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%"
        " generation %}{{ m.content }}END\n{% endgeneration %}{% else %}{{ m.content"
        " }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    for end, is_reported in (("<|im_end|>", False), ("", True), (" Over.", True)):
        path = write_template(tmp_path, source.replace("END\n", f"{end}" + "{{ '\n' }}"))
        tokens = prepare(tmp_path / "a.jsonl", [chat()], chat_template=path)
        assert any("no end-of-turn token" in text for _, text in tokens.notices) is is_reported
