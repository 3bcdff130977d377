"""The seconds of a training step from a rank's work and fitted coefficients. Imports no torch.

All arithmetic is elementwise, so that a fit can evaluate many set-ups at once as arrays of numpy.
"""

from dataclasses import dataclass

from paceline.planner.time.work import RankWork


@dataclass(frozen=True)
class Coefficients:
    """What a set-up reaches on a device; each is a product of fitted constants (see
    :func:`~paceline.planner.time.constants.factors_of`).

    Args:
        product_share, head_share, attention_share: shares of the peak rate, for large products.
        row_loss, width_loss: rows (inputs and outputs) of a product that double its time.
        head_width_loss, head_row_loss: the same of the head.
        stream, logits, dequantize, optimizer: reads and writes, in units of those counted; the last
            also of sums of gradients.
        launch_s: time to launch a layer's forward pass.
        link_share, network_share: shares of the bandwidth within a host, and between hosts.
        tensor_link_share: the former, of exchanges that a matrix product waits for.
        network_decay: share that is lost per doubling of the hosts.
        tensor_message_s, shard_message_s, sync_message_s, sync_rank_s: latencies. The first is also
            that between pipeline stages.
        tensor_exposed: share of tensor parallelism's exchanges that is not hidden.
        overlap: share of the computation that can hide traffic.
        overlap_cost: share of the hidden traffic that computation is slowed down by.
        sync_overlap: share of the last micro-batch that can hide the gradients of data parallelism.
        sync_overlap_cost: as ``overlap_cost``, of these gradients.
        gather_exposed: share of the gathers of updated weights that is not hidden.
        hop: exposed share of the sends between pipeline stages.
        bubble: idle time of a pipeline in units of the ideal one.
        overhead_s: overhead of a step.
        launch_order: how far computation hides launches: 1 not at all, as on a CPU.
    """

    product_share: float
    head_share: float
    attention_share: float
    row_loss: float
    width_loss: float
    head_row_loss: float
    head_width_loss: float
    stream: float
    logits: float
    dequantize: float
    optimizer: float
    launch_s: float
    link_share: float
    tensor_link_share: float
    network_share: float
    network_decay: float
    tensor_message_s: float
    shard_message_s: float
    sync_message_s: float
    sync_rank_s: float
    tensor_exposed: float
    overlap: float
    overlap_cost: float
    sync_overlap: float
    sync_overlap_cost: float
    gather_exposed: float
    hop: float
    bubble: float
    host_copy: float
    overhead_s: float
    launch_order: float = 4.0


@dataclass(frozen=True)
class EstimatedStepTime:
    """The seconds of a step.

    Args:
        products_s, attention_s, memory_s: matrix products, attention, and operations limited by
            memory, of all micro-batches.
        launches_s: what the GPU waits for Python.
        exposed_s: exchanges within layers that computation waits for.
        idle_s: idle time of a pipeline.
        traffic_s: time of the traffic of weights and gradients that computation does not hide.
        optimizer_s: update and fixed costs of a step.
        host_s: copies to and from the host that are not hidden.
    """

    products_s: float
    attention_s: float
    memory_s: float
    launches_s: float
    exposed_s: float
    idle_s: float
    traffic_s: float
    optimizer_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return (
            self.products_s
            + self.attention_s
            + self.memory_s
            + self.launches_s
            + self.exposed_s
            + self.idle_s
            + self.traffic_s
            + self.optimizer_s
            + self.host_s
        )


def step_time(work: RankWork, reached: Coefficients) -> EstimatedStepTime:
    """Return the time of a step, by its parts."""
    products = _products(work, reached)
    attention = work.attention_s / reached.attention_share
    memory = (
        work.stream_s * reached.stream
        + work.logits_s * reached.logits
        + work.dequantize_s * reached.dequantize
        + work.accumulate_s * reached.optimizer
    )
    device = products + attention + memory
    # CPU and GPU run side by side; the slower one decides, with a smooth transition.
    order = reached.launch_order
    micro_batch = (device**order + (work.launches * reached.launch_s) ** order) ** (1 / order)
    exposed = _exposed(work, reached)
    busy = micro_batch + exposed
    idle = _idle(busy, work, reached)
    hops = _hops(busy, work, reached)
    computing = busy * work.micro_batches
    shards = _traffic(work.shard_link_s, work.shard_network_s, work, reached)
    shards = (shards + work.shard_messages * reached.shard_message_s) * work.micro_batches
    sync = _traffic(work.sync_link_s, work.sync_network_s, work, reached)
    sync = sync + work.sync_ranks * reached.sync_rank_s
    sync = sync + work.sync_messages * reached.sync_message_s
    gather = _traffic(work.gather_link_s, work.gather_network_s, work, reached)
    traffic = _unhidden(shards, reached.overlap * (computing + idle), reached.overlap_cost)
    traffic = traffic + _unhidden_sync(sync, micro_batch, work, reached)
    gather = gather * reached.gather_exposed + work.gather_ranks * reached.sync_rank_s
    gather = gather + work.gather_messages * reached.sync_message_s
    tied = _traffic(work.tied_link_s, work.tied_network_s, work, reached)
    traffic = traffic + gather + tied
    host = work.host_copy_s * reached.host_copy
    number = work.micro_batches
    return EstimatedStepTime(
        products_s=products * number,
        attention_s=attention * number,
        memory_s=memory * number,
        launches_s=(micro_batch - device) * number,
        exposed_s=exposed * number + hops,
        idle_s=idle,
        traffic_s=traffic,
        optimizer_s=work.optimizer_s * reached.optimizer + reached.overhead_s,
        host_s=host,
    )


