"""Cost of `late_ddp`: the cost of `ddp`. Imports no torch."""

from paceline.strategies.ddp.cost import estimate as estimate
