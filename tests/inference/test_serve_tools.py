"""Tool calls and reasoning of a model that was trained to give one answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from api_servers import serve_api, train_answer
from openai import BadRequestError

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
MESSAGES: list[Any] = [{"role": "user", "content": "Add 1 and 2."}]
ANSWER = (
    "<think>\nIt is a sum.\n</think>\n\nI add them."
    '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
)


@pytest.mark.soak
def test_tools_are_called(tmp_path: Path) -> None:
    model = train_answer(tmp_path / "calls", ANSWER, conversation=MESSAGES, tools=[TOOL])
    with serve_api(model) as server:
        completions = server.client().chat.completions
        fields: dict[str, Any] = {"model": "calls", "temperature": 0, "tools": [TOOL]}
        choice = completions.create(messages=MESSAGES, **fields).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I add them."
        assert choice.message.reasoning_content == "It is a sum."
        (call,) = choice.message.tool_calls
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}

        chunks = [*completions.create(messages=MESSAGES, stream=True, **fields)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "I add them."
        reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(reasoning) == "It is a sum."
        (streamed,) = [each for delta in deltas for each in delta.tool_calls or ()]
        assert streamed.index == 0
        assert streamed.function.arguments == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

        # the answer and the result of the call, as clients send them back
        answered = [
            *MESSAGES,
            choice.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        assert completions.create(messages=answered, max_tokens=2, **fields).choices
        none = completions.create(
            messages=MESSAGES, max_tokens=2, tool_choice="none", **fields
        ).choices[0]
        assert none.message.tool_calls is None


@pytest.mark.soak
def test_template_without_tools_refuses_them(runs: Path) -> None:
    (runs / "plain").mkdir()
    for file in (runs / "initial").iterdir():
        (runs / "plain" / file.name).symlink_to(file)
    template = runs / "plain" / "chat_template.jinja"
    template.unlink()
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with serve_api(runs / "plain") as server, pytest.raises(BadRequestError) as caught:
        server.client().chat.completions.create(
            model="plain", messages=MESSAGES, tools=[TOOL], max_tokens=1
        )
    assert caught.value.param == "tools"
