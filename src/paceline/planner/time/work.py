"""Count the work of a rank in a training step: operations, bytes and messages. Nothing here depends
on a fitted constant. Imports no torch.

Sources of the formulas: matrix products take 2 operations per weight and token in each pass (Kaplan
et al., "Scaling Laws for Neural Language Models", 2020, section 2.1); causal attention computes
half of the scores, and 2.5 times as much in backward (Dao, "FlashAttention-2", 2023, section 4.1);
tensor parallelism exchanges hidden states four times a layer (Shoeybi et al., "Megatron-LM", 2019,
section 3; Korthikanti et al., 2022, section 4.2).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.planner.setup import TrainingSetup
from paceline.planner.time.rates import Rates

_LOW = 2  # bytes of a weight that was dequantized
#: FlashAttention's backward pass, in forward passes.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class RankWork:
    """The work of a rank. Times that only depend on a data sheet are in seconds at its figures; a
    fitted share of them is reached. All fields are numbers, so that a fit can evaluate many set-ups
    at once, as arrays.

    Args:
        products_s, head_s: matrix products of the layers and of the head in a micro-batch.
        products_per_row, products_per_width: ``products_s`` weighted by 1 / rows, and by
            1 / inputs + 1 / outputs, of each product. The same of the head.
        attention_s: attention in a micro-batch.
        narrow: 1 if heads are narrower than 128.
        stream_s: reads and writes of operations that are limited by memory, each once.
        logits_s: reads and writes of the logits.
        accumulate_s: adding a micro-batch's gradients to those before.
        dequantize_s: reading 4-bit weights once per pass.
        launches: layers × passes that Python launches in a micro-batch.
        tensor_link_s, tensor_network_s: exchanges of tensor parallelism in a micro-batch.
        tensor_messages: number of these.
        context_link_s, context_network_s: keys and values of context parallelism.
        expert_link_s, expert_network_s: tokens sent to experts and back.
        hop_s: hidden states sent between pipeline stages.
        hop_messages: number of these.
        shard_link_s, shard_network_s: gathered weights and scattered gradients of ZeRO-3, per
            micro-batch.
        shard_messages: layers × log2(1 + hosts) of these.
        sync_link_s, sync_network_s: gradients once per step.
        sync_first, sync_last: shares of these gradients in the first bucket and in the last.
        sync_messages, gather_messages: number of buckets, and of gathers of their weights.
        gather_link_s, gather_network_s: updated weights of ZeRO-1 and 2.
        tied_link_s, tied_network_s: gradients of an embedding that is tied to the head, between the
            first and the last pipeline stage, once per step.
        sync_ranks, gather_ranks: ranks of the groups of several hosts that exchange gradients, and
            weights.
        hosts_log: log2 of the hosts.
        host_copy_s: copies to and from host memory, in a step.
        optimizer_s: the optimizer's reads and writes.
        stages, chunks: numbers of stages of a pipeline, and of parts of each stage.
        micro_batches: in a step.
    """

    products_s: float
    products_per_row: float
    products_per_width: float
    head_s: float
    head_per_row: float
    head_per_width: float
    attention_s: float
    narrow: float
    stream_s: float
    logits_s: float
    accumulate_s: float
    dequantize_s: float
    launches: float
    tensor_link_s: float
    tensor_network_s: float
    tensor_messages: float
    context_link_s: float
    context_network_s: float
    expert_link_s: float
    expert_network_s: float
    hop_s: float
    hop_messages: float
    shard_link_s: float
    shard_network_s: float
    shard_messages: float
    sync_link_s: float
    sync_network_s: float
    sync_first: float
    sync_last: float
    sync_messages: float
    gather_messages: float
    gather_link_s: float
    gather_network_s: float
    tied_link_s: float
    tied_network_s: float
    sync_ranks: float
    gather_ranks: float
    hosts_log: float
    host_copy_s: float
    optimizer_s: float
    stages: float
    chunks: float
    micro_batches: float


@dataclass(frozen=True)
class _Product:
    """A matrix product in the forward pass of a layer: rows × inputs by inputs × outputs."""

    rows: float
    inputs: float
    outputs: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.inputs * self.outputs * self.count


def layer_products(setup: TrainingSetup) -> Iterator[_Product]:
    """Yield the matrix products of a layer on a rank."""
    dims, tensor, tokens = setup.dims, setup.tensor, setup.tokens
    if dims.latent is not None:
        layers = dims.latent.linears(dims.hidden, dims.queries, dims.heads)
        yield from (_Product(tokens, width, out / tensor) for width, out in layers.values())
    else:
        yield _Product(tokens, dims.hidden, (dims.queries + 2 * dims.keys) / tensor)
        yield _Product(tokens, dims.queries / tensor, dims.hidden)
    rows, count = tokens, 1.0
    if dims.experts > 1:
        count = dims.experts / setup.expert
        rows = tokens * dims.experts_per_token / count
    wide = dims.feed_forward / tensor
    for _ in range(2 if dims.gated else 1):
        yield _Product(rows, dims.hidden, wide, count)
    yield _Product(rows, wide, dims.hidden, count)


def count_work(setup: TrainingSetup, rates: Rates) -> RankWork:
    """Count the work of a rank whose pipeline stage has the mean number of layers."""
    layers, passes = setup.stage_layers, (2 if setup.is_frozen else 3) + setup.products_again
    dims, tokens = setup.dims, setup.tokens
    products = list(layer_products(setup))
    scale = layers * passes / rates.product_flops_s
    outputs = dims.vocabulary / (setup.tensor if setup.splits_head else 1)
    head = _Product(tokens * setup.label_share, dims.hidden, outputs)
    head_passes = 2 if setup.is_frozen and not setup.trains_embeddings else 3
    head_scale = head_passes / setup.pipeline / rates.flops_s
    attention = (dims.queries + dims.values) / setup.tensor * setup.length * tokens * layers
    attention *= 1 + _ATTENTION_BACKWARD + setup.attention_again
    links = _Links(setup, rates)
    tensor = links.tensor_exchange()
    context, expert = links.context_exchange(), links.expert_exchange()
    shard, sync, gather = links.shard_traffic(), links.sync_traffic(), links.gather_traffic()
    tied = links.tied_traffic()
    gradient_bytes = setup.gradient_bytes * setup.trained_parameters
    first_bucket, last_bucket = bucket_shares(gradient_bytes, setup.bucket_bytes)
    buckets = math.ceil(1 / first_bucket) * rates.message_s
    head_s = head.flops * head_scale
    layers_s = scale * sum(product.flops for product in products)
    return RankWork(
        products_s=layers_s,
        products_per_row=scale * sum(each.flops / each.rows for each in products),
        products_per_width=scale
        * sum(each.flops * (1 / each.inputs + 1 / each.outputs) for each in products),
        head_s=head_s,
        head_per_row=head_s / max(head.rows, 1.0),
        head_per_width=head_s * (1 / head.inputs + 1 / head.outputs),
        attention_s=attention / rates.attention_flops_s,
        narrow=float(dims.queries // max(1, dims.heads) < 128),
        stream_s=_stream_bytes(setup) / rates.memory_bytes_s,
        logits_s=16 * tokens * setup.label_share * outputs / setup.pipeline / rates.memory_bytes_s,
        accumulate_s=_accumulated_bytes(setup) / rates.memory_bytes_s,
        dequantize_s=_dequantized_bytes(setup) / rates.memory_bytes_s,
        launches=layers * (2 + setup.passes_again) * rates.operation_s,
        tensor_link_s=tensor[0],
        tensor_network_s=tensor[1],
        tensor_messages=8 * layers * rates.message_s if setup.tensor > 1 else 0,
        context_link_s=context[0],
        context_network_s=context[1],
        expert_link_s=expert[0],
        expert_network_s=expert[1],
        hop_s=links.hops(),
        hop_messages=2 * setup.chunks * rates.message_s if setup.pipeline > 1 else 0,
        shard_link_s=shard[0],
        shard_network_s=shard[1],
        shard_messages=links.shard_messages() * rates.message_s,
        sync_link_s=sync[0],
        sync_network_s=sync[1],
        sync_first=first_bucket,
        sync_last=max(last_bucket, _last_share(setup)),
        sync_messages=buckets if any(sync) else 0,
        gather_messages=buckets if setup.zero_stage == 1 and any(gather) else 0,
        gather_link_s=gather[0],
        gather_network_s=gather[1],
        tied_link_s=tied[0],
        tied_network_s=tied[1],
        sync_ranks=links.sync_ranks(),
        gather_ranks=links.gather_ranks(),
        hosts_log=math.log2(links.hosts),
        host_copy_s=_host_bytes(setup) / rates.host_link_bytes_s,
        optimizer_s=_optimizer_bytes(setup) / rates.memory_bytes_s,
        stages=float(setup.pipeline),
        chunks=float(setup.chunks),
        micro_batches=float(setup.micro_batches),
    )


def _stream_bytes(setup: TrainingSetup) -> float:
    """Return the bytes that norms, rotations, activation functions and sums read and write, if
    each result is written once and read once."""
    dims, tensor = setup.dims, setup.tensor
    wide = dims.feed_forward * dims.experts_per_token / tensor
    # A sum of the residual stream reads twice and writes once. Torch's LayerNorm is one kernel;
    # root-mean-square norms are several operations in float32.
    norm = 2 if dims.layer_norms else 4
    hidden = dims.norms * (3 + norm) * dims.hidden / (tensor if setup.sequence_parallel else 1)
    states = (4 if dims.rotates else 1) * (dims.queries + 2 * dims.keys) / tensor
    widths = hidden + states + (6 if dims.gated else 3) * wide
    return (
        setup.element_bytes
        * setup.tokens
        * setup.stage_layers
        * widths
        * (2.5 + setup.passes_again)
    )


def _accumulated_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of a sum of gradients: both terms are read, and the result written. With
    ZeRO-2 and 3, a rank only has its shard of them."""
    divided = setup.shard if setup.zero_stage >= 2 else 1
    return 3 * setup.gradient_bytes * setup.trained_parameters / divided


