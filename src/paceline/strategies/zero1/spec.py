"""Spec of `zero1`. Imports no torch."""

from paceline.parallel.capabilities import Capabilities
from paceline.parallel.limits.offload import OPTIMIZER_ON_HOST
from paceline.parallel.limits.shared import SHARDED_MATRICES, SPLIT_MATRICES
from paceline.parallel.spec import StrategySpec

LIMITS = (SHARDED_MATRICES, SPLIT_MATRICES, *OPTIMIZER_ON_HOST)

ZERO1 = StrategySpec(
    name="zero1",
    implementation="paceline.strategies.zero1.strategy:Zero1Strategy",
    cost_model="paceline.strategies.zero1.cost:estimate",
    has_low_weights=True,
    capabilities=Capabilities(LIMITS, unequal_shares=True, generates=True),
)
