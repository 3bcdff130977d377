"""`task: reward`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.collate import MetricSums
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens
from paceline.data.kinds.pair import PairKind, PreferenceSample, PreferenceTransform
from paceline.models.builtin import resolve_model
from paceline.models.classifiers.texts import REWARD_SETTINGS
from paceline.models.kinds import HeadSettings
from paceline.models.transforms.parameters import disable_dropout
from paceline.tasks.base import Prepared
from paceline.tasks.sequence_classifier import PaddedTexts, SequenceClassifierTask
from paceline.tasks.token_ids import check_token_ids

#: The metrics of TRL's RewardTrainer.
_METRICS = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")


class RewardBatch(PaddedTexts):
    """The texts with the preferred answers of a micro-batch, then those with the others.

    Args:
        margins: difference that the rewards of each pair should have, float32 [pairs].
        metric_sums: receives the metrics.
    """

    margins: torch.Tensor
    metric_sums: MetricSums


class RewardTask(SequenceClassifierTask):
    """Trains a reward model on pairs of answers: a model of transformers for sequence
    classification with one label, the reward of a prompt with an answer.

    The loss of a pair is -log sigmoid(chosen - rejected - margin) of its rewards (Bradley and
    Terry, 1952; Ouyang et al., 2022), with ``preference.center_rewards_coefficient`` plus the
    square of their sum times this coefficient, as in TRL's RewardTrainer.
    """

    unit = "pairs"
    gathers = ("chosen", "rejected", "margins")
    step_metrics = _METRICS

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        is_builtin = config.model.startswith("builtin:")
        self.default_learning_rate = 1e-4 if is_builtin or config.lora.enable else 1e-5

    def check(self) -> None:
        super().check()
        args = self.config.train_args
        for is_set, setting in (
            (args.packs_rows, f"packing_strategy: {args.packing_strategy}"),
            (args.label_smoothing_factor, f"label_smoothing_factor: {args.label_smoothing_factor}"),
            (args.train_on_inputs, "train_on_inputs: true"),
            (args.train_on_turns != "all", f"train_on_turns: {args.train_on_turns}"),
        ):
            if is_set:
                raise ConfigError(
                    "`train_args.{setting}` is not supported with `task: reward`: the loss"
                    " compares one reward per answer, and has no tokens with loss",
                    code="setting-with-reward",
                    fix="leave `train_args.{key}` out",
                    setting=setting,
                    key=setting.partition(":")[0],
                )

    def prepare(self) -> Prepared:
        """Tokenize the answers with their prompts, or find them in the token cache.

        Raises:
            ConfigError: the data or the tokenizer is invalid.
        """
        tokens = prepare_tokens(self.config, "reward", resolve_model, self.num_prepare_workers)
        check_token_ids(self.config, tokens)
        return Prepared(
            num_train=tokens.num_train,
            num_eval=tokens.num_eval,
            counts=tokens.counts,
            train_tokens=tokens.train_tokens,
            notices=list(tokens.notices),
            fingerprint=f"{tokens.train_folder.name}/{tokens.num_train}",
            handle=tokens,
        )

    @property
    def _tokens(self) -> PreparedTokens:
        tokens: PreparedTokens = self._handle
        return tokens

    @property
    def _head_settings(self) -> HeadSettings:
        return REWARD_SETTINGS

    def build_datasets(self) -> tuple[Any, Any | None]:
        return self._tokens.open(PairKind.columns, PreferenceTransform())

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self.config.preference.disable_dropout:
            disable_dropout(model)
        return model

    def collate(self, samples: Sequence[PreferenceSample]) -> RewardBatch:
        lengths = [sample["chosen_length"] for sample in samples]
        ids = [sample["input_ids"] for sample in samples]
        chosen = [row[:length] for row, length in zip(ids, lengths, strict=True)]
        rejected = [row[length:] for row, length in zip(ids, lengths, strict=True)]
        return {
            **self._padded([*chosen, *rejected]),
            "margins": torch.tensor([sample["margin"] for sample in samples]),
            "metric_sums": MetricSums(self.step_metrics),
        }

    def count(self, batch: RewardBatch) -> int:
        return int(batch["margins"].shape[0])

    def loss(self, model: nn.Module, batch: RewardBatch) -> torch.Tensor:
        """Return the sum of the losses of the pairs, and record their metrics."""
        chosen, rejected = self._rewards(model, batch)
        with torch.no_grad():
            count = torch.ones_like(chosen).sum()
            metrics = _metrics(chosen, rejected)
            batch["metric_sums"].record(
                {name: (value * count, count) for name, value in metrics.items()}
            )
        return self._losses(chosen, rejected, batch["margins"]).sum()

    def evaluate(self, model: nn.Module, batch: RewardBatch) -> dict[str, torch.Tensor]:
        """Return the rewards and the margin of each pair."""
        chosen, rejected = self._rewards(model, batch)
        return {"chosen": chosen, "rejected": rejected, "margins": batch["margins"]}

    def metric_names(self, prepared: Prepared) -> list[str]:
        return ["loss", *_METRICS]

    def metrics(self, gathered: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the loss and the metrics over all pairs."""
        chosen, rejected, margins = (gathered[name] for name in self.gathers)
        metrics = {"loss": self._losses(chosen, rejected, margins).mean()}
        metrics |= _metrics(chosen, rejected)
        return {name: float(value) for name, value in metrics.items()}

    def _rewards(self, model: nn.Module, batch: RewardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards of the preferred answers and of the others, float32 [pairs] each."""
        chosen, rejected = self._logits(model, batch).squeeze(-1).chunk(2)
        return chosen, rejected

    def _losses(
        self, chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of each pair [pairs]."""
        losses = -logsigmoid(chosen - rejected - margins)
        coefficient = self.config.preference.center_rewards_coefficient
        return losses + coefficient * (chosen + rejected) ** 2 if coefficient else losses


def _metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each of :data:`_METRICS` over these pairs."""
    rewards = torch.cat([chosen, rejected])
    values = (
        (chosen > rejected).to(chosen.dtype).mean(),
        (chosen - rejected).mean(),
        rewards.min(),
        rewards.mean(),
        rewards.max(),
    )
    return dict(zip(_METRICS, values, strict=True))
