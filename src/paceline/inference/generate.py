"""Answer questions with the model of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from paceline.inference.chat_encoder import PromptTurn, read_images
from paceline.inference.engine.engine import ChatPrompt, GenerationRequest
from paceline.inference.engine.transformers_engine import TransformersEngine
from paceline.inference.loading import check_trained_length


def generate(run: Path, question: str, **settings: Any) -> str:
    """Return the answer to one question, see :func:`answer_questions`."""
    return answer_questions(run, [question], **settings)[0]


def answer_questions(
    run: Path,
    questions: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    system: str | None = None,
    seed: int = 0,
    images: Sequence[str] = (),
    template_arguments: Mapping[str, JsonValue] | None = None,
) -> list[str]:
    """Return the model's answer to each question, with its chat template if it has one.

    Args:
        temperature: temperature of sampling; 0 takes the most likely token each time.
        images: paths of images, which precede each question.
        template_arguments: variables of the chat template.
    """
    contents = read_images(images)
    engine = TransformersEngine.of_run(run)
    model = engine.models[0]
    has_template = engine.encoder(model).tokenizer.chat_template is not None
    answers = []
    for question in questions:
        turns = [PromptTurn(role="user", content=question, images=contents)]
        if system and has_template:
            turns.insert(0, PromptTurn(role="system", content=system))
        prompt = engine.encode(model, ChatPrompt(turns, (), template_arguments or {}))
        check_trained_length(engine.model, prompt.num_tokens + max_new_tokens)
        parts: list[str] = []
        engine.generate(
            GenerationRequest(model, prompt, max_new_tokens, temperature, seed=seed),
            lambda part, parts=parts: parts.append(part.text),  # type: ignore[misc]
            lambda: False,
        )
        answers.append("".join(parts).strip())
    return answers