def _dequantized_bytes(setup: TrainingSetup) -> float:
    if setup.frozen_bits >= 16:
        return 0.0
    weights = setup.stage_layers * (setup.layer_parameters + setup.expert_parameters)
    # Codes and scales are read, weights in 16 bit written, and read by the product.
    each = (setup.frozen_bits + 0.5) / 8 + 2 * _LOW
    return each * weights / setup.tensor * (2 + setup.passes_again)


def _optimizer_bytes(setup: TrainingSetup) -> float:
    """Return what an update reads and writes: gradients, weights and moments."""
    updated = setup.trained_parameters / (setup.shard if setup.zero_stage else 1)
    weights = 8 if setup.weight_bytes == 4 or setup.low_copy else 4
    moments = {"adamw": 16, "adamw-bf16": 8, "adamw-8bit": 4, "adamw-4bit": 2}[setup.optimizer]
    return updated * (setup.gradient_bytes + weights + moments)


def bucket_shares(gradient_bytes: float, bucket_bytes: float) -> tuple[float, float]:
    """Return the shares of the first and of the last bucket in a rank's gradients (Li et al.,
    "PyTorch Distributed", 2020, section 3.2.3)."""
    if gradient_bytes == 0:
        return 1.0, 1.0
    first = min(1.0, bucket_bytes / gradient_bytes)
    return first, 1.0 - (math.ceil(1 / first) - 1) * first


