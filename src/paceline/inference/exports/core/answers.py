"""What a model answers to the prompts of a proof, and the file that stores it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, RunError
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
        encoded: tokens of the prompt.
        prompt: the tokens that the model has read: the last ones, if there are more than it has
            positions for.
        answer: the most likely tokens after it.
        scores: logits or log-probabilities after the last tokens of the prompt and each token of
            the answer, float32 [positions, size of the vocabulary].
    """

    encoded: list[int]
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


def answer_prompts(
    engine: ProofEngine, prompts: Sequence[ProofPrompt], num_positions: int | None = None
) -> list[ProofAnswer]:
    """Return a model's answers.

    Args:
        num_positions: number of tokens that the model can read; None for no limit.

    Raises:
        ConfigError: the tokenizer gives no tokens.
        RunError: the model gives values that are not numbers.
    """
    answers = []
    for prompt in prompts:
        encoded = engine.encode(prompt)
        if not encoded:
            raise ConfigError(
                "the tokenizer of the model gives no tokens for “{text}”",
                code="export-without-tokens",
                fix="check that the files of the tokenizer, such as tokenizer.json, are in the"
                " folder of the model",
                text=prompt.turns[-1]["content"].partition("\n")[0],
            )
        longest = len(encoded) if num_positions is None else num_positions - NUM_ANSWER_TOKENS
        tokens = encoded[-max(1, longest) :]
        answer = engine.generate(tokens, NUM_ANSWER_TOKENS)
        scores = engine.scores(tokens + answer, scores_start(tokens))
        if not scores.isfinite().all():
            raise RunError(
                "the trained model answers with values that are not numbers (NaN or infinity)",
                code="export-not-finite",
                fix="export an earlier checkpoint of the run, and check the losses of the run;"
                " nothing was written",
            )
        answers.append(ProofAnswer(encoded, tokens, answer, scores))
    return answers


def save_answers(
    file: Path, prompts: Sequence[ProofPrompt], answers: Sequence[ProofAnswer], dtype: str
) -> None:
    """Write prompts and answers to a safetensors file.

    Args:
        dtype: name of the dtype in which the answers were computed.
    """
    from safetensors.torch import save_file

    records = [
        {
            "prompt": asdict(prompt),
            "encoded": answer.encoded,
            "tokens": answer.prompt,
            "answer": answer.answer,
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    scores = {str(number): answer.scores.contiguous() for number, answer in enumerate(answers)}
    save_file(scores, file, {"records": json.dumps(records), "dtype": dtype})


def answers_dtype(file: Path) -> str:
    """Return the name of the dtype in which the answers in a file were computed."""
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        return str(opened.metadata()["dtype"])


def load_answers(file: Path) -> tuple[list[ProofPrompt], list[ProofAnswer]]:
    """Read the file of :func:`save_answers`."""
    from safetensors import safe_open

    prompts, answers = [], []
    with safe_open(str(file), framework="pt") as opened:
        for number, record in enumerate(json.loads(opened.metadata()["records"])):
            prompts.append(ProofPrompt(**record["prompt"]))
            scores = opened.get_tensor(str(number))
            answers.append(
                ProofAnswer(record["encoded"], record["tokens"], record["answer"], scores)
            )
    return prompts, answers
