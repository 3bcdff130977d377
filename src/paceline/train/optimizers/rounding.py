"""Update bfloat16 weights with stochastic rounding (`precision: bf16-true`).

A bfloat16 number has 8 significant bits, so an update smaller than 1/256 of a weight is lost if the
result is rounded to the nearest number. Here the optimizer computes in float32, and a result is
rounded up or down at random such that its expected value is exact (Gupta et al., "Deep Learning
with Limited Numerical Precision", 2015, section 3; as torchao's ``_AdamW`` with
``bf16_stochastic_round``). The optimizer's state is rounded in the same way: with ``adam_beta2:
0.999``, a second moment that is rounded to the nearest number would never change.

The random bits are a function of seed, step, name and the position in the full tensor. So a resumed
run has the same bits, and so has each strategy, however it shards the tensor.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.parallel.state import TensorShard
from paceline.train.optimizers.compiled_adamw import (
    MOMENTS,
    MULTIPLIERS,
    CompiledAdamW,
    can_compile,
)

#: Number of elements that are in float32 at a time.
_PIECE_ELEMENTS = 1 << 22


@dataclass
class RoundingState:
    """What the random bits depend on: ``seed``, the current ``step`` and the shards of each
    parameter."""

    seed: int
    step: int = 0
    shards: dict[torch.Tensor, list[TensorShard]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Piece:
    """The elements [begin, end) of a flattened parameter, and their copy in float32."""

    param: torch.Tensor
    begin: int
    end: int
    copy: torch.nn.Parameter

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1)[self.begin : self.end]


class StochasticRounding(torch.optim.Optimizer):
    """Added in front of the class of an elementwise optimizer by :func:`add_rounding`."""

    rounding: RoundingState
    #: The update of all elements of a parameter in one kernel; None if it is not compiled.
    compiled: CompiledAdamW | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters, a piece at a time in float32."""
        assert closure is None
        groups = self.param_groups
        fresh = {param for group in groups for param in group["params"] if not self.state[param]}
        try:
            for group in groups:
                for pieces in self._batches(self._update_compiled(group)):
                    self.param_groups = [{**group, "params": [piece.copy for piece in pieces]}]
                    for piece in pieces:
                        if piece.param not in fresh:
                            self._enter(piece)
                    super().step()
                    for piece in pieces:
                        self._leave(piece)
        finally:
            self.param_groups = groups

    def _update_compiled(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """Update the parameters of a group that the compiled kernel can update; return the
        others."""
        params: list[torch.Tensor] = group["params"]
        compiled, shards = self.compiled, self.rounding.shards
        if compiled is None:
            return params
        taken = [
            param
            for param in params
            if param.grad is not None and compiled.takes(param, shards[param], self.state[param])
        ]
        others = [param for param in params if all(param is not each for each in taken)]
        compiled.report_others(others)
        if not taken:
            return others
        keys = ("", *MOMENTS)
        numbers = [[self._hash(param, key) for key in keys] for param in taken]
        purposes = torch.tensor(numbers, dtype=torch.int32)
        device, rate = taken[0].device, group["lr"]
        if device.type != "cpu":  # without waiting for the device
            purposes = purposes.pin_memory().to(device, non_blocking=True)
        if not isinstance(rate, torch.Tensor):
            rate = torch.full((), rate, dtype=torch.float32, device=device)
        # Set by the caller if the device decides whether the step is skipped.
        skips = getattr(self, "found_inf", torch.zeros((), device=device))
        for param, purpose in zip(taken, purposes, strict=True):
            arguments = (self.state[param], group, shards[param], purpose, rate, skips)
            if not compiled.update(param, *arguments):
                others.append(param)
        return others

    def _hash(self, param: torch.Tensor, key: str) -> int:
        """Return the number that the random bits of a tensor of a parameter depend on."""
        state = self.rounding
        name = state.shards[param][0].name
        return _hash_of(f"{state.seed} {state.step} {name} {key}")

    def _batches(self, params: list[torch.Tensor]) -> Iterator[list[_Piece]]:
        """Yield pieces of the parameters that have a gradient, about as many elements at a time."""
        batch: list[_Piece] = []
        count = 0
        for param in params:
            if param.grad is None:
                continue
            for begin in range(0, max(param.numel(), 1), _PIECE_ELEMENTS):
                end = min(begin + _PIECE_ELEMENTS, param.numel())
                values = param.detach().view(-1)[begin:end].float()
                piece = _Piece(param, begin, end, torch.nn.Parameter(values))
                piece.copy.grad = piece.of(param.grad).float()
                batch.append(piece)
                count += end - begin
                if count >= _PIECE_ELEMENTS:
                    yield batch
                    batch, count = [], 0
        if batch:
            yield batch

    def _enter(self, piece: _Piece) -> None:
        """Give the copy its part of the state, in float32."""
        self.state[piece.copy] = {
            key: piece.of(value).float()
            if _is_elementwise(key, value, piece.param)
            # A step count counts once per step, not per piece.
            else (value.clone() if isinstance(value, torch.Tensor) else value)
            for key, value in self.state[piece.param].items()
        }

    def _leave(self, piece: _Piece) -> None:
        """Round the results into the parameter and its state."""
        positions = _positions(self.rounding.shards[piece.param], piece)
        stored = self.state[piece.param]
        is_last = piece.end == piece.param.numel()
        for key, value in self.state.pop(piece.copy, {}).items():
            if _is_elementwise(key, value, piece.copy):
                if key not in stored:
                    stored[key] = torch.empty_like(piece.param)
                self._round(piece, key, value, stored[key], positions)
            elif is_last:
                stored[key] = value
        self._round(piece, "", piece.copy.detach(), piece.param.detach(), positions)

    def _round(
        self,
        piece: _Piece,
        key: str,
        values: torch.Tensor,
        into: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        target = piece.of(into)
        if into.dtype != torch.bfloat16:
            target.copy_(values)
            return
        state = self.rounding
        name = state.shards[piece.param][0].name
        purpose = f"{state.seed} {state.step} {name} {key}"
        target.copy_(round_stochastically(values, positions, purpose))


def add_rounding(
    optimizer: torch.optim.Optimizer, seed: int, shards: Iterable[TensorShard]
) -> None:
    """Make an optimizer, whose update of an element depends on that element only, round its results
    stochastically.

    Args:
        shards: this rank's parts of all tensors.
    """
    cls, is_compiled = type(optimizer), can_compile(optimizer)
    optimizer.__class__ = type(f"Rounded{cls.__name__}", (StochasticRounding, cls), {})
    assert isinstance(optimizer, StochasticRounding)
    optimizer.rounding = RoundingState(seed)
    optimizer.compiled = CompiledAdamW() if is_compiled else None
    for shard in shards:
        if shard.key is not None:
            optimizer.rounding.shards.setdefault(shard.key, []).append(shard)
    for param, stored in optimizer.state.items():  # Adagrad creates its state in advance
        for key, value in stored.items():
            if _is_elementwise(key, value, param):
                stored[key] = value.to(param.dtype)


def round_stochastically(
    values: torch.Tensor, positions: torch.Tensor, purpose: str
) -> torch.Tensor:
    """Return float32 values that are rounded up or down to a bfloat16 number. The probability of
    either is proportional to its closeness.

    Args:
        positions: int32 tensor like ``values``; with ``purpose``, it determines the random bits.
    """
    bits = positions * MULTIPLIERS[0]
    bits += _hash_of(purpose)
    for shift, multiplier in ((15, MULTIPLIERS[1]), (13, MULTIPLIERS[2])):
        bits ^= bits >> shift
        bits *= multiplier
    bits >>= 16
    bits &= 0xFFFF
    # A bfloat16 number is the upper half of a float32 number.
    bits += values.contiguous().view(torch.int32)
    bits &= -0x10000
    return bits.view(torch.float32)


def _hash_of(purpose: str) -> int:
    """Return a signed 32-bit number."""
    number = zlib.crc32(purpose.encode())
    return number - (1 << 32) if number >= 1 << 31 else number


def _is_elementwise(key: str, value: Any, param: torch.Tensor) -> bool:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and value.shape == param.shape and key != "step"


def _positions(shards: list[TensorShard], piece: _Piece) -> torch.Tensor:
    """Return the positions of a piece's elements in the flattened full tensor, modulo 2^32."""
    param, device = piece.param, piece.param.device
    shard = shards[0]
    if shard.flat:
        start = shard.offset[0]
        return torch.arange(start + piece.begin, start + piece.end, device=device).int()
    local = torch.arange(piece.begin, piece.end, device=device)
    positions = torch.zeros(local.shape, dtype=torch.int64, device=device)
    strides = [1]
    for size in reversed(shard.shape[1:]):
        strides.insert(0, strides[0] * size)
    for dim in reversed(range(param.dim())):
        size = max(param.shape[dim], 1)
        index = local % size
        local = local // size
        positions += _full_index(shards, dim, size, device)[index] * strides[dim]
    return positions.int()


def _full_index(
    shards: list[TensorShard], dim: int, size: int, device: torch.device
) -> torch.Tensor:
    """Return the index in the full tensor of each local index along a dimension."""
    result = torch.arange(size, device=device)
    for shard in shards:
        region = slice(None) if shard.region is None else shard.region[dim]
        begin, end, _ = region.indices(size)
        result[begin:end] = torch.arange(end - begin, device=device) + shard.offset[dim]
    return result
