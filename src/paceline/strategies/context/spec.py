"""Spec of `context`. Imports no torch.

Each rank has the full model and some tokens of each row, and the gradients of all ranks are summed:
this is `ddp` with another division of the batch. How attention reaches the other tokens is in
:mod:`paceline.models.context`.
"""

from paceline.parallel.capabilities import Capabilities
from paceline.parallel.limits.offload import OPTIMIZER_ON_HOST
from paceline.parallel.spec import StrategySpec

CONTEXT = StrategySpec(
    name="context",
    implementation="paceline.strategies.ddp.strategy:DDPStrategy",
    main_dim="context",
    extra_dims=("data",),
    cost_model="paceline.strategies.ddp.cost:estimate",
    capabilities=Capabilities(OPTIMIZER_ON_HOST),
)
