"""Spec of `late_ddp`. Imports no torch."""

from paceline.parallel.capabilities import Capabilities, Limit
from paceline.parallel.spec import StrategySpec

SPEC = StrategySpec(
    name="late_ddp",
    implementation="paceline.strategies.late_ddp.strategy:LateDDPStrategy",
    cost_model="paceline.strategies.late_ddp.cost:estimate",
    capabilities=Capabilities(
        limits=(
            Limit(
                "train_args.optim",
                "this mode is only tried with other optimizers",
                "set `train_args.optim: adamw`",
                unsupported=("lion",),
            ),
        ),
        chosen_by_auto=False,
    ),
)
