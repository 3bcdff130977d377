"""Memory and traffic of DeepSpeed's ZeRO, with the padding, buckets and second copies of its
code."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes, scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.cost import Cost, Workload
from paceline.strategies.deepspeed.config import zero_section


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the cost of training by DeepSpeed.

    Formulas: Rajbhandari et al., "ZeRO", 2020, sections 3 and 7. DeepSpeed's code differs:

    - a second, float32 copy of the partition exists in float32 training too (4/N bytes per
      parameter);
    - stages 1 and 2 all-reduce the gradients although each rank needs a part (2Ψ instead of Ψ),
      stage 2 in every micro-batch;
    - a rank holds the full gradients of the parameters that its partition touches, twice while it
      accumulates, and the bucket in which gradients are packed for the collective;
    - stage 3 pads each parameter to a multiple of N, and gathers it for forward and for backward of
      every micro-batch.
    """
    section = zero_section(config, shape.trained_elements, shape.low_bytes)
    if section["stage"] == 3:
        return _stage_3(shape, axes.size, work, section, config)
    return _stages_1_and_2(shape, axes.size, work, section, config.parallel.state_offload)


def _element_bytes(tensor: TensorShape, shape: ModelShape) -> int:
    return shape.low_bytes or tensor.element_bytes


def _stages_1_and_2(
    shape: ModelShape, ranks: int, work: Workload, section: dict[str, int], offload: str
) -> Cost:
    width = shape.low_bytes or 4
    # The optimizer's parameter groups: matrices, which have weight decay, and the rest.
    matrices = [tensor.numel for tensor in shape.trained if len(tensor.shape) >= 2]
    others = [tensor.numel for tensor in shape.trained if len(tensor.shape) < 2]
    groups = [group for group in (matrices, others) if group]
    # Each group is padded to a multiple of 2N elements (ZeRO stage 1 and 2:
    # `nccl_start_alignment_factor`).
    padded = [_round_up(sum(group), 2 * ranks) for group in groups]
    frozen = sum(
        tensor.numel * _element_bytes(tensor, shape)
        for tensor in shape.parameters
        if not tensor.trainable
    )
    # one bucket is filled while the other is reduced
    buckets = 2 if section["overlap_comm"] and section.get("contiguous_gradients", True) else 1
    bucket = min(int(section["reduce_bucket_size"]), 10**12) * width * buckets
    if section["stage"] == 1:
        gradients = shape.trained_elements * width + bucket
    else:
        bounds = [[0, *accumulate(group)] for group in groups]
        touched = max(
            sum(
                _touched(group, size // ranks, rank)
                for group, size in zip(bounds, padded, strict=True)
            )
            for rank in range(ranks)
        )
        gradients = bucket + touched * width * (2 if work.micro_batches > 1 else 1)
    reductions = work.micro_batches if section["stage"] == 2 else 1
    reduced = shape.trained_elements * width * reductions
    partition = sum(padded) // ranks * (4 + shape.optimizer.element_bytes)
    return Cost(
        parameters=sum(padded) * width + frozen + shape.buffer_bytes,
        gradients=gradients,
        optimizer=0 if offload != "none" else partition,
        activations=work.activation_bytes(shape),
        traffic={
            "all_reduce": all_reduce_bytes(reduced, ranks),
            "all_gather": sum(scatter_bytes(size * width, ranks) for size in padded),
        },
    )


def _touched(bounds: Sequence[int], size: int, rank: int) -> int:
    """Return the elements of the parameters that overlap a rank's partition of ``size`` elements.

    Args:
        bounds: where each parameter of the group begins, and the end of the last.
    """
    # the first parameter that ends after the start of the partition
    first = bisect_right(bounds, rank * size, lo=1) - 1
    # the first parameter that begins at or after the end of the partition
    beyond = bisect_left(bounds, (rank + 1) * size, hi=len(bounds) - 1)
    return bounds[beyond] - bounds[first] if beyond > first else 0


def _stage_3(
    shape: ModelShape, ranks: int, work: Workload, section: dict[str, int], config: Config
) -> Cost:
    offload = config.parallel.state_offload
    recomputed = config.train_args.recomputed_share(len(shape.blocks))
    forwards = 1 + config.extra_forwards
    threshold = int(section["stage3_param_persistence_threshold"])
    # Weights that are used again within this number of elements stay gathered: in a smaller model,
    # from forward to backward.
    reuse = min(
        int(section["stage3_max_reuse_distance"]), int(section["stage3_max_live_parameters"])
    )
    stays_gathered = reuse >= 2 * sum(tensor.numel for tensor in shape.parameters)
    weights = gathered = persistent = 0
    first_trained = next(
        (number for number, tensor in enumerate(shape.parameters) if tensor.trainable), 0
    )
    for number, tensor in enumerate(shape.parameters):
        part = _round_up(tensor.numel, ranks) // ranks
        width = _element_bytes(tensor, shape)
        weights += part * width
        uses = 1 + sum(name == tensor.name for name in shape.aliases.values())
        if tensor.numel <= threshold:  # in full on every rank, gathered once per step
            persistent += tensor.numel * width
            gathered += part * ranks * width
        elif stays_gathered:
            gathered += forwards * work.micro_batches * part * ranks * width
        else:
            # Backward does not reach a module before the first trained weight. A block whose
            # activations are recomputed runs its forward once more.
            reached = uses - (number < first_trained)
            in_block = tensor.name.startswith(tuple(f"{block}." for block in shape.blocks))
            passes = forwards * uses + reached + recomputed * in_block
            gathered += round(passes * work.micro_batches * part * ranks * width)
    width = shape.low_bytes or 4
    partition = sum(_round_up(tensor.numel, ranks) // ranks for tensor in shape.trained)
    bucket = int(section["reduce_bucket_size"]) * width
    return Cost(
        parameters=(0 if offload == "all" else weights) + persistent + shape.buffer_bytes,
        gradients=partition * width + bucket,
        optimizer=0 if offload != "none" else partition * (4 + shape.optimizer.element_bytes),
        activations=work.activation_bytes(shape),
        traffic={
            "reduce_scatter": scatter_bytes(partition * ranks * width * work.micro_batches, ranks),
            "all_gather": scatter_bytes(gathered, ranks),
        },
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
