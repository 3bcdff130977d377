"""Limits of the engine, and the options of `paceline generate` that it shares with the server."""

from pathlib import Path

import pytest
from raised import raises_error

from paceline.cli import main
from paceline.core.errors import ConfigError
from paceline.inference.chat_encoder import PromptTurn
from paceline.inference.engine.engine import AnswerPart, ChatPrompt, GenerationRequest
from paceline.inference.engine.transformers_engine import TransformersEngine
from paceline.inference.generate import generate

CHAT = ChatPrompt([PromptTurn(role="user", content="What is a tuple?")])


@pytest.fixture(scope="module")
def engine(runs: Path) -> TransformersEngine:
    return TransformersEngine.of_run(runs / "one", device="cpu")


def test_answer_ends_at_the_time_limit(engine: TransformersEngine) -> None:
    prompt = engine.encode("one", CHAT)
    parts: list[AnswerPart] = []
    request = GenerationRequest("one", prompt, 50, time_limit_s=0.0)
    end = engine.generate(request, parts.append, lambda: False)
    assert (end.reason, end.num_tokens) == ("length", 1)
    assert len(parts) == 1


def test_answer_ends_when_it_is_cancelled(engine: TransformersEngine) -> None:
    parts: list[AnswerPart] = []
    request = GenerationRequest("one", engine.encode("one", CHAT), 50)
    end = engine.generate(request, parts.append, lambda: len(parts) >= 2)
    assert end.reason == "cancelled"
    assert 2 <= end.num_tokens < 50


def test_answer_ends_at_the_context_of_the_model(engine: TransformersEngine) -> None:
    prompt = engine.encode("one", CHAT)
    assert prompt.largest_answer(10) == 10
    assert prompt.largest_answer(10**6) == 8192 - prompt.num_tokens
    with raises_error(ConfigError, code="chat-too-long"):
        engine.encode("one", "word " * 9000)
    with raises_error(ConfigError, code="empty-prompt"):
        engine.encode("one", "")


def test_template_arguments_are_checked(runs: Path) -> None:
    with raises_error(ConfigError, code="template-argument-not-read", naming="stile"):
        generate(runs / "one", "Why?", template_arguments={"stile": "brief"})
    assert main(["generate", str(runs), "Why?", "--chat-template-kwargs", "[1]"]) == 2


def test_argument_changes_the_prompt(engine: TransformersEngine) -> None:
    plain = engine.encode("one", CHAT).tokens
    brief = engine.encode("one", ChatPrompt(CHAT.turns, (), {"style": "brief"})).tokens
    absent = engine.encode("one", ChatPrompt(CHAT.turns, (), {"style": None})).tokens
    assert plain == absent != brief