def _products(work: RankWork, reached: Coefficients) -> float:
    """Return the time of matrix products: those with few rows or narrow weights reach less of the
    peak, as tiles and launches are not filled."""
    layers = work.products_s + reached.row_loss * work.products_per_row
    layers = layers + reached.width_loss * work.products_per_width
    return layers / reached.product_share + _head(work, reached)


def _head(work: RankWork, reached: Coefficients) -> float:
    head = work.head_s + reached.head_row_loss * work.head_per_row
    head = head + reached.head_width_loss * work.head_per_width
    return head / reached.head_share


def _idle(busy: float, work: RankWork, reached: Coefficients) -> float:
    """Return the idle time of a pipeline whose last stage has the head, and as many layers as the
    others: every micro-batch takes the time of the last stage, and one passes through the others
    before and after it (Narayanan et al., 2021, section 2.2).

    Args:
        busy: mean time of a stage in a micro-batch.
    """
    longer = _longer(work, reached)
    others = _larger(busy * (work.stages - 1) - longer, 0.0 * busy)
    return (longer * work.micro_batches + others / work.chunks) * reached.bubble


def _longer(work: RankWork, reached: Coefficients) -> float:
    """Return by how much the last stage, with the head, takes longer than the mean stage."""
    return (_head(work, reached) + work.logits_s * reached.logits) * (work.stages - 1)


def _hops(busy: float, work: RankWork, reached: Coefficients) -> float:
    """Return the time of the messages between the stages that computation waits for: the messages
    of the first and of the last micro-batch, and of each micro-batch as far as they take longer
    than the last stage's computation, during which they are sent."""
    hop = work.hop_s * reached.hop + work.hop_messages * reached.tensor_message_s
    longest = busy + _longer(work, reached)
    beyond = _larger(hop - longest, 0.0 * hop)
    return hop * (work.stages - 1) + beyond * work.micro_batches


def _exposed(work: RankWork, reached: Coefficients) -> float:
    """Return the time of the exchanges that a layer waits for in a micro-batch."""
    tensor = _larger(
        work.tensor_link_s / reached.tensor_link_share,
        work.tensor_network_s / reached.network_share,
    )
    tensor = tensor + work.tensor_messages * reached.tensor_message_s
    context = _traffic(work.context_link_s, work.context_network_s, work, reached)
    context = _unhidden(
        context,
        reached.overlap * work.attention_s / reached.attention_share,
        reached.overlap_cost,
    )
    experts = _traffic(work.expert_link_s, work.expert_network_s, work, reached)
    return tensor * reached.tensor_exposed + context + experts


def _traffic(link_s: float, network_s: float, work: RankWork, reached: Coefficients) -> float:
    """Return the time of a collective over hosts: the slower of the two kinds of links."""
    across = reached.network_share * (1 - reached.network_decay * work.hosts_log)
    return _larger(link_s / reached.link_share, network_s / across)


def _unhidden_sync(sync: float, micro_batch: float, work: RankWork, reached: Coefficients) -> float:
    """Return what the all-reduces of gradients add to a step. They start when the first bucket is
    full, and the last one starts after backward. If buckets are equal and filled at a constant
    rate, one of these two decides when the last ends."""
    hiding = reached.sync_overlap * micro_batch * (1 - work.sync_first)
    waiting = _larger(sync - hiding, sync * work.sync_last)
    return _joined(waiting, reached.sync_overlap_cost * (sync - waiting))


def _unhidden(traffic: float, work: float, cost: float) -> float:
    """Return what traffic adds to a step beside which ``work`` seconds of computation run."""
    hidden = traffic - _larger(traffic - work, 0.0 * traffic)
    return _joined(traffic - hidden, cost * hidden)


def _joined(waiting: float, slowed: float) -> float:
    """Return the root of the sum of squares. A small number keeps it differentiable."""
    seconds: float = (waiting**2 + slowed**2 + 1e-24) ** 0.5
    return seconds


def _larger(first: float, second: float) -> float:
    """Return the larger number; of arrays, elementwise."""
    return (first + second + abs(first - second)) / 2
