"""Chat templates for Ollama, rendered by Go, give the texts of their Jinja originals."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from not_run import skip_with_summary
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.chats.named_templates import FORMATS, template_source
from paceline.data.text.qwen_tokenizer import CHATML_TEMPLATE
from paceline.inference.exports.ollama.go_template import (
    BUILTIN,
    QWEN,
    go_template,
    template_name,
)
from paceline.inference.exports.ollama.ollama_form import modelfile, template_of
from paceline.models.builtin import CHAT_TEMPLATE, builtin_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SOURCES = {
    **{name: template_source(name) for name in FORMATS},
    BUILTIN: CHAT_TEMPLATE,
    QWEN: CHATML_TEMPLATE,
}
QUESTION = {"role": "user", "content": 'Is "5 % {} \\n" a\ttext?\n\n是的 <b>'}
ANSWER = {"role": "assistant", "content": "Yes — `{{ .Content }}` & more"}
SYSTEM = {"role": "system", "content": "Be brief, 100 %."}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
CALL = {"function": {"name": "weather", "arguments": {"city": "Kraków", "days": 2}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "several turns": [QUESTION, ANSWER, {"role": "user", "content": "Why?"}],
    "system and turns": [SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER, QUESTION],
    "tool": [QUESTION, ANSWER, {"role": "tool", "content": '{"degrees": 3}'}, ANSWER, QUESTION],
}
TOOL_CHATS: dict[str, list[dict[str, Any]]] = {
    "tools": [QUESTION],
    "tools and system": [SYSTEM, QUESTION, ANSWER, QUESTION],
    "calls": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}],
    "call after text": [
        QUESTION,
        {"role": "assistant", "content": "Look:", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
    ],
    "thinking": [
        QUESTION,
        {"role": "assistant", "content": "Yes", "thinking": "Hm.", "reasoning_content": "Hm."},
        QUESTION,
    ],
}


@pytest.fixture(scope="module")
def render(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that renders cases with Go."""
    go = shutil.which("go")
    if go is None:
        skip_with_summary(request.config, "go", "of Ollama's templates need go, which is not here")
    folder = tmp_path_factory.mktemp("go")
    program = folder / "render"
    environment = {
        "PATH": str(Path(go).parent),
        "HOME": str(folder),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
    }
    source = Path(__file__).with_name("render.go")
    subprocess.run([go, "build", "-o", program, source], check=True, env=environment)

    def run(cases: list[dict[str, Any]]) -> list[str]:
        result = subprocess.run([program], input=json.dumps(cases), capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-2000:]
        texts: list[str] = json.loads(result.stdout)
        return texts

    return run


def render_jinja(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    template = ChatTemplate(source, TOKENS)
    return template.render(messages, add_generation_prompt=True, **variables)


def test_named_templates_are_equal_in_go(render: Any) -> None:
    cases, expected = [], []
    for name, source in SOURCES.items():
        text = go_template(name, TOKENS["bos_token"], TOKENS["eos_token"], False).source
        for chat, messages in CHATS.items():
            cases.append({"template": text, "messages": messages, "tools": []})
            expected.append((name, chat, render_jinja(source, messages)))
    for (name, chat, text), rendered in zip(expected, render(cases), strict=True):
        assert rendered == text, (name, chat)


def test_first_token_is_left_to_the_tokenizer_that_adds_it(render: Any) -> None:
    template = go_template("llama3", "<s>", "</s>", True)
    (text,) = render([{"template": template.source, "messages": [QUESTION], "tools": []}])
    assert "<s>" + text == render_jinja(SOURCES["llama3"], [QUESTION])


def test_builtin_template_has_tools_and_thinking(render: Any) -> None:
    template = go_template(BUILTIN, "", "", False).source
    texts = render(
        [
            {"template": template, "messages": messages, "tools": [TOOL]}
            for messages in TOOL_CHATS.values()
        ]
    )
    for (chat, messages), text in zip(TOOL_CHATS.items(), texts, strict=True):
        expected = render_jinja(CHAT_TEMPLATE, messages, tools=[TOOL])
        assert _without_layout(text) == _without_layout(expected), chat


def _without_layout(text: str) -> str:
    """Return a text without the spaces of JSON, and with its keys sorted: Go's differ."""

    def sort(match: re.Match[str]) -> str:
        return json.dumps(json.loads(match[0]), sort_keys=True)

    return re.sub(r"(?m)^\{.*\}$|(?<=<tool_call>)\{(?!.*\.\.\.).*\}(?=</tool_call>)", sort, text)


@pytest.mark.parametrize("name", SOURCES)
def test_templates_are_recognized(name: str) -> None:
    found = template_name(SOURCES[name])
    assert found is not None
    assert SOURCES[found] == SOURCES[name]


def test_other_templates_are_refused(tmp_path: Path) -> None:
    shutil.copytree(builtin_tokenizer(), tmp_path / "model")
    with (tmp_path / "model" / "chat_template.jinja").open("w") as file:
        file.write(CHAT_TEMPLATE + "!")
    with raises_error(ConfigError, code="ollama-template") as raised:
        template_of(tmp_path / "model")
    assert "text/template" in str(raised.value)


def test_modelfile_names_file_template_and_stops() -> None:
    text = modelfile("m.gguf", go_template("qwen2", "", "", False))
    lines = text.splitlines()
    assert lines[0] == "FROM ./m.gguf"
    assert lines[1].startswith('TEMPLATE """{{')
    assert lines[2] == 'SYSTEM """You are a helpful assistant."""'
    assert lines[3] == 'PARAMETER stop "<|im_end|>"'
