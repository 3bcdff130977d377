"""`task: grpo` and `task: rloo`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from paceline.config.schema import Config
from paceline.config.schema.grpo import check_completions_per_batch
from paceline.config.schema.rewards import reward_labels
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.collate import MetricSums, TokenBatch, collate_packed, collate_padded
from paceline.data.encoding.chunks import make_setup
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens, text_kind
from paceline.data.kinds.prompt import ROW, PromptKind, read_row
from paceline.data.text.new_tokens import config_tokenizer
from paceline.data.text.token_dataset import TokenDataset, TokenSample
from paceline.models.blocks import base_model
from paceline.models.builtin import resolve_model
from paceline.models.head.softmax import IGNORED
from paceline.models.transforms.parameters import disable_dropout
from paceline.rewards.functions import (
    check_reset,
    check_reward_sources,
    environment_notices,
    needed_columns,
)
from paceline.rollouts.advantages import AdvantageRule
from paceline.rollouts.engine_check import check_engine, check_engine_of_model, engine_notices
from paceline.rollouts.records import (
    check_num_groups,
    missing_rollout,
    read_groups,
    rollout_file,
)
from paceline.tasks.base import Notice, Prepared
from paceline.tasks.grpo.correction import ProbabilityCorrection
from paceline.tasks.grpo.objective import GroupObjective, LeaveOneOutObjective, Objective
from paceline.tasks.grpo.tokens import CompletionTokens
from paceline.tasks.grpo.tool_turns import ToolTurns
from paceline.tasks.sequences import SequenceTask


class CompletionSample(TokenSample, total=False):
    """A prompt with a completion, whose tokens carry loss.

    Args:
        advantage: advantage of the completion.
        has_loss: whether the completion counts; False for a truncated one that is left out.
        sampled_logps: log-probability of each token of the completion when it was drawn.
        old_logps: the same with the weights that generated it, as in training; absent if these are
            the current weights.
        reference_logps: the same with the reference model; absent without one.
    """

    advantage: float
    has_loss: bool
    sampled_logps: Sequence[float]
    old_logps: Sequence[float]
    reference_logps: Sequence[float]


class CompletionBatch(TokenBatch, total=False):
    """A micro-batch of completions.

    Args:
        advantages: float32 [rows].
        completion_mask: 1 for the targets with loss, else 0, float32 in the shape of the targets.
        mask_tokens: number of targets with loss.
        sampled_logps, old_logps, reference_logps: float32 in the shape of the targets.
        metric_sums: receives the metrics.
    """

    advantages: torch.Tensor
    completion_mask: torch.Tensor
    mask_tokens: float
    sampled_logps: torch.Tensor
    old_logps: torch.Tensor
    reference_logps: torch.Tensor
    metric_sums: MetricSums


#: Number of rows that are read to find out whether the data has the columns of the rewards.
_CHECKED_ROWS = 1000
#: The values of a sample that each token of its completion has.
_TOKEN_VALUES = ("sampled_logps", "old_logps", "reference_logps")


class CompletionRows:
    """Prompts with completions of the largest length in the place of those that will be generated,
    to find out what a micro-batch needs.

    Args:
        prompts: the prompts.
        length: number of tokens of a completion.

    Attributes:
        lengths: int64 [num_prompts], number of tokens of each prompt with a completion.
    """

    deterministic = True

    def __init__(self, prompts: TokenDataset, length: int) -> None:
        self.prompts, self.length = prompts, length
        self.lengths = prompts.lengths + length

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> CompletionSample:
        prompt = self.prompts.piece(index, 0, int(self.prompts.lengths[index]))["input_ids"]
        ids = np.concatenate([prompt, np.resize(prompt, self.length)])
        return {
            "input_ids": ids,
            "labels_mask": np.arange(len(ids)) >= len(prompt),
            "advantage": 1.0,
            "has_loss": True,
            "sampled_logps": [0.0] * self.length,
        }


class PreparedPrompts(Prepared):
    """The prepared prompts. The batch size counts completions, and an epoch generates completions
    for each prompt once."""

    def rows_per_epoch(self, config: Config, batch_size: int) -> int | None:
        assert self.num_train is not None
        return completions_per_epoch(config, self.num_train, batch_size)

    def tokens_per_row(self, config: Config) -> float | None:
        return self.mean_tokens


def completions_per_epoch(config: Config, num_prompts: int, batch_size: int) -> int:
    """Return the number of completions that the updates of an epoch train on. The completions of a
    prompt are used in ``grpo.num_iterations`` updates."""
    settings = config.grpo
    size, iterations = settings.num_generations, settings.num_iterations
    if iterations == 1:
        return num_prompts * size
    prompts_per_step = max(1, batch_size // size)
    rollouts = -(-num_prompts // prompts_per_step)
    return rollouts * iterations * prompts_per_step * size


class GrpoTask(SequenceTask):
    """Trains a causal language model of Hugging Face, in full or with LoRA, on completions that it
    generates for prompts, by the rewards of these completions.

    Advantages are computed over whole groups by a stage of the trainer
    (:mod:`paceline.train.rollouts`). A sample here is a completion with its advantage.
    """

    unit = "completions"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        is_builtin = config.model.startswith("builtin:")
        self.default_learning_rate = 1e-4 if is_builtin else 1e-5 if config.lora.enable else 1e-6
        settings = config.grpo
        self.beta = settings.beta_of(config.task)
        is_rloo = config.task == "rloo"
        correction = ProbabilityCorrection.of(settings, config.task)
        self.objective: Objective = (
            LeaveOneOutObjective(settings, correction)
            if is_rloo
            else GroupObjective(settings, self.beta, correction)
        )
        #: Whether the log-probabilities with the weights that generate must be known before the
        #: first update.
        has_correction = correction is not None
        self.needs_old_logps = is_rloo or settings.num_iterations > 1 or has_correction
        self.needs_reference = self.beta > 0
        kl = ("kl",) if self.needs_reference else ()
        ratios = ("importance_ratio", "importance_clipped") if has_correction else ()
        self.step_metrics = ("entropy", "clip_ratio", "logprob_diff", *kl, *ratios)

    @property
    def advantage_rule(self) -> AdvantageRule:
        settings = self.config.grpo
        if self.config.task == "rloo":
            clip = settings.reward_clip_range
            return AdvantageRule(
                is_leave_one_out=True,
                scale="none",
                normalizes=settings.normalize_advantages,
                clip_range=None if clip is None else (clip[0], clip[1]),
            )
        return AdvantageRule(scale=settings.scale_rewards)

    # -- before any rank exists
    def check(self) -> None:
        super().check()
        args = self.config.train_args
        self._refuse(
            (args.packs_rows, f"packing_strategy: {args.packing_strategy}", "rows are completions"
             " that are generated while the run trains"),
            (args.neftune_noise_alpha is not None, "neftune_noise_alpha", "completions are drawn"
             " without noise"),
            (args.label_smoothing_factor, "label_smoothing_factor", "the loss has no distribution"
             " over tokens"),
            (args.train_on_inputs, "train_on_inputs: true", "the loss is on completions"),
            (args.train_on_turns != "all", f"train_on_turns: {args.train_on_turns}", "the loss is"
             " on completions"),
            (args.torch_compile, "torch_compile: true", "blocks would be compiled again for each"
             " length of the keys and values"),
        )  # fmt: skip
        self._check_other_sections()
        check_engine(self.config)
        check_reward_sources(self.config)

    def _check_other_sections(self) -> None:
        config, settings = self.config, self.config.grpo
        longest = config.train_args.max_length
        for is_set, setting, reason, fix in (
            (config.mixing != "concat", f"mixing: {config.mixing}", "prompts are not mixed",
             "leave `mixing` out"),
            (config.evaluation.metrics, "evaluation.metrics", "an evaluation computes the rewards",
             "leave `evaluation.metrics` out"),
            (config.evaluation.mode == "rank0", "evaluation.mode: rank0", "all ranks generate"
             " completions", "set `evaluation.mode: distributed`"),
            (config.task == "rloo" and settings.correction_mode("rloo").startswith("token"),
             f"grpo.importance_sampling_mode: {settings.importance_sampling_mode}", "a completion"
             " has one loss", "set `grpo.importance_sampling_mode: sequence_truncate`"),
            (settings.max_completion_length >= longest, "grpo.max_completion_length:"
             f" {settings.max_completion_length}", f"no token of `train_args.max_length: {longest}`"
             " would be left for the prompt", "raise `train_args.max_length`"),
        ):  # fmt: skip
            if is_set:
                raise ConfigError(
                    "`{setting}` is not supported with `task: {task}`: {reason}",
                    code="setting-with-rollouts",
                    fix=fix,
                    setting=setting,
                    task=config.task,
                    reason=reason,
                )

    def check_steps(self, steps: int) -> None:
        """Check that there is a recorded rollout for each step, if the run replays them."""
        settings = self.config.grpo
        if settings.replay is None:
            return
        folder = Path(settings.replay).expanduser()
        for step in range(0, steps, settings.num_iterations):
            if not rollout_file(folder, step + 1).is_file():
                raise missing_rollout(folder, step + 1)

    def check_batch(self, global_batch_size: int) -> None:
        super().check_batch(global_batch_size)
        settings = self.config.grpo
        check_completions_per_batch(global_batch_size, settings)
        if settings.replay is not None:
            path = rollout_file(Path(settings.replay).expanduser(), 1)
            if not path.is_file():
                raise missing_rollout(path.parent, 1)
            labels = reward_labels(self.config.rewards)
            groups = read_groups(path, labels, settings.num_generations)
            check_num_groups(path, len(groups), global_batch_size // settings.num_generations)

    def tool_turns(self, folder: Path) -> tuple[PromptKind, ToolTurns]:
        """Return what converts prompts with tools to tokens, and the turns after them.

        Args:
            folder: folder of the tokenizer.

        Raises:
            ConfigError: the chat template does not support tools.
        """
        setup, _ = make_setup(self.config, text_kind(self.config), folder, ())
        kind = PromptKind(setup)
        ends = self.stop_tokens(folder)
        source = setup.for_tools or setup.template
        turns = ToolTurns(folder, kind.tokenizer, kind.template, source, setup.tools, ends)
        return kind, turns

    def prepare(self) -> Prepared:
        """Tokenize the prompts, or find them in the token cache."""
        kind = text_kind(self.config)
        if self.config.grpo.environment is not None:
            self.tool_turns(config_tokenizer(self.config, resolve_model))
        tokens = prepare_tokens(self.config, kind, resolve_model, self.num_prepare_workers)
        of_samples = self._prepared_from(tokens)
        self._check_columns(tokens)
        mean_prompt = tokens.train_tokens / max(1, tokens.num_train)
        return PreparedPrompts(
            num_train=tokens.num_train,
            num_eval=tokens.num_eval,
            counts=tokens.counts,
            notices=[
                *of_samples.notices,
                *environment_notices(self.config),
                *engine_notices(self.config),
            ],
            fingerprint=of_samples.fingerprint,
            handle=tokens,
            mean_tokens=mean_prompt + self.config.grpo.max_completion_length,
        )

    def _check_columns(self, tokens: PreparedTokens) -> None:
        """Check that the first rows have the columns of the rewards and of the environment."""
        needed, environment = needed_columns(self.config), self.config.grpo.environment
        for dataset in tokens.open((ROW,)) if needed or environment else ():
            if dataset is None:
                continue
            count = min(len(dataset), _CHECKED_ROWS)
            of_rows = dict.fromkeys(
                tuple(sorted(read_row(dataset, index).columns)) for index in range(count)
            )
            for columns in of_rows if environment is not None else ():
                check_reset(str(environment), columns)
            known = {name for columns in of_rows for name in columns}
            for name in needed:
                if name not in known:
                    raise ConfigError(
                        "`rewards` needs the column `{column}`, which no row of the data has",
                        code="no-reward-column",
                        allowed="{known}",
                        fix="name the column of the data with `dataset: {path: …, columns:"
                        " {COLUMN: YOURS}}`, or set the option `column` of the reward",
                        column=name,
                        known=", ".join(sorted(known)) or "no columns besides `prompt`",
                    )

    def metric_names(self, prepared: Prepared) -> list[str]:
        rewards = (f"rewards/{label}" for label in reward_labels(self.config.rewards))
        of_tools = ("tool_calls", "tool_failures") if self.config.grpo.environment else ()
        return ["loss", "reward", "completion_length", "truncated", *of_tools, *rewards]

    # -- on every rank
    def build_datasets(self) -> tuple[CompletionRows, CompletionRows | None]:
        tokens: PreparedTokens = self._handle
        length = self.config.grpo.max_completion_length
        train, evaluation = tokens.open((ROW,))
        return (
            CompletionRows(train, length),
            None if evaluation is None else CompletionRows(evaluation, length),
        )

    def build_model(self) -> Any:
        model = super().build_model()
        disable_dropout(model)  # the ratios of probabilities would have its noise
        return model

    def setup(self, model: Any) -> list[Notice]:
        notices = super().setup(model)
        check_engine_of_model(self.config, base_model(model).config.to_dict())
        if self.config.lora.enable and self.config.lora.dropout:
            text = UserText(
                "dropout: {subject}", code="dropout", subject=f"off (`{self.config.task}`)"
            )
            notices.append(("info", text))
        return notices

    def collate(self, samples: Sequence[Any]) -> CompletionBatch:
        rows: Sequence[CompletionSample] = samples
        tokens = (
            collate_packed(rows) if self.packed else collate_padded(rows, self._handle.pad_token_id)
        )
        batch = cast("CompletionBatch", tokens)
        counts = [int(np.count_nonzero(row["labels_mask"][1:])) for row in rows]
        batch["target_counts"] = tuple(counts)
        batch["advantages"] = torch.tensor([row["advantage"] for row in rows], dtype=torch.float32)
        has_loss = [
            [float(row["has_loss"])] * count for row, count in zip(rows, counts, strict=True)
        ]
        batch["completion_mask"] = self._of_targets(tokens, rows, has_loss)
        batch["mask_tokens"] = float(sum(map(sum, has_loss)))
        for name in _TOKEN_VALUES:
            if name in rows[0]:
                values = [cast("dict[str, Sequence[float]]", row)[name] for row in rows]
                batch[name] = self._of_targets(tokens, rows, values)  # type: ignore[literal-required]
        batch["metric_sums"] = MetricSums(self.step_metrics)
        return batch

    def _of_targets(
        self, batch: TokenBatch, rows: Sequence[TokenSample], values: Sequence[Sequence[float]]
    ) -> torch.Tensor:
        """Return the values of the tokens of each completion in the shape of the targets, 0 for
        padding."""
        if self.packed:
            return torch.tensor([value for row in values for value in row], dtype=torch.float32)
        by_row = np.zeros(batch["input_ids"].shape, dtype=np.float32)
        for number, (row, of_row) in enumerate(zip(rows, values, strict=True)):
            by_row[number, np.flatnonzero(row["labels_mask"][1:])] = of_row
        return torch.from_numpy(by_row)[:, batch["keep"]]

    def count(self, batch: Any) -> float:
        return self.objective.count(len(batch["target_counts"]), batch["mask_tokens"])

    def num_tokens(self, batch: Any) -> int:
        return int(batch["num_tokens"])

    # -- losses
    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the sum of the losses of the completions, and record their metrics."""
        targets = batch["targets"]
        entropies = torch.zeros(targets.numel(), dtype=torch.float32, device=targets.device)
        losses = self._token_losses(model, batch, self.config.grpo.temperature, entropies)
        tokens = CompletionTokens(
            logps=-losses,
            entropies=entropies.view(targets.shape),
            mask=batch["completion_mask"],
            advantages=batch["advantages"],
            old_logps=batch.get("old_logps"),
            sampled_logps=batch["sampled_logps"],
            reference_logps=batch.get("reference_logps"),
            sum_by_row=lambda values: self._sum_by_sequence(values, batch),
            by_token=lambda values: self._by_token(values, batch),
        )
        loss, metrics = self.objective.loss(tokens)
        zero = torch.zeros((), device=targets.device)
        recorded = {name: metrics.get(name, (zero, zero)) for name in self.step_metrics}
        batch["metric_sums"].record(recorded)
        return loss

    def logps(self, model: Any, batch: Any) -> list[torch.Tensor]:
        """Return the log-probability of each token of the completions, float32 [tokens] for each
        completion."""
        logps = -self._token_losses(model, batch, self.config.grpo.temperature)
        if logps.dim() == 1:
            return list(logps.split(batch["target_counts"]))
        return [row[kept] for row, kept in zip(logps, batch["targets"] != IGNORED, strict=True)]

    def _by_token(self, values: torch.Tensor, batch: Any) -> torch.Tensor:
        if batch["targets"].dim() == 2:
            return values.unsqueeze(1)
        counts = torch.tensor(batch["target_counts"], device=values.device)
        return values.repeat_interleave(counts, output_size=batch["targets"].numel())
