"""The losses of preference training, from the log-probabilities of answers.

They are the losses of TRL's trainers (``trl.DPOTrainer``, ``trl.KTOTrainer``, and
``ORPOTrainer`` and ``CPOTrainer`` of ``trl.experimental``), but as sums over the samples of a
batch: what depends on all samples of a global batch, such as the mean divergence of KTO, is an
argument (``totals``), so that the loss does not depend on how a batch is divided over ranks and
micro-batches.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import logsigmoid, relu

from paceline.config.schema import Config
from paceline.config.schema.preference import Preference

#: Values per sample by name, float [samples].
Rows = Mapping[str, torch.Tensor]
#: The sum of a metric's values over some samples, and the number of values.
Metric = tuple[torch.Tensor, torch.Tensor]
Metrics = dict[str, Metric]
#: exp of a larger number is not finite in float32 (:func:`_scores`).
_LARGEST_EXPONENT = 80.0
#: Where log(1 - exp(x)) changes its form (:func:`_log1mexp`).
_MINUS_LOG_2 = -math.log(2)


class Objective(ABC):
    """The loss of a task and its metrics.

    Attributes:
        inputs: names of the rows that the loss is computed from.
        metric_names: names of the metrics.
        total_names: names of the sums over the global batch that the loss needs.
    """

    inputs: tuple[str, ...] = (
        "chosen_logps", "rejected_logps", "chosen_tokens", "rejected_tokens",
    )  # fmt: skip
    metric_names: tuple[str, ...] = (
        "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
        "logps/chosen", "logps/rejected",
    )  # fmt: skip
    total_names: tuple[str, ...] = ()
    #: Whether the samples are single answers instead of pairs.
    has_single_answers = False
    #: Whether the log-probabilities of the model before training are needed.
    needs_reference = False
    #: Whether the cross entropy also covers the prompts of the preferred answers.
    trains_on_prompts = False

    def __init__(self, settings: Preference) -> None:
        self.settings = settings

    def totals(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Return :attr:`total_names` of these rows."""
        return {}

    @abstractmethod
    def losses(self, rows: Rows, totals: Rows) -> torch.Tensor:
        """Return the loss of each sample [samples].

        Args:
            totals: :meth:`totals` of the global batch.
        """

    @abstractmethod
    def metrics(self, rows: Rows, totals: Rows) -> Metrics:
        """Return each of :attr:`metric_names`, without gradients."""

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the metrics that are computed from the means of others."""
        return metrics

    def _pair_metrics(self, chosen: torch.Tensor, rejected: torch.Tensor, rows: Rows) -> Metrics:
        """Return the metrics of pairs with these rewards."""
        values = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
            "rewards/margins": chosen - rejected,
            "logps/chosen": rows["chosen_logps"],
            "logps/rejected": rows["rejected_logps"],
        }
        return {name: _mean_of(value) for name, value in values.items()}


class DPO(Objective):
    """Direct preference optimization (Rafailov et al., 2023) and the losses that TRL's DPOTrainer
    has for it."""

    inputs = (*Objective.inputs, "ref_chosen_logps", "ref_rejected_logps")
    needs_reference = True

    def __init__(self, settings: Preference) -> None:
        super().__init__(settings)
        self.terms = settings.losses("dpo")
        if any(name == "sft" for name, _ in self.terms):
            self.total_names = ("samples", "chosen_tokens")

    def totals(self, rows: Rows) -> dict[str, torch.Tensor]:
        tokens = rows["chosen_tokens"]
        return {"samples": torch.ones_like(tokens).sum(), "chosen_tokens": tokens.sum()}

    def _log_ratios(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            rows["chosen_logps"] - rows["ref_chosen_logps"],
            rows["rejected_logps"] - rows["ref_rejected_logps"],
        )

    def losses(self, rows: Rows, totals: Rows) -> torch.Tensor:
        chosen, rejected = self._log_ratios(rows)
        total = torch.zeros_like(chosen)
        for name, weight in self.terms:
            if name == "sft":
                share = totals["samples"] / totals["chosen_tokens"]
                losses = -rows["chosen_logps"] * share
            elif name in _OF_RATIOS:
                losses = _OF_RATIOS[name](chosen, rejected, self.settings.beta)
            else:
                scores = _scores(chosen, self.settings), _scores(rejected, self.settings)
                losses = self._of_difference(name, *scores, rows)
            total = total + weight * losses
        return total

    def _of_difference(
        self, name: str, chosen: torch.Tensor, rejected: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """Return the losses that depend on the difference of the scores of a pair."""
        beta, smoothing = self.settings.beta, self.settings.label_smoothing
        if name in ("ipo", "sigmoid_norm"):
            chosen = chosen / rows["chosen_tokens"].clamp(min=1.0)
            rejected = rejected / rows["rejected_tokens"].clamp(min=1.0)
        difference = chosen - rejected
        if name == "ipo":
            return (difference - 1 / (2 * beta)) ** 2
        logits = beta * difference
        if name == "hinge":
            return relu(1 - logits)
        if name == "robust":
            flipped = (1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)
            return -flipped / (1 - 2 * smoothing)
        if name == "exo_pair":
            right = torch.sigmoid(logits) * (logsigmoid(logits) - math.log(1 - smoothing))
            return right + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(smoothing))
        if name == "discopop":
            mix = torch.sigmoid(logits / self.settings.discopop_tau)
            return -logsigmoid(logits) * (1 - mix) + torch.exp(-logits) * mix
        return -logsigmoid(logits)  # sigmoid, sigmoid_norm

    def metrics(self, rows: Rows, totals: Rows) -> Metrics:
        chosen, rejected = (self.settings.beta * ratio for ratio in self._log_ratios(rows))
        return self._pair_metrics(chosen, rejected, rows)


def _scores(ratio: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return the derivative of the f-divergence at the likelihood ratio whose logarithm is given
    (Wang et al., 2023)."""
    kind, exponent = settings.f_divergence_type, settings.f_alpha_divergence_coef - 1.0
    if kind == "forward_kl":
        return 1 - torch.exp(-ratio)
    if kind == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if kind == "alpha_divergence" and abs(exponent) >= 1e-6:
        return (torch.exp((exponent * ratio).clamp(max=_LARGEST_EXPONENT)) - 1.0) / exponent
    return ratio


