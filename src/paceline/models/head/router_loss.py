"""The auxiliary loss that balances the experts of a mixture, over the whole global batch.

After Fedus et al., "Switch Transformers" (2021), equations (4) to (6), as transformers'
``load_balancing_loss_func`` computes it for one batch: E · Σₑ fₑ · Pₑ with the tokens per expert
fₑ = countₑ / N, the mean probability Pₑ = Σₜ pₜₑ / N, and N = layers × tokens. A product of two
means is not a sum over tokens. The counts of the global batch have no gradient, however: once they
are known, the loss is a sum over tokens, whatever the micro-batches and ranks are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.config.schema import Config
from paceline.core.texts import UserText
from paceline.models.head.router_coefficient import coefficient_of, unsupported

if TYPE_CHECKING:
    import torch

_ROWS, _COUNT = "router_rows", "target_count"


def find_router_loss(model: Any, config: Config) -> RouterLoss | None:
    """Return the auxiliary loss of a run's model; None if it is not trained.

    Args:
        model: the language model, without an adapter's wrapper.

    Raises:
        ConfigError: the config asks for it, and transformers has no such loss for the model.
    """
    coefficient = coefficient_of(config)
    if coefficient <= 0:
        return None
    if "output_router_logits" not in inspect.signature(model.forward).parameters:
        if config.train_args.router_aux_loss_coef:
            model_name = f"the model `{config.model}`, for which transformers has no such loss"
            raise unsupported(coefficient, model_name)
        return None
    return RouterLoss(coefficient, int(model.num_experts), int(model.num_experts_per_tok))


def is_deterministic(model: Any, config: Config) -> bool:
    """Return whether two forward passes of a model in training compute the same router logits."""
    from torch import nn

    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    if any(isinstance(each, dropouts) and each.p > 0 for each in model.modules()):
        return False
    # Other graphs are compiled for passes without gradients.
    return not config.train_args.torch_compile and not any(
        isinstance(value, int | float) and value > 0
        for name, value in model.config.get_text_config().to_dict().items()
        if any(part in name for part in ("drop", "jitter"))
    )


@dataclass(frozen=True)
class RouterLoss:
    """The auxiliary loss of a model.

    Args:
        coefficient: its factor in the loss.
        num_experts: number of experts of a layer.
        top_k: number of experts of a token.
    """

    coefficient: float
    num_experts: int
    top_k: int

    def notice(self) -> str:
        """Return the notice that the loss is trained."""
        return UserText(
            "loss: with {coefficient} times the auxiliary loss that balances the experts, over the"
            " global batch; it takes one more forward pass per micro-batch, except for a step of"
            " one micro-batch without dropout on one rank",
            code="router-loss",
            coefficient=f"{self.coefficient:g}",
        )

    @property
    def total_names(self) -> tuple[str, ...]:
        """Names of the sums over the global batch: tokens of each expert, tokens times layers, and
        the number of targets that the loss is divided by."""
        return (*(f"expert_{number}_tokens" for number in range(self.num_experts)), _ROWS, _COUNT)

    def totals(
        self, router_logits: Sequence[torch.Tensor], mask: torch.Tensor | None, count: float
    ) -> dict[str, torch.Tensor]:
        """Return the terms of a micro-batch in the sums.

        Args:
            router_logits: outputs of the routers, each [tokens, experts].
            mask: 1 for each token and 0 for padding, [rows, tokens]; None without padding.
            count: number of targets.
        """
        import torch

        device = router_logits[0].device
        counts = torch.zeros(self.num_experts, dtype=torch.float32, device=device)
        flat = None if mask is None else mask.reshape(-1).to(device, torch.float32)
        num_rows = torch.zeros((), device=device)
        for logits in router_logits:
            chosen = logits.softmax(-1).topk(self.top_k, dim=-1).indices
            ones = torch.ones(len(logits), device=device) if flat is None else flat
            counts.scatter_add_(0, chosen.reshape(-1), ones.repeat_interleave(self.top_k))
            num_rows += ones.sum()
        # `full` fills the number on the device; `tensor` would wait for it.
        values = [*counts.unbind(), num_rows, torch.full((), count, device=device)]
        return dict(zip(self.total_names, values, strict=True))

    def term(
        self,
        router_logits: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        totals: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the part of a micro-batch in the auxiliary loss, times the number of targets of
        the global batch, by which the trainer divides.

        Args:
            router_logits: outputs of the routers, each [tokens, experts].
            mask: as for :meth:`totals`.
            totals: sums over the global batch.
        """
        import torch

        from paceline.models.experts.counts import record_aux_loss  # imports torch

        counts = torch.stack([totals[name] for name in self.total_names[: self.num_experts]])
        num_rows = totals[_ROWS].clamp(min=1.0)
        flat = None if mask is None else mask.reshape(-1, 1).to(counts.device, torch.float32)
        sums = torch.zeros_like(counts)
        for logits in router_logits:
            shares = logits.softmax(-1).float()
            sums = sums + (shares if flat is None else shares * flat).sum(0)
        scale = self.coefficient * self.num_experts * totals[_COUNT] / num_rows.square()
        product = (sums * counts).sum()
        record_aux_loss(product * (self.num_experts / num_rows.square()))
        return product * scale
