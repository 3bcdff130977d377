"""Specs of `zero2` and `zero3`. Imports no torch."""

from paceline.parallel.capabilities import Capabilities, Limit, with_setting
from paceline.parallel.limits.offload import no_state_offload
from paceline.parallel.limits.shared import SHARDED_MATRICES, SPLIT_MATRICES
from paceline.parallel.spec import StrategySpec

LIMITS = (
    Limit(
        "lora.quantize",
        "the scales of int8 weights are not sharded, and their layers do not gather them",
        "set `lora.quantize: nf4`, or `parallel.mode: ddp`",
        unsupported=("int8",),
        allowed="none, nf4, fp4",
    ),
    Limit(
        "lora.quantize",
        "the scales would stay on the device while the weights are in host memory",
        "set `parallel.cpu_offload: none`",
        supported=("none",),
        subject=with_setting("parallel.state_offload", "all"),
    ),
    SHARDED_MATRICES,
    SPLIT_MATRICES,
    Limit(
        "evaluation.mode",
        "rank 0 has only its shard of the model",
        "set `evaluation.mode: distributed`, or `parallel.mode: zero1`",
        unsupported=("rank0",),
        allowed="`evaluation.mode: distributed`",
    ),
    no_state_offload(
        "optimizer",
        reason="the optimizer state is on the same device as the shards of the weights",
        fix="set `parallel.cpu_offload: all`, or `parallel.mode: zero1` or `deepspeed`, which can"
        " offload only the optimizer state",
        allowed="none, all, activations",
    ),
)

ZERO2 = StrategySpec(
    name="zero2",
    implementation="paceline.strategies.fsdp.strategy:FSDPStrategy",
    options={"reshard_after_forward": False},
    cost_model="paceline.strategies.fsdp.cost:estimate_zero2",
    main_dim="shard",
    extra_dims=("data", "context"),
    has_low_weights=True,
    preload=("torch.distributed.fsdp",),
    capabilities=Capabilities(
        LIMITS,
        generates=True,
        equal_shares_reason=(
            "it reduces gradients in every micro-batch, so all ranks must run the same number"
            " of micro-batches"
        ),
    ),
    check_sizes="paceline.strategies.fsdp.check:check_offload",
)
ZERO3 = StrategySpec(
    name="zero3",
    implementation="paceline.strategies.fsdp.strategy:FSDPStrategy",
    cost_model="paceline.strategies.fsdp.cost:estimate_zero3",
    main_dim="shard",
    extra_dims=("data", "context"),
    has_low_weights=True,
    preload=("torch.distributed.fsdp",),
    capabilities=Capabilities(
        LIMITS,
        generates=True,
        equal_shares_reason=(
            "it gathers weights in every micro-batch, so all ranks must run the same number of"
            " micro-batches"
        ),
    ),
    check_sizes="paceline.strategies.fsdp.check:check_offload",
)
