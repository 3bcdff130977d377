"""Update bfloat16 weights by AdamW with stochastic rounding in one compiled kernel.

The kernel reads a weight, its gradient and both moments once, and writes the weight and the moments
once: 14 bytes per element. The random bits are the same as in
:func:`~paceline.train.optimizers.rounding.round_stochastically`.
"""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from paceline.core.texts import UserText
from paceline.parallel.state import TensorShard

logger = logging.getLogger(__name__)

#: Odd constants of the hash of positions, as signed 32-bit numbers (Wang's and Murmur's).
MULTIPLIERS = (0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
MOMENTS = ("exp_avg", "exp_avg_sq")


def can_compile(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the update is compiled: fused AdamW on CUDA, with Triton. If it could be, and
    Triton is missing or weights are averaged, a line says so."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_adamw = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))
    if not is_adamw or any(param.device.type != "cuda" for param in params):
        return False
    if type(optimizer) is not torch.optim.AdamW:
        reason = "`train_args.ema_decay` averages the weights"
    elif find_spec("triton") is None:
        reason = "Triton is not installed"
    else:
        return True
    logger.info(
        UserText(
            "bf16-true: {reason}, so the rounding of weights takes many kernels, and each step is"
            " slower",
            code="rounding-not-compiled",
            reason=reason,
        )
    )
    return False


class CompiledAdamW:
    """The compiled update, with what it reads from device memory."""

    def __init__(self) -> None:
        self._update: Callable[..., None] = torch.compile(_update, dynamic=True, fullgraph=True)
        self._constants: dict[tuple[float, ...], torch.Tensor] = {}
        self._layouts: dict[torch.Tensor, torch.Tensor] = {}
        self.works = True
        self._has_reported = False

    def report_others(self, params: list[torch.Tensor]) -> None:
        """Say once that these parameters are updated by many kernels."""
        count = sum(param.grad is not None and param.numel() > 1 for param in params)
        if self.works and count and not self._has_reported:
            self._has_reported = True
            logger.info(
                UserText(
                    "bf16-true: {count:weight} on this rank cannot be updated by the compiled"
                    " kernel (not contiguous, not in bfloat16, or split along two dimensions),"
                    " which makes each step slower",
                    code="weights-not-in-kernel",
                    count=count,
                )
            )

    def takes(self, param: torch.Tensor, shards: list[TensorShard], state: Any) -> bool:
        """Return whether the kernel can update a parameter: a contiguous one in bfloat16 that is
        split along one dimension, with its moments on its device."""
        tensors = [param, param.grad, *(state[key] for key in MOMENTS if key in state)]
        return (
            self.works
            and param.numel() > 1  # the compiler makes other kernels for single elements
            and type(param) in (torch.Tensor, torch.nn.Parameter)
            and all(
                each is not None
                and each.dtype == torch.bfloat16
                and each.device == param.device
                and each.is_contiguous()
                for each in tensors
            )
            and layout_of(shards, param) is not None
        )

    def update(
        self,
        param: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        shards: list[TensorShard],
        purposes: torch.Tensor,
        rate: torch.Tensor,
        skips: torch.Tensor,
    ) -> bool:
        """Update a parameter and its state. Return False if the compiler does not work; then
        nothing has changed, except that a missing state has been created.

        Args:
            purposes: hashes of what the random bits of the weight and of both moments are for,
                int32 [3].
            rate: learning rate, on the device.
            skips: 1 on the device if nothing may change, else 0.
        """
        device = param.device
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {key: torch.zeros_like(param.detach()) for key in MOMENTS}
        if param not in self._layouts:
            layout = layout_of(shards, param)
            self._layouts[param] = torch.tensor(layout, dtype=torch.int32, device=device)
        tensors = [param.detach(), param.grad, *(state[key] for key in MOMENTS)]
        flat = [each.view(-1) for each in tensors]
        step = state["step"] + (1 - skips)
        constants = self._constants_of(group, device)
        try:
            self._update(*flat, step, rate, constants, self._layouts[param], purposes, skips)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler raises errors of many types
            self.works = False
            logger.warning(
                UserText(
                    "bf16-true: the update of the weights cannot be compiled, so it takes many"
                    " kernels, and each step is slower: {reason}",
                    code="rounding-compilation-failed",
                    reason=str(error).partition("\n")[0],
                ),
            )
            return False
        state["step"] = step
        return True

    def _constants_of(self, group: dict[str, Any], device: torch.device) -> torch.Tensor:
        key = (*map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"]))
        if key not in self._constants:
            self._constants[key] = torch.tensor(key, dtype=torch.float32, device=device)
        return self._constants[key]


def layout_of(shards: list[TensorShard], param: torch.Tensor) -> tuple[int, int, int] | None:
    """Return how the elements of a parameter are located in the flattened full tensor: the position
    of the first, the number of consecutive ones, and the distance between the first elements of two
    such rows; None if no such numbers exist."""
    shard = shards[0]
    if len(shards) > 1 or shard.region is not None:
        return None
    if shard.flat:
        return _signed(shard.offset[0]), max(1, param.numel()), 0
    split = [dim for dim in range(param.dim()) if param.shape[dim] != shard.shape[dim]]
    if len(split) > 1:
        return None
    dim = split[0] if split else 0
    width = stride = 1
    for local, full in zip(param.shape[dim:], shard.shape[dim:], strict=True):
        width, stride = width * local, stride * full
    start = shard.offset[dim] * (stride // max(1, shard.shape[dim])) if split else 0
    return _signed(start), max(1, width), _signed(stride)


def _signed(number: int) -> int:
    """Return a number modulo 2^32 as a signed 32-bit number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _update(
    param: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    constants: torch.Tensor,
    layout: torch.Tensor,
    purposes: torch.Tensor,
    skips: torch.Tensor,
) -> None:
    beta1, beta2, eps, decay = constants.unbind()
    start, width, stride = layout.unbind()
    gradient = grad.float()
    new_mean = mean.float() + (gradient - mean.float()) * (1 - beta1)
    new_square = square.float() * beta2 + gradient * gradient * (1 - beta2)
    size = rate / (1 - beta1**step)
    scale = new_square.sqrt() / (1 - beta2**step).sqrt() + eps
    new_param = param.float() * (1 - rate * decay) - size * new_mean / scale
    index = torch.arange(param.numel(), dtype=torch.int32, device=param.device)
    positions = start + index // width * stride + index % width
    for number, (stored, values) in enumerate(
        ((param, new_param), (mean, new_mean), (square, new_square))
    ):
        rounded = _round(values, positions, purposes[number])
        stored.copy_(torch.where(skips > 0, stored, rounded))


def _round(values: torch.Tensor, positions: torch.Tensor, purpose: torch.Tensor) -> torch.Tensor:
    bits = positions * MULTIPLIERS[0] + purpose
    for shift, multiplier in ((15, MULTIPLIERS[1]), (13, MULTIPLIERS[2])):
        bits = (bits ^ (bits >> shift)) * multiplier
    bits = (values.view(torch.int32) + ((bits >> 16) & 0xFFFF)) & -0x10000
    return bits.view(torch.float32).to(torch.bfloat16)
