"""Spec of `deepspeed`. Imports no torch."""

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Capabilities, Limit, Subject
from paceline.parallel.limits.offload import no_activation_offload, no_state_offload
from paceline.parallel.limits.shared import (
    NO_QUANTIZATION,
    QUANTIZED_OPTIMIZERS,
    needs_float32_weights,
    no_compile,
    no_float8,
)
from paceline.parallel.limits.training import NO_AVERAGE
from paceline.parallel.spec import StrategySpec
from paceline.strategies.deepspeed.config import stage_of


def _deepspeed_stage(*stages: int) -> Subject:
    def subject(config: Config, dims: ParallelDims) -> str | None:
        stage = stage_of(config.parallel)
        return f"`parallel.deepspeed_stage: {stage}`" if stage in stages else None

    return subject


LIMITS = (
    NO_AVERAGE,
    no_compile("compiled blocks are untested with DeepSpeed's hooks"),
    no_float8("float8 layers are untested with DeepSpeed's hooks"),
    NO_QUANTIZATION,
    needs_float32_weights("DeepSpeed itself converts the weights, without stochastic rounding"),
    Limit(
        "train_args.optim",
        "DeepSpeed passes flat parts of several parameters to the optimizer, and with these it"
        " computes different updates",
        "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
        unsupported=("adagrad", "adafactor", "muon"),
        allowed="adamw, adam, sgd, rmsprop",
    ),
    Limit(
        "train_args.optim",
        "DeepSpeed's partitions have no form of its state that a checkpoint can contain",
        "set `train_args.optim: adamw`, or `parallel.mode: zero2`, which shards the same",
        unsupported=(*QUANTIZED_OPTIMIZERS, "lion", "schedule_free_adamw"),
        allowed="adamw, adam, sgd, rmsprop",
    ),
    Limit(
        "evaluation.mode",
        "no rank has the full model",
        "leave `evaluation.mode` out",
        unsupported=("rank0",),
        allowed="`evaluation.mode: distributed`",
        subject=_deepspeed_stage(3),
    ),
    no_state_offload(
        "all",
        reason="only stage 3 can offload parameters",
        fix="set `parallel.deepspeed_stage: 3`",
        allowed="`parallel.cpu_offload: optimizer`, or stage 3",
        subject=_deepspeed_stage(1, 2),
    ),
    no_activation_offload("it is untested with DeepSpeed's hooks"),
)

DEEPSPEED = StrategySpec(
    name="deepspeed",
    implementation="paceline.strategies.deepspeed.strategy:DeepSpeedStrategy",
    cost_model="paceline.strategies.deepspeed.cost:estimate",
    has_low_weights=True,
    capabilities=Capabilities(
        LIMITS,
        equal_shares_reason=("DeepSpeed requires the same number of micro-batches on all ranks"),
        chosen_by_auto=False,
    ),
    reduces_low_weights=True,
    variants=(1, 2, 3),
    variant=lambda config: stage_of(config.parallel),
    check_sizes="paceline.strategies.deepspeed.check:check_settings",
    check_installation="paceline.strategies.deepspeed.check:check_package",
)
