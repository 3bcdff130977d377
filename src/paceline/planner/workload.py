"""The work of one step: tokens of a micro-batch, and what they keep in memory."""

from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.models.builtin import resolve_model
from paceline.models.shape.activations import Activations, language_activations, language_flops
from paceline.parallel.cost import Workload
from paceline.planner.model_profile import Described


@dataclass(frozen=True)
class Batch:
    """A micro-batch.

    Args:
        positions: tokens on average (samples, where there are no tokens).
        fullest: tokens of the longest samples that can meet in one; what memory must hold.
        label_share: of the tokens carry loss.
        sample: tokens of a sample on average.
        known: from the data; else every sample is taken to have ``max_length`` tokens, all with
            loss.
    """

    positions: float
    fullest: float
    label_share: float = 1.0
    sample: float = 1.0
    known: bool = True
    has_tokens: bool = True

    def text(self) -> str:
        """For a person."""
        if not self.has_tokens:
            return f"{self.positions:,.0f} samples a micro-batch"
        if self.known:
            return (
                f"{self.positions:,.0f} tokens a micro-batch on average, from the tokenised data;"
                f" memory is for the {self.fullest:,.0f} of its longest samples"
            )
        return (
            f"{self.positions:,.0f} tokens a micro-batch: every sample of `max_length`, for the"
            " data is not tokenised yet"
        )


def micro_batch(config: Config) -> Batch:
    """From the tokenised data where they are in the cache, else from ``max_length``."""
    args = config.train_args
    size = args.per_device_train_batch_size
    if config.task not in ("sft", "pretrain"):
        return Batch(size, size, has_tokens=False)
    from paceline.data.text.prepare import TextTask, cached_lengths

    task: TextTask = "pretrain" if config.task == "pretrain" else "sft"
    found = cached_lengths(config, task, resolve_model)
    if found is None or len(found[0]) == 0:
        longest = float(size * args.max_length)
        return Batch(longest, longest, sample=args.max_length, known=False)
    lengths, labels = found
    size = min(size, len(lengths))
    mean = float(lengths.mean())
    longest_samples = sorted(lengths.tolist())[-size:]
    fullest = float(
        sum(longest_samples) if args.packing is not False else size * longest_samples[-1]
    )
    return Batch(mean * size, fullest, float(labels.sum() / lengths.sum()), mean)


def activations(
    config: Config, described: Described, batch: Batch, is_cpu: bool
) -> Activations | None:
    """Of a language model's fullest micro-batch; None where they are not known from its widths."""
    if described.dims is None:
        return None
    return language_activations(
        described.dims,
        config,
        batch.fullest,
        batch.fullest * batch.label_share,
        mask_bytes=4 if is_cpu else 1,
        fused_attention=described.fused_attention,
        longest=min(batch.fullest, config.train_args.max_length),
    )


def workload(config: Config, described: Described, batch: Batch, is_cpu: bool) -> Workload:
    """What a strategy's cost is declared from, beside the model's shape."""
    found = activations(config, described, batch, is_cpu)
    blocks = (
        found.blocks if found is not None and len(described.shape.blocks) == found.layers else ()
    )
    return Workload(
        micro_batches=config.train_args.gradient_accumulation_steps,
        positions=batch.positions,
        activation_bytes=described.activation_bytes if found is None else found.total,
        block_activation_bytes=blocks,
    )


def micro_batch_flops(config: Config, described: Described, batch: Batch) -> float:
    """Operations of a micro-batch, forward and backward; where neither widths nor a trial say more,
    6 a parameter and position."""
    if described.dims is not None:
        return language_flops(
            described.dims,
            config,
            batch.positions,
            batch.positions * batch.label_share,
            batch.sample,
        )
    if described.flops:
        return described.flops
    return 6.0 * batch.positions * sum(one.numel for one in described.shape.parameters)
