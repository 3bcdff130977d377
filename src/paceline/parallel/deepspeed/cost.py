"""What DeepSpeed's ZeRO costs, as its code lays it out: padding, buckets and second copies
included. Numbers alone."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes, scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.deepspeed.config import zero_section


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Formulas: Rajbhandari et al., "ZeRO", 2020, sections 3 and 7, with what DeepSpeed's code does
    differently:

    - a second, float32 copy of the partition is kept in float32 training too (4/N bytes a
      parameter);
    - stages 1 and 2 all-reduce the gradients although each rank needs a part (2Ψ instead of Ψ),
      stage 2 in every micro-batch;
    - a rank keeps whole the gradients of the parameters that its partition touches, and twice so
      while it accumulates; beside them stands the bucket in which gradients are gathered for the
      collective;
    - stage 3 pads each parameter to a multiple of N, and gathers it for forward and for backward of
      every micro-batch.
    """
    ranks = axes.size
    section = zero_section(config, sum(one.numel for one in shape.trained), shape.low_bytes)
    if section["stage"] == 3:
        return _stage_3(shape, ranks, work, section, config)
    return _stages_1_and_2(shape, ranks, work, section, config.parallel.cpu_offload)


def _width(one: TensorShape, shape: ModelShape) -> int:
    return shape.low_bytes or one.element_bytes


def _groups(trained: Sequence[TensorShape]) -> list[list[TensorShape]]:
    """As the optimizer is built: matrices, on which weight decay falls, then the rest."""
    both = [
        [one for one in trained if len(one.shape) >= 2],
        [one for one in trained if len(one.shape) < 2],
    ]
    return [group for group in both if group]


def _stages_1_and_2(
    shape: ModelShape, ranks: int, work: Workload, section: dict[str, int], offload: str
) -> Cost:
    width = shape.low_bytes or 4
    trained = sum(one.numel for one in shape.trained)
    groups = _groups(shape.trained)
    # Each group is padded to a multiple of 2N elements (ZeRO stage 1 and 2:
    # `nccl_start_alignment_factor`).
    padded = [_up(sum(one.numel for one in group), 2 * ranks) for group in groups]
    frozen = sum(one.numel * _width(one, shape) for one in shape.parameters if not one.trainable)
    # one fills, one is reduced
    buckets = 2 if section["overlap_comm"] and section.get("contiguous_gradients", True) else 1
    bucket = min(int(section["reduce_bucket_size"]), 10**12) * width * buckets
    if section["stage"] == 1:
        gradients = trained * width + bucket
    else:
        sums = [[0, *accumulate(one.numel for one in group)] for group in groups]
        touched = max(
            sum(
                _touched(group, size // ranks, rank)
                for group, size in zip(sums, padded, strict=True)
            )
            for rank in range(ranks)
        )
        gradients = bucket + touched * width * (2 if work.micro_batches > 1 else 1)
    reduced = trained * width * (work.micro_batches if section["stage"] == 2 else 1)
    partition = sum(padded) // ranks * (4 + shape.optimizer_bytes_per_element)
    return Cost(
        parameters=sum(padded) * width + frozen + shape.buffer_bytes,
        gradients=gradients,
        optimizer=0 if offload != "none" else partition,
        activations=work.activation_bytes,
        traffic={
            "all_reduce": all_reduce_bytes(reduced, ranks),
            "all_gather": sum(scatter_bytes(size * width, ranks) for size in padded),
        },
    )


def _touched(sums: Sequence[int], size: int, rank: int) -> int:
    """Elements of the parameters that rank's partition of ``size`` elements has a share in.
    ``sums``: where each parameter begins, and the end of the last."""
    # the first that ends behind the partition's start
    first = bisect_right(sums, rank * size, lo=1) - 1
    # the first that begins at its end or later
    behind = bisect_left(sums, (rank + 1) * size, hi=len(sums) - 1)
    return sums[behind] - sums[first] if behind > first else 0


def _stage_3(
    shape: ModelShape, ranks: int, work: Workload, section: dict[str, int], config: Config
) -> Cost:
    offload, recomputed = config.parallel.cpu_offload, config.train_args.gradient_checkpointing
    threshold = int(section["stage3_param_persistence_threshold"])
    # Weights whose next use lies within this number of elements are kept: in a smaller model, from
    # forward to backward.
    reuse = min(
        int(section["stage3_max_reuse_distance"]), int(section["stage3_max_live_parameters"])
    )
    stays_gathered = reuse >= 2 * sum(one.numel for one in shape.parameters)
    weights = gathered = kept = 0
    first_trained = next(
        (number for number, one in enumerate(shape.parameters) if one.trainable), 0
    )
    for number, one in enumerate(shape.parameters):
        part = _up(one.numel, ranks) // ranks
        width = _width(one, shape)
        weights += part * width
        uses = 1 + sum(name == one.name for name in shape.aliases.values())
        if one.numel <= threshold:  # whole on every rank, gathered once a step
            kept += one.numel * width
            gathered += part * ranks * width
        elif stays_gathered:
            gathered += work.micro_batches * part * ranks * width
        else:
            # Backward does not come to a module that stands before the first trained weight, unless
            # activations are recomputed: the blocks' inputs then need gradients, and each block
            # runs forward once more.
            reached = uses - (number < first_trained and not recomputed)
            again = recomputed and one.name.startswith(tuple(f"{block}." for block in shape.blocks))
            gathered += (uses + reached + again) * work.micro_batches * part * ranks * width
    width = shape.low_bytes or 4
    partition = sum(_up(one.numel, ranks) // ranks for one in shape.trained)
    bucket = int(section["reduce_bucket_size"]) * width
    return Cost(
        parameters=(0 if offload == "all" else weights) + kept + shape.buffer_bytes,
        gradients=partition * width + bucket,
        optimizer=0 if offload != "none" else partition * (4 + shape.optimizer_bytes_per_element),
        activations=work.activation_bytes,
        traffic={
            "reduce_scatter": scatter_bytes(partition * ranks * width * work.micro_batches, ranks),
            "all_gather": scatter_bytes(gathered, ranks),
        },
    )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
