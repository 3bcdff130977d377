"""A custom strategy: `ddp` whose gradients are normalized before each update.

    paceline sft examples/demo.yaml parallel.mode=examples/my_strategy.py:SPEC parallel.num_gpus=2
    paceline verify examples/demo.yaml --modes ddp,examples/my_strategy.py:SPEC --world-size 2

`verify` reports that the losses differ from those of `ddp`, as expected. They are equal for a
strategy that only changes where tensors are computed.
"""

import torch

from paceline.parallel.capabilities import Capabilities, Limit
from paceline.parallel.spec import StrategySpec
from paceline.strategies.ddp.strategy import DDPStrategy


class NormalizedDDPStrategy(DDPStrategy):
    """Scales the gradient to a norm of 1."""

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Return the norm before scaling; ``max_norm`` is not used."""
        norm = self.buckets.norm()
        self.buckets.scale(1 / (norm + 1e-6))
        return norm


# The launcher and `paceline plan` read this. Every rank then imports the implementation; a file is
# imported under its own name.
SPEC = StrategySpec(
    name="normalized",
    implementation="my_strategy:NormalizedDDPStrategy",
    cost_model="paceline.strategies.ddp.cost:estimate",
    capabilities=Capabilities(
        limits=(
            Limit(
                setting="train_args.precision",
                unsupported=("fp16-mixed",),
                reason="the scaled gradients would leave the range of float16",
                fix="set `train_args.precision: bf16-mixed`",
            ),
        ),
        unequal_shares=True,
    ),
)
