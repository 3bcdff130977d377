"""What a model answers to the prompts of a proof, and the file that stores it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.inference.exports.core.forms import ProofEngine, ProofPrompt

if TYPE_CHECKING:
    import torch

#: Number of tokens that a model continues each prompt with.
NUM_ANSWER_TOKENS = 16
#: Number of a prompt's last tokens after which logits are compared.
_NUM_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class ProofAnswer:
    """A model's answer to a prompt.

    Args:
        prompt: tokens of the prompt.
        answer: the most likely tokens after it.
        scores: logits or log-probabilities after the last tokens of the prompt and each token of
            the answer, float32 [positions, size of the vocabulary].
    """

    prompt: list[int]
    answer: list[int]
    scores: torch.Tensor

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def start(self) -> int:
        """Position of the first token whose scores are known."""
        return scores_start(self.prompt)


def max_answers_bytes(vocabulary_size: int, num_prompts: int = 4) -> int:
    """Return the largest size of the stored answers of a language model."""
    return num_prompts * (_NUM_PROMPT_TOKENS + NUM_ANSWER_TOKENS) * vocabulary_size * 4


def scores_start(prompt: list[int]) -> int:
    """Return the position of a prompt's first token after which scores are compared."""
    return max(0, len(prompt) - _NUM_PROMPT_TOKENS)


def answer_prompts(engine: ProofEngine, prompts: Sequence[ProofPrompt]) -> list[ProofAnswer]:
    """Return a model's answers."""
    answers = []
    for prompt in prompts:
        tokens = engine.encode(prompt)
        answer = engine.generate(tokens, NUM_ANSWER_TOKENS)
        scores = engine.scores(tokens + answer, scores_start(tokens))
        answers.append(ProofAnswer(tokens, answer, scores))
    return answers


def save_answers(
    file: Path, prompts: Sequence[ProofPrompt], answers: Sequence[ProofAnswer]
) -> None:
    """Write prompts and answers to a safetensors file."""
    from safetensors.torch import save_file

    records = [
        {"prompt": asdict(prompt), "tokens": answer.prompt, "answer": answer.answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    scores = {str(number): answer.scores.contiguous() for number, answer in enumerate(answers)}
    save_file(scores, file, {"records": json.dumps(records)})


def load_answers(file: Path) -> tuple[list[ProofPrompt], list[ProofAnswer]]:
    """Read the file of :func:`save_answers`."""
    from safetensors import safe_open

    prompts, answers = [], []
    with safe_open(str(file), framework="pt") as opened:
        for number, record in enumerate(json.loads(opened.metadata()["records"])):
            prompts.append(ProofPrompt(**record["prompt"]))
            scores = opened.get_tensor(str(number))
            answers.append(ProofAnswer(record["tokens"], record["answer"], scores))
    return prompts, answers