def _last_share(setup: TrainingSetup) -> float:
    """Return the share of the embedding in a rank's gradients: backward reaches it last. A head
    that is tied to it has the same gradient."""
    if setup.is_frozen and not setup.trains_embeddings:
        return 0.0
    split = setup.tensor if setup.splits_head else 1
    return setup.table_parameters / split / setup.trained_parameters


def _host_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of a step that cross the link to the host in one direction."""
    updated = setup.trained_parameters / (setup.shard if setup.zero_stage else 1)
    moments = {"adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2, "adamw-4bit": 1}[setup.optimizer]
    moved = 0.0
    if "optimizer" in setup.offload:
        moved += updated * moments
    if "weights" in setup.offload:
        moved += 2 * setup.element_bytes * setup.stage_parameters * setup.micro_batches
    if "activations" in setup.offload:
        moved += (
            setup.element_bytes
            * setup.tokens
            * setup.stage_layers
            * setup.dims.hidden
            * setup.micro_batches
        )
    return moved


@dataclass(frozen=True)
class _Links:
    """The traffic of a rank as pairs of seconds: over the link within a host, and over the network
    of the whole host. Ranks of a tensor group are neighbors, then the ranks of a context group,
    then the ranks that shard, then replicas, then pipeline stages."""

    setup: TrainingSetup
    rates: Rates

    @property
    def hosts(self) -> int:
        return math.ceil(self.setup.world_size / self.setup.devices_per_host)

    def _group(self, size: int, stride: int, sent: float) -> tuple[float, float]:
        """Return the seconds of a gather (or a scatter) of ``sent`` bytes among ``size`` ranks that
        are ``stride`` ranks apart. The cards of a host serve all groups that cross it."""
        if size <= 1 or sent <= 0:
            return 0.0, 0.0
        per_host = max(1, min(size, self.setup.devices_per_host // max(1, stride)))
        hosts = math.ceil(size / per_host)
        link = sent * (size - 1) / size / self.rates.link_bytes_s if per_host > 1 else 0.0
        if hosts == 1:
            return link, 0.0
        groups = max(1.0, min(self.setup.devices_per_host, self.setup.world_size) / per_host)
        network = sent * (hosts - 1) / hosts * groups / self.rates.host_network_bytes_s
        spanned = math.ceil(size * stride / self.setup.devices_per_host)
        return link, network * self._oversubscription(spanned)

    def _oversubscription(self, hosts: int) -> float:
        """Return by how much the network between this many hosts is slower than below a switch."""
        below = self.setup.hosts_per_switch
        return self.setup.oversubscription if 0 < below < hosts else 1.0

    def tensor_exchange(self) -> tuple[float, float]:
        """Four exchanges a layer, and two more where forward is repeated, less the last if that
        stops early; each is a gather and a scatter."""
        setup = self.setup
        exchanges = 4 + (1 if setup.stops_early else 2) * setup.passes_again
        sent = (
            2
            * exchanges
            * setup.element_bytes
            * setup.tokens
            * setup.dims.hidden
            * setup.stage_layers
        )
        return self._group(setup.tensor, 1, sent)

    def context_exchange(self) -> tuple[float, float]:
        """Keys and values of all tokens, in forward and backward, and their gradients."""
        setup = self.setup
        sent = (
            2 * setup.element_bytes * setup.tokens * setup.context * setup.dims.keys / setup.tensor
        )
        times = 3 + setup.attention_again
        return self._group(setup.context, setup.tensor, sent * setup.stage_layers * times)

    def expert_exchange(self) -> tuple[float, float]:
        """Tokens sent to their experts and back, and their gradients; twice more where forward is
        repeated."""
        setup = self.setup
        sent = (
            (4 + 2 * setup.passes_again)
            * setup.expert_element_bytes
            * setup.tokens
            * setup.dims.experts_per_token
            * setup.dims.hidden
        )
        stride = setup.tensor * setup.context
        return self._group(setup.expert, stride, sent * setup.stage_layers)

    def hops(self) -> float:
        setup = self.setup
        if setup.pipeline == 1:
            return 0.0
        sent = (
            2 * setup.element_bytes * setup.tokens * setup.dims.hidden * setup.chunks / setup.tensor
        )
        link, network = self._between_stages(sent)
        return link + network

    def tied_traffic(self) -> tuple[float, float]:
        """The all-reduce of the gradients that the first and the last pipeline stage have of the
        same weight (Narayanan et al., 2021, section 2.2, for the stages)."""
        setup = self.setup
        is_trained = not setup.is_frozen or setup.trains_embeddings
        if setup.pipeline == 1 or not setup.dims.tied or not is_trained:
            return 0.0, 0.0
        split = setup.shard * (setup.tensor if setup.splits_head else 1)
        return self._between_stages(setup.gradient_bytes * setup.table_parameters / split)

    def _between_stages(self, sent: float) -> tuple[float, float]:
        """Return the seconds in which each rank of a stage sends bytes to one of another stage. All
        ranks of a host share its cards."""
        setup = self.setup
        if setup.world_size <= setup.devices_per_host:
            return sent / self.rates.link_bytes_s, 0.0
        share = self.rates.host_network_bytes_s / setup.devices_per_host
        return 0.0, sent / share * self._oversubscription(self.hosts)

    def _stride(self) -> int:
        return self.setup.tensor * self.setup.context

    def shard_traffic(self) -> tuple[float, float]:
        """Traffic of every micro-batch: of ZeRO-3, two gathers of the weights, and of ZeRO-2 and 3
        a scatter of the gradients."""
        setup = self.setup
        if setup.zero_stage < 2:
            return 0.0, 0.0
        trained = setup.trained_expert_parameters
        sent = setup.reduce_bytes * (setup.trained_parameters - trained)
        of_experts = setup.reduce_bytes * trained
        if setup.zero_stage == 3:
            each = setup.frozen_bits / 8 if setup.is_frozen else setup.element_bytes
            sent += 2 * each * setup.stage_parameters
            of_experts += 2 * each * setup.stage_expert_parameters
        ranks = setup.shard * setup.context
        if setup.expert == 1:
            return self._group(ranks, setup.tensor, sent + of_experts)
        # The ranks with the same experts are as far apart as a group that divides them is large.
        link, network = self._group(ranks, setup.tensor, sent)
        stride = setup.tensor * setup.expert
        expert_link, expert_network = self._group(setup.expert_copies, stride, of_experts)
        return link + expert_link, network + expert_network

    def shard_messages(self) -> float:
        """Messages of a micro-batch: two gathers and a scatter for each layer, with ZeRO-2 one
        gather less."""
        setup = self.setup
        if setup.zero_stage < 2 or setup.shard == 1:
            return 0.0
        span = setup.shard * self._stride()
        hosts = math.ceil(span / setup.devices_per_host)
        return setup.zero_stage * setup.stage_layers * math.log2(1 + hosts)

    def sync_traffic(self) -> tuple[float, float]:
        """Gradients that are reduced once a step."""
        setup = self.setup
        trained, stride = setup.trained_parameters, self._stride()
        if setup.zero_stage == 0:
            sent = 2 * setup.reduce_bytes * trained
            if setup.sync_bytes is not None:
                ranks = setup.replicas * setup.context
                sent = setup.sync_bytes * ranks / max(1, ranks - 1)
            return self._group(setup.replicas * setup.context, setup.tensor, sent)
        link = network = 0.0
        if setup.zero_stage == 1:
            sent = setup.reduce_bytes * trained
            link, network = self._group(setup.shard * setup.context, setup.tensor, sent)
        if setup.zero_stage == 3 and setup.expert > 1:  # experts are sharded over all their ranks
            trained -= setup.trained_expert_parameters
        outside = 2 * setup.reduce_bytes * trained / setup.shard
        between = self._group(setup.data, stride * setup.shard, outside)
        return link + between[0], network + between[1]

    def gather_traffic(self) -> tuple[float, float]:
        """Weights that ZeRO-1 and 2 gather after an update."""
        setup = self.setup
        if setup.zero_stage not in (1, 2):
            return 0.0, 0.0
        ranks = setup.shard * setup.context
        return self._group(ranks, setup.tensor, setup.element_bytes * setup.trained_parameters)

    def _crossing(self, size: int, stride: int) -> float:
        """Return the ranks of a group if it spans several hosts: a ring passes through them all."""
        return float(size) if size > 1 and size * stride > self.setup.devices_per_host else 0.0

    def sync_ranks(self) -> float:
        setup, stride = self.setup, self._stride()
        if setup.zero_stage == 0:
            return self._crossing(setup.replicas, stride)
        inside = self._crossing(setup.shard, stride) if setup.zero_stage == 1 else 0.0
        return inside + self._crossing(setup.data, stride * setup.shard)

    def gather_ranks(self) -> float:
        setup = self.setup
        is_gathered = setup.zero_stage in (1, 2)
        return self._crossing(setup.shard, self._stride()) if is_gathered else 0.0
