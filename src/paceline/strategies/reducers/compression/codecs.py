"""Number formats in which compressed gradients are sent."""

from abc import ABC, abstractmethod

import torch

#: Bytes of the float32 scale in front of a message.
_HEADER_BYTES = 4


class Codec(ABC):
    """A number format: rows of float32 become messages, rows of bytes, and back."""

    @abstractmethod
    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return rows [R, C] (C a multiple of 4) as messages, uint8 [R, bytes].

        Args:
            generator: the source of randomness for formats that round stochastically.
        """

    @abstractmethod
    def decode(self, messages: torch.Tensor) -> torch.Tensor:
        """Return messages, uint8 [R, bytes], as float32 rows [R, C]."""


class CastCodec(Codec):
    """Numbers as a floating-point type with float32's range, so no scale is needed. Rounds to
    nearest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, messages: torch.Tensor) -> torch.Tensor:
        return messages.contiguous().view(self.dtype).float()


class ScaledCodec(Codec):
    """Numbers that are multiplied by a scale after decoding. All rows share the scale, and each
    message starts with it."""

    dtype: torch.dtype

    @abstractmethod
    def quantize(
        self, values: torch.Tensor, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (numbers of the format, in the shape of ``values``; the scale, a float32
        scalar)."""

    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        numbers, scale = self.quantize(rows, generator)
        header = scale.to(torch.float32).reshape(1).view(torch.uint8)
        body = numbers.contiguous().view(torch.uint8)
        return torch.cat([header.expand(len(rows), _HEADER_BYTES), body], 1)

    def decode(self, messages: torch.Tensor) -> torch.Tensor:
        scales = messages[:, :_HEADER_BYTES].contiguous().view(torch.float32)
        numbers = messages[:, _HEADER_BYTES:].contiguous().view(self.dtype)
        return numbers.to(torch.float32).mul_(scales)


class Float16Codec(ScaledCodec):
    """11 bits of mantissa and a small range. The scale is a power of two that brings the largest
    value close to the largest float16, so that small gradients do not become zero and large ones
    not infinite (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2)."""

    dtype = torch.float16

    def quantize(
        self, values: torch.Tensor, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, exponent = torch.frexp(values.abs().amax())
        exponent = exponent.clamp(min=-100)  # keeps the scale finite
        up = torch.ldexp(values.new_ones(()), 15 - exponent)
        return (values * up).to(torch.float16), torch.ldexp(values.new_ones(()), exponent - 15)


class Int8Codec(ScaledCodec):
    """255 steps between minus and plus the largest value. Rounds up or down at random, so that the
    expected value is exact (Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding", 2017, section 3.1). A non-finite value makes the whole message
    non-finite, so that it is not hidden."""

    dtype = torch.int8

    def quantize(
        self, values: torch.Tensor, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = values.abs().amax() / 127
        noise = torch.rand(values.shape, generator=generator, device=values.device)
        numbers = noise.add_(values / torch.where(scale > 0, scale, 1)).floor_().clamp_(-127, 127)
        return numbers.nan_to_num_(0).to(torch.int8), scale


CODECS: dict[str, Codec] = {
    "bf16": CastCodec(torch.bfloat16),
    "fp16": Float16Codec(),
    "int8": Int8Codec(),
}
FLOAT32 = CastCodec(torch.float32)
