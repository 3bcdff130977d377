"""Compute the rewards of this rank's completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch

from paceline.config.schema import Config
from paceline.config.schema.rewards import RewardEntry, reward_labels
from paceline.data.kinds.prompt import PromptRow
from paceline.distributed.devices import cpu_cores
from paceline.distributed.timing.progress import ProgressTracker
from paceline.rewards.environment_session import EnvironmentSession
from paceline.rewards.group import CompletionGroup, Content
from paceline.rewards.reward_model import RewardModel
from paceline.rewards.scorer import RewardScorer
from paceline.rollouts.decoding import Completion
from paceline.rollouts.records import RolloutGroup
from paceline.train.rollouts.engines.base import PromptTokens

#: Largest number of processes that compute rewards for a rank, if the config sets none.
_MAX_WORKERS = 8
#: Seconds that the start of the processes may take until the other ranks worry.
_START_S = 360.0


class GroupScorer:
    """Computes the rewards of groups of completions: functions and built-in rewards in processes of
    their own, which start with the first group, and reward models on this rank's device.

    Args:
        text_of: function that returns the text of token ids without special tokens.
        prompt_text_of: function that returns it with special tokens.
        device: device of the reward models.
        num_ranks: number of ranks of this host, which share its cores.

    Attributes:
        names, weights: name and weight of each reward.
        spent_s: seconds spent so far.
    """

    def __init__(
        self,
        config: Config,
        text_of: Callable[[list[int]], str],
        prompt_text_of: Callable[[list[int]], str],
        device: torch.device,
        num_ranks: int,
        progress: ProgressTracker,
    ) -> None:
        self.settings, self.rewards = config.grpo, config.rewards
        self.names = reward_labels(config.rewards)
        self.weights = [reward.weight for reward in config.rewards]
        self.prompt_text_of = prompt_text_of
        self.text_of, self.device, self.progress = text_of, device, progress
        self.spent_s = 0.0
        self._num_workers = config.grpo.reward_workers or max(
            1, min(_MAX_WORKERS, cpu_cores() // num_ranks)
        )
        self._scorer: RewardScorer | None = None
        self._models: dict[int, RewardModel] = {}

    def score(
        self,
        prompts: Sequence[tuple[PromptTokens, PromptRow]],
        completions: Sequence[list[Completion]],
        step: int,
    ) -> list[RolloutGroup]:
        """Return the completions of prompts with their rewards.

        Raises:
            RunError: a reward failed.
        """
        started = time.perf_counter()
        texts = [[self.text_of(each.ids) for each in group] for group in completions]
        groups = [
            _group_of(row, tokens, group, of_group)
            for (tokens, row), group, of_group in zip(prompts, completions, texts, strict=True)
        ]
        scores = self._scores(groups, step)
        for episode in (each.episode for group in completions for each in group):
            if episode is not None:
                episode.forget()
                if episode.prompt_ids is not None:
                    episode.prompt_text = self.prompt_text_of(episode.prompt_ids)
        self.spent_s += time.perf_counter() - started
        return [
            RolloutGroup(
                tokens.number,
                tokens.ids,
                list(group),
                of_group,
                texts_of_group,
                self.prompt_text_of(tokens.ids),
            )
            for (tokens, _), group, of_group, texts_of_group in zip(
                prompts, completions, scores, texts, strict=True
            )
        ]

    def open_sessions(self, places: Sequence[str], step: int) -> list[EnvironmentSession]:
        """Return the environments of groups of completions, as
        :meth:`~paceline.rewards.scorer.RewardScorer.open_sessions` does."""
        with self.progress.patient(_START_S):
            return self._processes.open_sessions(places, step)

    def _scores(self, groups: Sequence[CompletionGroup], step: int) -> np.ndarray:
        """Return the rewards, float32 [groups, completions, rewards]."""
        size = len(groups[0].completions) if groups else self.settings.num_generations
        scores = np.full((len(groups), size, len(self.rewards)), np.nan, dtype=np.float32)
        called = [number for number, each in enumerate(self.rewards) if each.model is None]
        # Some at a time, so that progress shows.
        for start in range(0, len(groups) if called else 0, self._num_workers):
            part = groups[start : start + self._num_workers]
            with self.progress.patient(len(called) * self.settings.reward_timeout_s + 60.0):
                scores[start : start + len(part), :, called] = self._processes.score(part, step)
            self.progress.tick()
        for number, reward in enumerate(self.rewards):
            if reward.model is not None:
                for index, group in enumerate(groups):
                    scores[index, :, number] = self._model(number, reward).score(group)
                    self.progress.tick()
        return scores

    @property
    def _processes(self) -> RewardScorer:
        if self._scorer is None:
            called = [reward for reward in self.rewards if reward.model is None]
            self._scorer = RewardScorer(called, self.settings, self._num_workers)
        return self._scorer

    def _model(self, number: int, reward: RewardEntry) -> RewardModel:
        if number not in self._models:
            self._models[number] = RewardModel(str(reward.model), self.device)
        return self._models[number]

    def kill(self) -> None:
        """End the processes at once."""
        if self._scorer is not None:
            self._scorer.kill()

    def close(self) -> None:
        """End the processes."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None


def _group_of(
    row: PromptRow, tokens: PromptTokens, completions: Sequence[Completion], texts: Sequence[str]
) -> CompletionGroup:
    is_chat = not isinstance(row.prompt, str)
    episodes = [each.episode for each in completions if each.episode is not None]
    if episodes:
        return CompletionGroup(
            number=tokens.number,
            place=row.place,
            prompt=cast("Content", episodes[0].prompt),
            completions=[cast("Content", episode.messages) for episode in episodes],
            completion_ids=[completion.ids for completion in completions],
            columns=row.columns,
            prompts=[cast("Content", episode.prompt) for episode in episodes],
            session=episodes[0].session,
        )
    return CompletionGroup(
        number=tokens.number,
        place=row.place,
        prompt=cast("Content", row.prompt),
        completions=[
            [{"role": "assistant", "content": text}] if is_chat else text for text in texts
        ],
        completion_ids=[completion.ids for completion in completions],
        columns=row.columns,
    )
