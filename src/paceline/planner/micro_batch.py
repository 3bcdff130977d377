"""The micro-batch of a config: its tokens, from the data if they are tokenized, and its operations.
Imports no torch."""

from dataclasses import dataclass, replace

import numpy as np

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS, ROLLOUT_TASKS
from paceline.core.texts import UserText
from paceline.models.builtin import resolve_model
from paceline.models.kinds import reads_images
from paceline.models.shape.flops import float8_flops, language_flops
from paceline.planner.model_profile import ModelProfile


@dataclass(frozen=True)
class MicroBatchProfile:
    """The size of a micro-batch.

    Args:
        positions: mean number of tokens (of samples, if there are no tokens).
        fullest: tokens of the longest samples that can share one; what memory must hold.
        label_share: share of the tokens that have a loss.
        sample: mean number of tokens of a sample.
        lengths: tokens of each sample of the fullest micro-batch.
        longest: tokens of the longest sample.
        completion: largest number of tokens of a completion, if a sample is a prompt with a
            completion that is not generated yet.
        num_rows: samples of an epoch; None if it is not known, or if rows are packed.
        known: counted in the data; else every sample has ``max_length`` tokens, all with loss.
    """

    positions: float
    fullest: float
    label_share: float = 1.0
    sample: float = 1.0
    known: bool = True
    has_tokens: bool = True
    lengths: tuple[int, ...] = ()
    num_rows: int | None = None
    longest: int = 0
    completion: int = 0

    def text(self) -> str:
        """Return the note in the plan."""
        positions = f"{self.positions:,.0f}"
        if not self.has_tokens:
            return UserText(
                "{positions} samples per micro-batch",
                code="samples-per-micro-batch",
                positions=positions,
            )
        if self.known and self.completion:
            return UserText(
                "{positions} tokens per micro-batch on average: prompts from the tokenized data,"
                " with completions of {completion:token}, the most that there can be; memory is for"
                " the {fullest} tokens of the longest",
                code="completion-tokens-per-micro-batch",
                positions=positions,
                completion=self.completion,
                fullest=f"{self.fullest:,.0f}",
            )
        if self.known:
            return UserText(
                "{positions} tokens per micro-batch on average, from the tokenized data; memory is"
                " for the {fullest} tokens of its longest samples",
                code="measured-tokens-per-micro-batch",
                positions=positions,
                fullest=f"{self.fullest:,.0f}",
            )
        return UserText(
            "{positions} tokens per micro-batch: every sample has `max_length` tokens, because the"
            " data is not tokenized yet",
            code="assumed-tokens-per-micro-batch",
            positions=positions,
        )


def micro_batch(config: Config) -> MicroBatchProfile:
    """Measure the micro-batch in the tokenized data if it is cached; else assume ``max_length``."""
    args = config.train_args
    size = args.per_device_train_batch_size
    if config.task not in CAUSAL_TASKS:
        return MicroBatchProfile(size, size, has_tokens=False)
    from paceline.data.encoding.prepare import cached_lengths, text_kind

    kind = text_kind(config)
    if reads_images(config):
        kind = "vision"
    cached = cached_lengths(config, kind, resolve_model)
    if cached is None or len(cached[0]) == 0:
        return longest_micro_batch(config)
    lengths, labels = cached
    completion = config.grpo.max_completion_length if kind == "prompts" else 0
    if completion:
        lengths, labels = _with_completions(lengths, config)
    num_rows = len(lengths) * (config.grpo.num_iterations if completion else 1)
    size = min(size, len(lengths))
    mean = float(lengths.mean())
    longest_samples = sorted(lengths.tolist())[-size:]
    is_packed = args.packing is not False
    fullest = float(sum(longest_samples) if is_packed else size * longest_samples[-1])
    label_share = float(labels.sum() / lengths.sum())
    if args.packs_rows:
        # Rows are almost full, whatever the lengths of the samples are.
        fullest = float(size * args.max_length)
        mean = float(args.max_length)
        longest_samples = [args.max_length] * size
    return MicroBatchProfile(
        mean * size,
        fullest,
        label_share,
        mean,
        lengths=tuple(longest_samples),
        num_rows=None if args.packs_rows else num_rows,
        longest=longest_samples[-1],
        completion=completion,
    )


def _with_completions(prompts: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, label tokens) of the completions of prompts, each of the largest length.

    Args:
        prompts: number of tokens of each prompt.
    """
    settings = config.grpo
    lengths = (prompts + settings.max_completion_length).repeat(settings.num_generations)
    return lengths, np.full_like(lengths, settings.max_completion_length)


def longest_micro_batch(config: Config) -> MicroBatchProfile:
    """Return the micro-batch of a language model whose samples all have ``max_length`` tokens."""
    from paceline.data.encoding.prepare import text_kind

    args = config.train_args
    num_rows = args.per_device_train_batch_size * (2 if text_kind(config) == "pairs" else 1)
    rows = (args.max_length,) * num_rows
    longest = float(sum(rows))
    batch = MicroBatchProfile(
        longest,
        longest,
        sample=args.max_length,
        known=False,
        lengths=rows,
        longest=args.max_length,
    )
    if config.task not in ROLLOUT_TASKS:
        return batch
    completion = config.grpo.max_completion_length
    return replace(batch, label_share=completion / args.max_length, completion=completion)


def micro_batch_flops(config: Config, profile: ModelProfile, batch: MicroBatchProfile) -> float:
    """Return the operations of forward and backward of a micro-batch. If neither dimensions nor a
    trial are known: 6 per parameter and position.

    Operations in float8 count half: data sheets of NVIDIA's GPUs give twice the rate of bfloat16.
    """
    if profile.dims is not None:
        labels = batch.positions * batch.label_share
        flops = language_flops(profile.dims, config, batch.positions, labels, batch.sample)
        return flops - float8_flops(profile.dims, config, batch.positions) / 2
    if profile.flops:
        return profile.flops
    return 6.0 * batch.positions * profile.shape.num_parameters
