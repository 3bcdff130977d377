"""Compare an exported model's answers to the trained model's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from paceline.inference.exports.core.answers import ProofAnswer
from paceline.inference.exports.core.forms import ProofEngine, ProofLimit, ProofPrompt

if TYPE_CHECKING:
    import torch


class ProofFigures(TypedDict):
    """How an exported model differs from the trained model.

    ``encodes_equal``: whether all prompts have the same tokens. ``tokens_equal``: whether the most
    likely answers have, too. ``max_logit_diff``: largest difference of a logit (or of a
    log-probability, if the engine gives those), relative to the largest logit. ``mean_kl``: mean
    Kullback-Leibler divergence of the next token's distribution from the trained model's.
    ``top1_agreement``: share of positions with the same most likely token.
    """

    engine: str
    encodes_equal: bool
    tokens_equal: bool
    max_logit_diff: float
    mean_kl: float
    top1_agreement: float


class ProofRecord(TypedDict):
    """The proof in the output of ``paceline export --json``; see :class:`ProofFigures`.
    ``prompts``: their number. ``ok``: null, with a reason, if no engine could read the export."""

    engine: str | None
    prompts: int
    tokens_equal: bool | None
    max_logit_diff: float | None
    mean_kl: float | None
    top1_agreement: float | None
    limit: float
    ok: bool | None
    reason: str | None


def compare(
    engine: ProofEngine, prompts: Sequence[ProofPrompt], expected: Sequence[ProofAnswer]
) -> ProofFigures:
    """Run the prompts through an exported model, and compare it to the trained model. Scores are
    compared for the trained model's tokens."""
    import torch

    encodes, answers = [], []
    differences, largest = [], []
    divergences: list[torch.Tensor] = []
    matches: list[torch.Tensor] = []
    for prompt, answer in zip(prompts, expected, strict=True):
        tokens = engine.encode(prompt)
        encodes.append(tokens == answer.encoded)
        answers.append(engine.generate(answer.prompt, len(answer.answer)) == answer.answer)
        scores = engine.scores(answer.tokens, answer.start)
        trained = answer.scores.double()[:, : scores.shape[1]]
        scores = scores.double()[:, : trained.shape[1]]
        log_trained, log_scores = trained.log_softmax(-1), scores.log_softmax(-1)
        errors = log_scores - log_trained if engine.is_normalized else scores - trained
        differences.append(float(errors.abs().max()))
        largest.append(float(answer.scores.abs().max()))
        divergences.append((log_trained.exp() * (log_trained - log_scores)).sum(-1))
        matches.append(scores.argmax(-1) == trained.argmax(-1))
    # Unlike Python's max(), torch's keeps a value that is not a number.
    difference = float(torch.tensor(differences, dtype=torch.float64).max())
    return ProofFigures(
        engine=engine.name,
        encodes_equal=all(encodes),
        tokens_equal=all(encodes) and all(answers),
        max_logit_diff=difference / max(*largest, 1e-30),
        mean_kl=float(torch.cat(divergences).mean()),
        top1_agreement=float(torch.cat(matches).double().mean()),
    )


@dataclass(frozen=True)
class ProofCheck:
    """The outcome of a proof.

    Args:
        figures: how the exported model differs; None if no engine can read it.
        num_prompts: number of prompts.
        limit: largest accepted difference.
        reason: why no engine can read the export.
    """

    figures: ProofFigures | None
    num_prompts: int
    limit: ProofLimit
    reason: str | None = None

    @property
    def is_ok(self) -> bool | None:
        """Whether the difference is within the limit; None if it is not known."""
        if self.figures is None:
            return None
        value = self._measured(self.figures)
        # A difference that is not a number is not below a limit.
        return self.figures["encodes_equal"] and value <= self.limit.value

    def _measured(self, figures: ProofFigures) -> float:
        is_kl = self.limit.measure == "kl"
        return figures["mean_kl"] if is_kl else figures["max_logit_diff"]

    def record(self) -> ProofRecord:
        """Return the entry for the output of the command."""
        figures = self.figures

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return ProofRecord(
            engine=None if figures is None else figures["engine"],
            prompts=self.num_prompts,
            tokens_equal=None if figures is None else figures["tokens_equal"],
            max_logit_diff=None if figures is None else finite(figures["max_logit_diff"]),
            mean_kl=None if figures is None else finite(figures["mean_kl"]),
            top1_agreement=None if figures is None else finite(figures["top1_agreement"]),
            limit=self.limit.value,
            ok=self.is_ok,
            reason=self.reason,
        )

    def text(self) -> str:
        """Return a description for the terminal."""
        figures = self.figures
        if figures is None:
            return f"not checked: {self.reason}"
        if not figures["encodes_equal"]:
            return f"{figures['engine']} encodes a prompt as other tokens than the trained model"
        names = {
            "logits": "logits differ by at most {:.2g} of the largest logit",
            "kl": "the mean KL divergence of the next token is {:.2g}",
        }
        measured = names[self.limit.measure].format(self._measured(figures))
        same = "the same" if figures["tokens_equal"] else "not all the same"
        return (
            f"{measured} (limit: {self.limit.value:g}), the most likely token is the same at"
            f" {figures['top1_agreement']:.1%} of the positions, and the answers to"
            f" {self.num_prompts} prompts are {same} ({figures['engine']})"
        )
