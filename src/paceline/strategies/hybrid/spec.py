"""Specs of `tensor`, `pipeline` and `hybrid`. Imports no torch."""

from dataclasses import replace

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Capabilities, Limit, Subject
from paceline.parallel.limits.experts import EXPERTS
from paceline.parallel.limits.offload import (
    ON_DEVICE,
    USE_ZERO3,
    no_activation_offload,
    no_state_offload,
)
from paceline.parallel.limits.shared import (
    NO_QUANTIZATION,
    SPLIT_MATRICES,
    no_compile,
    no_float8,
    with_dims,
)
from paceline.parallel.limits.training import STAGE_WITHOUT_PARAMETERS
from paceline.parallel.spec import StrategySpec


def _no_tensor_dim(config: Config, dims: ParallelDims) -> str | None:
    return "`parallel.tensor: 1`" if dims.tensor == 1 else None


def _not_split(key: str, value: object, reason: str, *dims: str) -> Limit:
    """Return the limit of a variant of LoRA whose layers cannot be divided."""
    return Limit(
        key,
        reason,
        "set `parallel.mode: zero3`, or use plain LoRA",
        unsupported=(value,),
        subject=with_dims(*dims),
    )


def _no_click_models(subject: Subject | None = None) -> Limit:
    return Limit(
        "task",
        "a click model has no sequence of layers to split",
        "set `parallel.mode: parameter_server` if the tables do not fit, else `ddp`",
        unsupported=("recommend",),
        allowed="`parallel.mode: ddp`, zero1 to zero3, parameter_server",
        subject=subject,
    )


LIMITS = (
    *EXPERTS,
    *STAGE_WITHOUT_PARAMETERS,
    no_compile(
        "collectives run inside the blocks, and graphs cannot contain them", with_dims("tensor")
    ),
    no_compile("compiled blocks are untested in pipeline stages", with_dims("pipeline")),
    no_float8("parts of a layer may have sizes that are no multiples of 16", with_dims("tensor")),
    no_float8("float8 layers are untested in pipeline stages", with_dims("pipeline")),
    replace(NO_QUANTIZATION, subject=with_dims("tensor", "pipeline")),
    _not_split(
        "lora.use_dora", True, "the parts of a layer need the norm of the whole matrix", "tensor"
    ),
    _not_split("lora.method", "vera", "all layers share its random matrices", "tensor", "pipeline"),
    Limit(
        "parallel.sequence_parallel",
        "it shards activations between tensor-parallel layers, and there are none",
        "set `parallel.tensor: 2`, or leave `parallel.sequence_parallel` out",
        unsupported=(True,),
        subject=_no_tensor_dim,
    ),
    Limit(
        "evaluation.mode",
        "no rank has the full model",
        "set `evaluation.mode: distributed`, which computes the same metrics on all ranks",
        unsupported=("rank0",),
        subject=with_dims("shard", "tensor", "pipeline"),
    ),
    no_state_offload(
        "optimizer",
        "all",
        reason=ON_DEVICE,
        fix=USE_ZERO3,
        allowed="`parallel.mode: zero2`, `zero3` or `deepspeed` on accelerators",
    ),
    no_activation_offload(
        "a stage runs forward of other micro-batches before backward of the first",
        with_dims("pipeline"),
    ),
    Limit(
        "train_args.optim",
        "its factored state needs whole matrices",
        "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
        unsupported=("adafactor",),
        allowed="adamw, adam, sgd, rmsprop, adagrad",
        subject=with_dims("shard", "tensor"),
    ),
    replace(SPLIT_MATRICES, subject=with_dims("shard", "tensor")),
    Limit(
        "parallel.pipeline_schedule",
        "its split backward does not run FSDP's hooks",
        "set `parallel.pipeline_schedule: 1f1b`, or `parallel.shard: 1`",
        unsupported=("zero_bubble",),
        subject=with_dims("pipeline", "shard", every=True),
    ),
    Limit(
        "parallel.sequence_parallel",
        "pipeline stages exchange full sequences",
        "set `parallel.sequence_parallel: false`, or `parallel.pipeline: 1`",
        unsupported=(True,),
        subject=with_dims("pipeline"),
    ),
)

SPLIT_LAYERS = Capabilities((_no_click_models(), *LIMITS), reduces_in_buckets=True)
CAPABILITIES = Capabilities(
    (_no_click_models(with_dims("tensor", "pipeline")), *LIMITS),
    reduces_in_buckets=True,
    generates=True,
)

TENSOR = StrategySpec(
    name="tensor",
    implementation="paceline.strategies.hybrid.strategy:HybridStrategy",
    cost_model="paceline.strategies.hybrid.cost:estimate",
    main_dim="tensor",
    extra_dims=("data", "context"),
    capabilities=SPLIT_LAYERS,
    check_sizes="paceline.strategies.hybrid.check:check_sizes",
    check_model="paceline.strategies.hybrid.model_check:check_model",
)
PIPELINE = StrategySpec(
    name="pipeline",
    implementation="paceline.strategies.hybrid.strategy:HybridStrategy",
    cost_model="paceline.strategies.hybrid.cost:estimate",
    main_dim="pipeline",
    extra_dims=("data", "context"),
    capabilities=SPLIT_LAYERS,
    check_sizes="paceline.strategies.hybrid.check:check_sizes",
    check_model="paceline.strategies.hybrid.model_check:check_model",
)
HYBRID = StrategySpec(
    name="hybrid",
    implementation="paceline.strategies.hybrid.strategy:HybridStrategy",
    cost_model="paceline.strategies.hybrid.cost:estimate",
    extra_dims=("shard", "context", "tensor", "pipeline"),
    capabilities=CAPABILITIES,
    check_sizes="paceline.strategies.hybrid.check:check_sizes",
    check_model="paceline.strategies.hybrid.model_check:check_model",
)
