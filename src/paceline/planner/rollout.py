"""Memory and time of the completions that a rank generates before an update. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Self

from paceline.config.schema import Config
from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.models.shape.activations import trained_matrices
from paceline.models.shape.dims import LanguageDims
from paceline.models.shape.record import ModelShape, modules_around
from paceline.parallel.cost import Cost
from paceline.parallel.registry import ParallelLayout
from paceline.planner.machine.hardware import Machine
from paceline.planner.micro_batch import MicroBatchProfile
from paceline.planner.mode_time import TimeEstimate, reached_rates, setup_of_batch
from paceline.planner.model_profile import ModelProfile

#: Share of the free memory that gathered weights may take in a run
#: (:mod:`paceline.train.rollouts.engines.base`).
_MAX_SHARE = 0.7
#: Bytes for each logit when a token is drawn: the quotient by the temperature and its logarithm in
#: float32, the cumulative sum in float64, and two integers.
_DRAWN_BYTES = 4 + 4 + 8 + 8 + 8

#: Operations of a token outside of the layers, in units of the operations of a layer. Operations of
#: a layer that extends the keys and values, by its operations in training, on a CPU. Both were
#: measured on CPU ranks with models of 1 to 16 layers.
_OUTSIDE_LAYERS, _CACHING = 2, 2.2


@dataclass(frozen=True)
class RolloutEstimate:
    """What the completions of a step need on a rank.

    Args:
        memory_bytes: peak while it generates, with the training state.
        seconds: mean time per step, as an estimate.
        gathers_layers: whether weights are gathered layer by layer for each token, because all of
            them do not fit.
    """

    memory_bytes: int
    seconds: float
    gathers_layers: bool


@dataclass(frozen=True)
class _GroupWork:
    """The completions of a prompt, which a rank generates at once.

    Args:
        count: number of completions.
        prompt, completion: largest numbers of tokens.
        item_bytes: bytes of an element of activations, keys and values.
        restricts: whether some tokens cannot be drawn.
    """

    dims: LanguageDims
    count: int
    prompt: int
    completion: int
    item_bytes: int
    restricts: bool

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Return the bytes of the keys and values of all layers."""
        return rows * tokens * self.dims.layers * self.dims.cached * self.item_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes beside the model at the most demanding moment: when the last token is drawn, when
        the last layer appends a token to its keys, or when the prompt is computed."""
        dims, size = self.dims, self.item_bytes
        # The last token that is drawn is not part of the cache.
        cached = self.cache_bytes(self.count, self.prompt + self.completion - 1)
        logits = self.count * dims.vocabulary * (size + _DRAWN_BYTES + 4 * self.restricts)
        appended = cached // (2 * dims.layers)
        wide = dims.queries + 2 * dims.keys + 2 * dims.hidden + 3 * dims.feed_forward
        prompt = self.prompt * wide * size + self.cache_bytes(1, self.prompt)
        return max(cached + max(logits, appended), prompt)


def reference_bytes(config: Config, cost: Cost) -> int:
    """Return the bytes of a rank's copy of the initial values of the weights that it updates; 0 if
    the run has no reference model."""
    has_reference = config.task in ROLLOUT_TASKS and config.grpo.beta_of(config.task) > 0
    return cost.updated if has_reference else 0


def estimate_rollout(
    layout: ParallelLayout,
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    cost: Cost,
    machine: Machine,
    update: TimeEstimate,
    global_batch_size: int,
) -> RolloutEstimate | None:
    """Estimate the completions of a step; None for a task that generates none, and for a model
    whose widths are not known.

    Args:
        cost: cost of the update, with the reference model.
        update: time of the update.
    """
    if config.task not in ROLLOUT_TASKS or profile.dims is None:
        return None
    group = _group(profile.dims, profile.shape, config, batch)
    held, gathered = cost.state, cost.gathered
    if not layout.has_low_weights and profile.shape.low_bytes:
        matrices = trained_matrices(profile.shape)  # autocast keeps copies of them
        held += profile.shape.low_bytes * (matrices.blocks + matrices.head)
    gathers_layers = gathered > _MAX_SHARE * (machine.memory_bytes - held)
    if gathers_layers:
        gathered = min(gathered, _largest_units(profile.shape))
    time = _GroupWorkTime.of(layout, config, profile, batch, group, machine)
    seconds = 0.0
    if time is not None:
        tokens_s = group.completion * cost.gathered / time.link_bytes_s if gathers_layers else 0.0
        groups = math.ceil(global_batch_size / group.count / layout.world_size)
        seconds = groups * (time.seconds + tokens_s) + _scored(config) * time.forward_s(update)
    return RolloutEstimate(
        held + gathered + group.peak_bytes,
        seconds / config.grpo.num_iterations,
        gathers_layers,
    )


def _group(
    dims: LanguageDims, shape: ModelShape, config: Config, batch: MicroBatchProfile
) -> _GroupWork:
    settings = config.grpo
    is_low = config.train_args.compute_format in ("bfloat16", "float16")
    return _GroupWork(
        dims,
        settings.num_generations,
        max(1, batch.longest - settings.max_completion_length),
        settings.max_completion_length,
        2 if is_low else 4,
        bool(settings.top_k) or settings.top_p < 1,
    )


def _largest_units(shape: ModelShape) -> int:
    """Return the bytes of the two largest blocks, or of the largest layer outside of them."""
    blocks, largest = dict.fromkeys(shape.blocks, 0), 0
    for tensor in shape.parameters:
        size = tensor.numel * min(tensor.element_bytes, shape.low_bytes or tensor.element_bytes)
        block = next((name for name in modules_around(tensor.name) if name in blocks), None)
        if block is None:
            largest = max(largest, size)
        else:
            blocks[block] += size
    return max(largest, sum(sorted(blocks.values())[-2:]))


def _scored(config: Config) -> int:
    """Return the number of forward passes over the completions before an update: with the weights
    that generated them, and with the reference model."""
    settings = config.grpo
    needs_old = config.task == "rloo" or settings.num_iterations > 1
    return int(needs_old) + int(settings.beta_of(config.task) > 0)


@dataclass(frozen=True)
class _GroupWorkTime:
    """The time of a group of completions.

    Args:
        seconds: seconds if all weights are held.
        passes: passes over the layers in an update, in units of a forward pass.
        link_bytes_s: rate between ranks.
    """

    seconds: float
    passes: float
    link_bytes_s: float

    @classmethod
    def of(
        cls,
        layout: ParallelLayout,
        config: Config,
        profile: ModelProfile,
        batch: MicroBatchProfile,
        group: _GroupWork,
        machine: Machine,
    ) -> Self | None:
        """Return the time; None if the widths of the model are not known.

        For each token, all weights, keys and values are read once. A product takes the time to read
        them, or the time of its operations if it is longer.
        """
        setup = setup_of_batch(config, profile, layout, batch)
        if setup is None:
            return None
        setup = machine.with_links(setup)
        rates, reached = reached_rates(setup, layout, config, machine)
        order = reached.launch_order
        launches_s = (setup.stage_layers + _OUTSIDE_LAYERS) * reached.launch_s * rates.operation_s
        launches_s *= _CACHING if machine.is_cpu else 1
        product_s = 2 / (rates.product_flops_s * reached.product_share)
        active = setup.stage_layers * (
            setup.dims.attention_weights + setup.dims.experts_per_token * setup.dims.expert_weights
        )
        table = setup.table_parameters

        def joined(device_s: float) -> float:
            """Return the time with launches, which a GPU hides."""
            seconds: float = (device_s**order + launches_s**order) ** (1 / order)
            return seconds

        read = setup.element_bytes * (setup.stage_layers * setup.layer_parameters + table)
        read += setup.element_bytes * setup.stage_expert_parameters
        # Each token copies the keys and values: they are read, written, and read again.
        read += 3 * group.cache_bytes(group.count, group.prompt + group.completion // 2)
        drawn = 2 * group.count * setup.dims.vocabulary * _DRAWN_BYTES
        token_s = max(
            product_s * (active + table) * (group.count + reached.row_loss),
            read / rates.memory_bytes_s,
        )
        token_s += drawn / rates.memory_bytes_s
        prompt_s = product_s * active * (group.prompt + reached.row_loss)
        return cls(
            joined(prompt_s) + group.completion * joined(token_s),
            (2 if setup.is_frozen else 3) + setup.passes_again,
            rates.link_bytes_s * reached.link_share,
        )

    def forward_s(self, update: TimeEstimate) -> float:
        """Return the time of a forward pass over all completions of an update."""
        parts = update.parts
        if parts is None:
            return 0.0
        computed = parts.products_s + parts.attention_s + parts.memory_s + parts.launches_s
        return computed / self.passes
