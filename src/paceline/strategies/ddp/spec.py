"""Specs of `single` and `ddp`. Imports no torch."""

from paceline.parallel.capabilities import Capabilities
from paceline.parallel.limits.offload import OPTIMIZER_ON_HOST
from paceline.parallel.spec import StrategySpec

SINGLE = StrategySpec(
    name="single",
    implementation="paceline.strategies.ddp.strategy:SingleDeviceStrategy",
    single_device=True,
    spans_hosts=False,
    cost_model="paceline.strategies.ddp.cost:estimate",
    capabilities=Capabilities(
        OPTIMIZER_ON_HOST, unequal_shares=True, mixed_devices=True, generates=True
    ),
)
DDP = StrategySpec(
    name="ddp",
    implementation="paceline.strategies.ddp.strategy:DDPStrategy",
    extra_dims=("context",),
    cost_model="paceline.strategies.ddp.cost:estimate",
    capabilities=Capabilities(
        OPTIMIZER_ON_HOST,
        reduces_in_buckets=True,
        unequal_shares=True,
        mixed_devices=True,
        generates=True,
    ),
)