def _nca_pair(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    good, bad = beta * chosen, beta * rejected
    return -logsigmoid(good) - 0.5 * logsigmoid(-good) - 0.5 * logsigmoid(-bad)


def _bco_pair(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)


def _sppo_hard(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def _apo_zero(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)


def _apo_down(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))


#: The losses that depend on both likelihood ratios of a pair, not on their difference alone.
_OF_RATIOS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}


class ORPO(Objective):
    """Odds ratio preference optimization (Hong et al., 2024): the cross entropy of the preferred
    answers with their prompts, and the log odds ratio of the answers' mean log-probabilities."""

    inputs = (*Objective.inputs, "chosen_nll", "chosen_nll_tokens")
    metric_names = (*Objective.metric_names, "nll_loss", "log_odds_ratio", "log_odds_chosen")
    total_names = ("samples", "nll_tokens")
    trains_on_prompts = True

    def totals(self, rows: Rows) -> dict[str, torch.Tensor]:
        tokens = rows["chosen_nll_tokens"]
        return {"samples": torch.ones_like(tokens).sum(), "nll_tokens": tokens.sum()}

    def _log_odds(self, rows: Rows) -> torch.Tensor:
        chosen, rejected = _mean_logps(rows)
        return chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))

    def losses(self, rows: Rows, totals: Rows) -> torch.Tensor:
        share = totals["samples"] / totals["nll_tokens"]
        ratio = logsigmoid(self._log_odds(rows))
        return rows["chosen_nll"] * share - self.settings.beta * ratio

    def metrics(self, rows: Rows, totals: Rows) -> Metrics:
        chosen, rejected = _mean_logps(rows)
        odds, beta = self._log_odds(rows), self.settings.beta
        means = {"chosen_logps": chosen, "rejected_logps": rejected}
        return {
            **self._pair_metrics(beta * chosen, beta * rejected, means),
            "nll_loss": (rows["chosen_nll"].sum(), rows["chosen_nll_tokens"].sum()),
            "log_odds_ratio": _mean_of(logsigmoid(odds)),
            "log_odds_chosen": _mean_of(odds),
        }


