"""Spec of `dp`. Imports no torch."""

from paceline.parallel.capabilities import Capabilities
from paceline.parallel.limits.offload import (
    ON_DEVICE,
    USE_ZERO3,
    no_activation_offload,
    no_state_offload,
)
from paceline.parallel.limits.shared import NO_QUANTIZATION, no_compile, no_float8
from paceline.parallel.spec import StrategySpec

LIMITS = (
    NO_QUANTIZATION,
    no_compile("the copies of a model share its compiled blocks"),
    no_float8("float8 layers are untested in the copies of a model"),
    no_state_offload("optimizer", "all", reason=ON_DEVICE, fix=USE_ZERO3),
    no_activation_offload("the threads of its devices would share the offloaded tensors"),
)

DP = StrategySpec(
    name="dp",
    implementation="paceline.strategies.data_parallel.strategy:ThreadedDPStrategy",
    cost_model="paceline.strategies.data_parallel.cost:estimate",
    capabilities=Capabilities(
        LIMITS,
        equal_shares_reason="its devices run their micro-batches in lockstep",
        chosen_by_auto=False,
    ),
    single_process=True,
    spans_hosts=False,
)
