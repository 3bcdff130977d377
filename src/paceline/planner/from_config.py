"""Derive the set-up of a training step from a config and a layout. Imports no torch."""

from paceline.config.schema import Config
from paceline.models.shape.dims import LanguageDims
from paceline.models.tensor_plan.style import uses_sequence_parallel
from paceline.parallel.registry import ParallelLayout, get_spec
from paceline.planner.setup import Optimizer, Precision, Recomputation, Software, TrainingSetup

_ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def setup_of(
    config: Config,
    dims: LanguageDims,
    layout: ParallelLayout,
    samples: float,
    length: float,
    label_share: float = 1.0,
    stage: int | None = None,
    splits_tokens: bool = True,
) -> TrainingSetup:
    """Return the set-up of a language model in a layout.

    Args:
        samples, length: number of samples of a micro-batch, and their mean number of tokens.
        label_share: share of the tokens that have a loss.
        stage: stage of DeepSpeed's ZeRO.
        splits_tokens: whether sequence parallelism is on by default.
    """
    args, lora, parallel, axes = config.train_args, config.lora, config.parallel, layout.axes
    zero_stage = _ZERO_STAGES.get(layout.strategy, stage or 0)
    if layout.strategy == "hybrid" and axes.shard > 1:
        zero_stage = 3
    # ZeRO-1 and DeepSpeed divide the state among the ranks of `data`.
    divides_data = zero_stage > 0 and axes.shard == 1
    is_pure = args.weight_dtype == "bfloat16"
    quantized = {"none": 16, "int8": 8}.get(lora.quantize, 4)
    chunked = parallel.pipeline_schedule in ("interleaved_1f1b", "zero_bubble")
    return TrainingSetup(
        dims,
        samples=samples,
        length=length,
        micro_batches=args.gradient_accumulation_steps,
        label_share=label_share,
        data=1 if divides_data else axes.data,
        shard=axes.data if divides_data else axes.shard,
        tensor=axes.tensor,
        pipeline=axes.pipeline,
        context=axes.context,
        expert=axes.expert,
        zero_stage=zero_stage,
        sequence_parallel=uses_sequence_parallel(
            parallel.sequence_parallel, axes.tensor, axes.pipeline, splits_tokens
        ),
        splits_head=axes.tensor > 1,
        chunks=parallel.stages_per_rank if chunked and axes.pipeline > 1 else 1,
        precision=_precision(config),
        fp8_scaling="tensor" if args.fp8 == "tensorwise" else "row",
        weight_bytes=2 if is_pure else 4,
        low_copy=layout.has_low_weights and not is_pure and args.mixed_dtype is not None,
        gradient_bytes=2 if is_pure else 4,
        reduce_bytes=2 if is_pure or _reduces_in_16_bits(config, layout, zero_stage) else 4,
        bucket_bytes=parallel.bucket_cap_mb * 2**20,
        optimizer=_optimizer(config),
        recompute=_recomputation(config),
        recompute_share=args.recomputed_share(dims.layers)
        if args.recomputation != "selective"
        else 1.0,
        cross_entropy="plain" if args.loss_chunk_size == 0 else "chunked",
        lora_rank=lora.rank if lora.enable else 0,
        frozen_bits=quantized if lora.enable else 16,
        software=_software(config),
    )


def _reduces_in_16_bits(config: Config, layout: ParallelLayout, zero_stage: int) -> bool:
    """Return whether gradients are reduced in the 16-bit dtype of mixed precision."""
    if not zero_stage or config.train_args.mixed_dtype is None:
        return False
    axes = layout.axes
    has_replicas = axes.shard > 1 and axes.data > 1
    return get_spec(layout.strategy).reduces_low_weights or (
        config.parallel.reduce_dtype == "auto" and not has_replicas
    )


def _precision(config: Config) -> Precision:
    args = config.train_args
    if args.fp8 != "none":
        return "fp8"
    return "float32" if args.compute_format not in ("bfloat16", "float16") else "bf16"


def _optimizer(config: Config) -> Optimizer:
    args = config.train_args
    if "8bit" in args.optim:
        return "adamw-8bit"
    return "adamw-bf16" if args.weight_dtype == "bfloat16" else "adamw"


def _recomputation(config: Config) -> Recomputation:
    setting = config.train_args.recomputation
    if setting == "selective":
        return "selective"
    return "none" if setting == "none" else "full"


def _software(config: Config) -> Software:
    return "compiled" if config.train_args.torch_compile else "eager"