class SimPO(Objective):
    """Simple preference optimization (Meng et al., 2024), with the cross entropy of the preferred
    answers if ``cpo_alpha`` is not 0."""

    def __init__(self, settings: Preference) -> None:
        super().__init__(settings)
        if settings.cpo_alpha:
            self.total_names = ("samples", "chosen_tokens")
            self.metric_names = (*Objective.metric_names, "nll_loss")

    def totals(self, rows: Rows) -> dict[str, torch.Tensor]:
        tokens = rows["chosen_tokens"]
        return {"samples": torch.ones_like(tokens).sum(), "chosen_tokens": tokens.sum()}

    def losses(self, rows: Rows, totals: Rows) -> torch.Tensor:
        settings = self.settings
        chosen, rejected = _mean_logps(rows)
        logits = settings.beta * (chosen - rejected - settings.simpo_gamma / settings.beta)
        smoothing = settings.label_smoothing
        losses = -logsigmoid(logits) * (1 - smoothing) - logsigmoid(-logits) * smoothing
        if settings.cpo_alpha:
            share = totals["samples"] / totals["chosen_tokens"]
            losses = losses - settings.cpo_alpha * rows["chosen_logps"] * share
        return losses

    def metrics(self, rows: Rows, totals: Rows) -> Metrics:
        chosen, rejected = _mean_logps(rows)
        means = {"chosen_logps": chosen, "rejected_logps": rejected}
        beta = self.settings.beta
        metrics = self._pair_metrics(beta * chosen, beta * rejected, means)
        if self.settings.cpo_alpha:
            metrics["nll_loss"] = (-rows["chosen_logps"].sum(), rows["chosen_tokens"].sum())
        return metrics


class KTO(Objective):
    """Kahneman-Tversky optimization (Ethayarajh et al., 2024) of single answers. The divergence
    from the reference model is estimated on answers to other prompts, over the global batch."""

    inputs: tuple[str, ...] = ("logps", "ref_logps", "is_desirable")
    metric_names: tuple[str, ...] = (
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
    )
    has_single_answers = True
    needs_reference = True

    def __init__(self, settings: Preference) -> None:
        super().__init__(settings)
        names = [name for name, _ in settings.losses("kto")]
        self.name = names[0]
        if self.name == "kto":
            self.inputs = (*KTO.inputs, "kl")
            self.total_names = ("samples", "kl")
            self.metric_names = (*KTO.metric_names, "kl")

    def totals(self, rows: Rows) -> dict[str, torch.Tensor]:
        return {"samples": torch.ones_like(rows["kl"]).sum(), "kl": rows["kl"].sum()}

    def _divergence(self, totals: Rows) -> torch.Tensor:
        return (totals["kl"] / totals["samples"].clamp(min=1.0)).clamp(min=0.0).detach()

    def losses(self, rows: Rows, totals: Rows) -> torch.Tensor:
        settings, ratio = self.settings, rows["logps"] - rows["ref_logps"]
        if self.name == "kto":
            divergence = self._divergence(totals)
            good = 1 - torch.sigmoid(settings.beta * (ratio - divergence))
            bad = 1 - torch.sigmoid(settings.beta * (divergence - ratio))
        else:
            good = 1 - torch.sigmoid(settings.beta * ratio)
            bad = torch.sigmoid(settings.beta * ratio)
        return torch.where(
            rows["is_desirable"] > 0,
            settings.desirable_weight * good,
            settings.undesirable_weight * bad,
        )

    def metrics(self, rows: Rows, totals: Rows) -> Metrics:
        rewards = self.settings.beta * (rows["logps"] - rows["ref_logps"])
        good = rows["is_desirable"].to(rewards.dtype)
        metrics = {}
        for name, values in (("rewards", rewards), ("logps", rows["logps"])):
            metrics[f"{name}/chosen"] = (values * good).sum(), good.sum()
            metrics[f"{name}/rejected"] = (values * (1 - good)).sum(), (1 - good).sum()
        if self.name == "kto":
            count = torch.ones_like(rewards).sum()
            metrics["kl"] = self._divergence(totals) * count, count
        return metrics

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        names = ("rewards/chosen", "rewards/rejected")
        if all(name in metrics for name in names):
            metrics["rewards/margins"] = metrics[names[0]] - metrics[names[1]]
        return metrics


def _mean_logps(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean log-probabilities of the tokens of the answers."""
    return (
        rows["chosen_logps"] / rows["chosen_tokens"],
        rows["rejected_logps"] / rows["rejected_tokens"],
    )


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for negative x, without cancellation (Mächler, 2012)."""
    return torch.where(x < _MINUS_LOG_2, torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


def _mean_of(values: torch.Tensor) -> Metric:
    return values.sum(), torch.ones_like(values).sum()


_OBJECTIVES: dict[str, type[Objective]] = {"dpo": DPO, "orpo": ORPO, "simpo": SimPO, "kto": KTO}


def make_objective(config: Config) -> Objective:
    """Return the objective of a config's task."""
    return _OBJECTIVES[config.task](config.preference)
