"""The micro-batches of a run that trains on completions of its own.

This is the stage of a step that looks at whole groups. At the first of the steps that share a
rollout, it

1. generates the completions of each prompt on one rank, and computes their rewards there;
2. gathers all groups on all ranks, in the order of the prompts;
3. computes advantages from the rewards of all groups, the same on every rank;
4. computes the log-probabilities with the current weights and with the reference model, if the loss
   needs them, on the ranks that will train on the completions.

After that, each completion is a sample of its own whose loss is a term of a sum. So the result does
not depend on how completions are divided among ranks and micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.config.schema import Config
from paceline.data.kinds.prompt import read_row
from paceline.data.loader import MicroBatch
from paceline.data.loader_process import LoaderOptions
from paceline.data.order.base import split_by_length, split_even
from paceline.data.pipeline import DataPipeline
from paceline.data.text.token_dataset import TokenDataset
from paceline.distributed.timing.progress import ProgressTracker
from paceline.distributed.traffic import uncounted
from paceline.rollouts.advantages import compute_advantages, have_equal_rewards, weigh_rewards
from paceline.rollouts.records import (
    Rollout,
    RolloutGroup,
    check_num_groups,
    read_groups,
    rollout_file,
)
from paceline.tasks.grpo.task import CompletionRows, CompletionSample, GrpoTask
from paceline.train.rollouts.engines.base import CompletionEngine, PromptTokens
from paceline.train.rollouts.order import CompletionOrder
from paceline.train.rollouts.reference import ReferenceWeights
from paceline.train.rollouts.scoring import GroupScorer
from paceline.train.rollouts.turns import TurnGenerator
from paceline.train.state import TrainComponents

#: With dynamic sampling, how often prompts are drawn for a step before it trains on fewer.
_MAX_DRAWS = 8


@dataclass
class RolloutTimes:
    """Seconds of the rollout of a step, 0 if the step uses an earlier one."""

    rollout_s: float = 0.0
    reward_s: float = 0.0


class RolloutPipeline(DataPipeline):
    """Provides this rank's micro-batches of each step, for which it generates completions.

    Args:
        components: the model and its strategy, with the initial weights.
        generator: generates completions.
        turns: generates completions with tools; None without an environment.
        scorer: computes rewards.

    Attributes:
        rollout: the rollout of the last step, or None.
        times: seconds of the last step.
        num_drawn: number of prompts drawn so far, with dynamic sampling.
        on_rollout: called on every rank with each new rollout.
    """

    order: CompletionOrder
    train_dataset: CompletionRows

    def __init__(
        self,
        config: Config,
        components: TrainComponents,
        train_dataset: CompletionRows,
        eval_dataset: CompletionRows | None,
        order: CompletionOrder,
        options: LoaderOptions,
        generator: CompletionEngine,
        scorer: GroupScorer,
        progress: ProgressTracker,
        turns: TurnGenerator | None = None,
        *,
        last_step: int,
        accumulation: int,
    ) -> None:
        assert isinstance(components.task, GrpoTask)
        self.task = components.task
        strategy = components.strategy
        super().__init__(
            train_dataset,
            eval_dataset,
            order,
            self.task.collate,
            options,
            last_step=last_step,
            accumulation=accumulation,
            replica=strategy.replica,
            num_replicas=strategy.num_replicas,
        )
        self.settings, self.components = config.grpo, components
        self.comm, self.progress = strategy.world, progress
        self.generator, self.turns, self.scorer = generator, turns, scorer
        self.reference = ReferenceWeights(strategy) if self.task.needs_reference else None
        self.rollout: Rollout | None = None
        self.times = RolloutTimes()
        self.num_drawn = 0
        self.on_rollout: Callable[[Rollout], None] = lambda rollout: None

    # -- steps
    def next(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next step. A collective if the step begins with
        a rollout."""
        self.times = RolloutTimes()
        first = self.order.first_step(self._step)
        if self.rollout is None or self.rollout.step != first:
            self.rollout = None
            self.rollout = self._roll_out(first)
            self.on_rollout(self.rollout)
        self.busy_s = self.times.rollout_s + self.times.reward_s
        self._step += 1
        micro_batches = [self._collate(self.rollout, numbers) for numbers in self._shares()]
        for observe in self.observers:
            observe(micro_batches)
        return micro_batches

    @property
    def next_begins_rollout(self) -> bool:
        """Whether the next step begins with a rollout."""
        return self.order.first_step(self._step) == self._step

    def close(self) -> None:
        super().close()
        self.generator.close()
        self.scorer.close()

    def _roll_out(self, step: int) -> Rollout:
        """Return the completions of a step with everything that the loss needs. A collective."""
        started, before = time.perf_counter(), self.scorer.spent_s
        if self.settings.replay is not None:
            groups, num_skipped = self._replayed(step), 0
        elif self.settings.dynamic_sampling:
            groups, num_skipped = self._draw(step)
        else:
            groups, num_skipped = self._groups(self.order.prompts(step), step), 0
        rewards = self.weigh(groups)
        rollout = Rollout(step, groups, rewards, np.zeros_like(rewards), num_skipped=num_skipped)
        with self.progress.during("rollout"):
            if self.task.needs_old_logps:
                rollout.old_logps = self._logps(rollout)
            if self.reference is not None:
                with self.reference.active():
                    rollout.reference_logps = self._logps(rollout)
        rule = self.task.advantage_rule
        rollout.advantages = compute_advantages(rewards, rule, self._penalties(rollout))
        # The reward of the slowest rank is part of the time that the others wait.
        reward_s = max(self.comm.gather_numbers(self.scorer.spent_s - before))
        self.times = RolloutTimes(time.perf_counter() - started - reward_s, reward_s)
        return rollout

    def weigh(self, groups: Sequence[RolloutGroup]) -> np.ndarray:
        """Return the weighted sum of the rewards of each completion [groups, completions]."""
        return weigh_rewards(np.stack([group.scores for group in groups]), self.scorer.weights)

    def _draw(self, step: int) -> tuple[list[RolloutGroup], int]:
        """Return groups whose completions have different rewards, and the number of groups that
        were left out. If too few are found, the last ones are kept to fill the batch."""
        wanted = self.order.prompts_per_step
        kept: list[RolloutGroup] = []
        equal: list[RolloutGroup] = []
        for _ in range(_MAX_DRAWS):
            prompts = self.order.prompts_from(self.num_drawn, wanted - len(kept))
            self.num_drawn += len(prompts)
            groups = self._groups(prompts, step)
            is_equal = have_equal_rewards(self.weigh(groups))
            kept += [group for group, without in zip(groups, is_equal, strict=True) if not without]
            equal += [group for group, without in zip(groups, is_equal, strict=True) if without]
            if len(kept) == wanted:
                break
        fillers = equal[: wanted - len(kept)]
        return [*kept, *fillers], len(equal) - len(fillers)

    def _replayed(self, step: int) -> list[RolloutGroup]:
        """Return the groups of a recorded rollout."""
        path = rollout_file(Path(str(self.settings.replay)).expanduser(), step + 1)
        groups = read_groups(path, self.scorer.names, self.settings.num_generations)
        check_num_groups(path, len(groups), len(self.order.prompts(step)))
        return groups

    # -- groups
    def _groups(self, prompts: np.ndarray, step: int) -> list[RolloutGroup]:
        return self.generate(self.train_dataset, prompts, "rollout", step)

    def generate(
        self,
        dataset: CompletionRows,
        prompts: np.ndarray,
        purpose: str,
        step: int,
        num_completions: int | None = None,
    ) -> list[RolloutGroup]:
        """Generate completions and compute their rewards. Returns the groups of all ranks. A
        collective.

        Args:
            prompts: indices of the prompts in ``dataset``.
            purpose, step: what the random numbers depend on, besides the prompt.
            num_completions: number of completions of each prompt; default:
                ``grpo.num_generations``.
        """
        count = num_completions or self.settings.num_generations
        tokens = [prompt_tokens(dataset.prompts, int(number)) for number in prompts]
        # The number of the next update, as in events and in the name of the rollout's file.
        update = self._step + 1
        with self.progress.during("rollout"):
            if self.turns is None:
                completions = self.generator.generate(tokens, purpose, step, count)
            else:
                completions = self.turns.generate(
                    dataset.prompts, tokens, purpose, step, count, update
                )
        with self.progress.during("rewards"):
            rows = [
                (tokens[position], read_row(dataset.prompts, tokens[position].number))
                for position in completions
            ]
            own = self.scorer.score(rows, list(completions.values()), update)
        with uncounted():
            by_rank = self.comm.gather_objects(dict(zip(completions, own, strict=True)))
        groups = {position: group for part in by_rank for position, group in part.items()}
        return [groups[position] for position in range(len(tokens))]

    # -- micro-batches
    def _shares(self) -> list[np.ndarray]:
        """Return the numbers of the completions of this rank's micro-batches."""
        assert self.rollout is not None
        completions = self.rollout.completions
        numbers = np.arange(len(completions))
        parts = self.num_replicas * self.accumulation
        if self.task.packed:
            sizes = [len(group.prompt_of(each)) + len(each.ids) for group, each in completions]
            shares = split_by_length(numbers, np.array(sizes), parts)
        else:
            shares = split_even(numbers, parts)
        return shares[self.replica * self.accumulation : (self.replica + 1) * self.accumulation]

    def _collate(self, rollout: Rollout, numbers: np.ndarray) -> MicroBatch:
        """Return the micro-batch of completions. A filler stands for one without completions."""
        samples = [self._sample(rollout, int(number)) for number in numbers]
        data = self.task.collate(samples or [self._sample(rollout, 0)])
        return MicroBatch(data, len(samples))

    def _sample(self, rollout: Rollout, number: int) -> CompletionSample:
        group, completion = rollout.completions[number]
        prompt = group.prompt_of(completion)
        ids = np.array([*prompt, *completion.ids], dtype=np.int32)
        is_left_out = self.settings.mask_truncated_completions and completion.is_truncated
        sample: CompletionSample = {
            "input_ids": ids,
            "labels_mask": np.array([*[False] * len(prompt), *completion.loss_mask]),
            "advantage": float(rollout.advantages.flat[number]),
            "has_loss": not is_left_out,
            "sampled_logps": completion.drawn_logps,
        }
        if rollout.old_logps is not None:
            sample["old_logps"] = rollout.old_logps[number]
        if rollout.reference_logps is not None:
            sample["reference_logps"] = rollout.reference_logps[number]
        return sample

    # -- log-probabilities
    def _logps(self, rollout: Rollout) -> list[list[float]]:
        """Return the log-probabilities of the tokens of all completions with the weights that the
        model has now. A collective."""
        parts = self.components
        strategy, model = parts.strategy, parts.model
        local: dict[int, list[float]] = {}
        was_training = model.training
        model.eval()
        self.rollout = rollout
        for numbers in self._shares():
            batch = self._collate(rollout, numbers).to(self.comm.device)

            def run(module: torch.nn.Module, data: Any = batch.data) -> dict[str, torch.Tensor]:
                with torch.no_grad(), parts.precision.autocast(), uncounted():
                    rows = self.task.logps(module, data)
                return {str(row): values for row, values in enumerate(rows)}

            values = strategy.evaluate(run, model)
            self.progress.tick()
            if values is not None:
                rows = [values[str(row)].tolist() for row in range(len(numbers))]
                local.update(zip(map(int, numbers), rows, strict=True))
        model.train(was_training)
        with uncounted():
            by_rank = self.comm.gather_objects(local)
        merged = {number: row for part in by_rank for number, row in part.items()}
        return [merged[number] for number in range(len(rollout.completions))]

    def _penalties(self, rollout: Rollout) -> np.ndarray | None:
        """Return the divergence from the reference model that is subtracted from the rewards of
        RLOO, [groups, completions]; None for GRPO, whose loss has it."""
        is_in_loss = not self.task.advantage_rule.is_leave_one_out
        if is_in_loss or rollout.reference_logps is None or rollout.old_logps is None:
            return None
        pairs = zip(rollout.old_logps, rollout.reference_logps, rollout.completions, strict=True)
        masks = self.settings.mask_truncated_completions
        sums = [
            0.0 if masks and completion.is_truncated else float(np.sum(np.subtract(old, reference)))
            for old, reference, (_, completion) in pairs
        ]
        return self.task.beta * np.array(sums).reshape(rollout.rewards.shape)


def prompt_tokens(dataset: TokenDataset, index: int) -> PromptTokens:
    """Return the tokens of a prompt."""
    ids = dataset.piece(index, 0, int(dataset.lengths[index]))["input_ids"]
    return PromptTokens(index, ids.tolist())
