"""Dynamic loss scaling for float16 (Micikevicius et al., "Mixed Precision Training", 2018, section
3.2)."""

from collections.abc import Iterable

import torch

from paceline.distributed import torch_compat

#: As in torch.amp.GradScaler: the scale at the start, and the number of steps without overflow
#: after which it is doubled.
INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class LossScaler:
    """Scales the loss so that small gradients do not underflow in float16.

    The scale is a power of two, so that unscaling gradients does not round them. It is halved after
    a step whose gradient was not finite, and doubled after :data:`GROWTH_INTERVAL` steps without
    such a gradient. It stays on the device, so that the host does not have to wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: torch.Tensor | bool) -> None:
        """Adapt the scale after a step. ``finite`` is whether its gradient was finite, the same on
        all ranks that share gradients."""
        # Filling a tensor does not wait for the device, unlike a copy of a Python value.
        ok = (
            finite.to(self.scale.device)
            if isinstance(finite, torch.Tensor)
            else torch.full((), finite, device=self.scale.device)
        )
        steps = torch.where(ok, self.growth_tracker + 1, 0)
        grows = steps >= GROWTH_INTERVAL
        larger = torch.where(grows & (self.scale * 2).isfinite(), self.scale * 2, self.scale)
        self.scale.copy_(torch.where(ok, larger, self.scale / 2))
        self.growth_tracker.copy_(torch.where(grows, 0, steps))

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the state in host memory, for a checkpoint."""
        return {
            "scale": self.scale.double().cpu(),
            "growth_tracker": self.growth_tracker.cpu().clone(),
        }

    def load(self, scale: float, growth_tracker: float) -> None:
        self.scale.fill_(scale)
        self.growth_tracker.fill_(int(growth_tracker))

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, tensors in by_device.items():
            torch_compat.foreach_mul_(tensors, self.scale.reciprocal().to(device))
