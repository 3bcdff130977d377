"""Numbers in fewer bits, and the sum over ranks of numbers that travel so."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.config.schema.compression import Compression
from paceline.distributed.communicator import Communicator
from paceline.parallel.compression.base import Compressor, CompressorState
from paceline.parallel.compression.sizes import FORMATS, BucketShape, chunk_size

#: A source of chance for the message of a round.
Chance = Callable[[int], torch.Generator]


class Codec(ABC):
    """A number format. ``width``: bytes a number; ``header``: bytes a message, for its scale."""

    width: int
    header: int

    @abstractmethod
    def encode(
        self, values: torch.Tensor, chance: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 values as (codes of the same shape, scale as a float32 scalar): ``decode`` gives
        them back, rounded."""

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Float32 values. ``scale`` has to broadcast against the codes."""
        return codes.to(torch.float32).mul_(scale)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    def round(self, values: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
        """Values as they arrive."""
        return self.decode(*self.encode(values, chance))


class Float32Codec(Codec):
    """As they are."""

    width, header, dtype = 4, 0, torch.float32

    def encode(
        self, values: torch.Tensor, chance: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return values, values.new_ones(())

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return codes


class BFloat16Codec(Codec):
    """8 bits of mantissa, float32's range: no scale is needed. Rounds to nearest."""

    (width, header), dtype = FORMATS["bf16"], torch.bfloat16

    def encode(
        self, values: torch.Tensor, chance: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return values.to(torch.bfloat16), values.new_ones(())

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32)


class Float16Codec(Codec):
    """11 bits of mantissa and little range: a power of two brings the message's largest value close
    to the largest there is, so that small gradients do not become zero, and large ones not infinite
    (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2)."""

    (width, header), dtype = FORMATS["fp16"], torch.float16

    def encode(
        self, values: torch.Tensor, chance: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, exponent = torch.frexp(values.abs().amax())
        exponent = exponent.clamp(min=-100)  # the scale itself stays finite
        up = torch.ldexp(values.new_ones(()), 15 - exponent)
        return (values * up).to(torch.float16), torch.ldexp(values.new_ones(()), exponent - 15)


class Int8Codec(Codec):
    """255 steps between minus and plus the message's largest value; rounded up or down by chance,
    such that the mean is right (Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding", 2017, section 3.1). A value that is not finite makes the whole
    message not finite: it is not hidden."""

    (width, header), dtype = FORMATS["int8"], torch.int8

    def encode(
        self, values: torch.Tensor, chance: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = values.abs().amax() / 127
        noise = torch.rand(values.shape, generator=chance, device=values.device)
        codes = noise.add_(values / torch.where(scale > 0, scale, 1)).floor_().clamp_(-127, 127)
        return codes.nan_to_num_(0).to(torch.int8), scale


CODES: dict[str, Codec] = {"bf16": BFloat16Codec(), "fp16": Float16Codec(), "int8": Int8Codec()}
PLAIN = Float32Codec()


def pack(code: Codec, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of codes [R, C] (C a multiple of 4) as messages, uint8 [R, header + C × width]."""
    body = codes.contiguous().view(torch.uint8)
    if not code.header:
        return body
    head = scale.to(torch.float32).reshape(1).view(torch.uint8).expand(codes.shape[0], code.header)
    return torch.cat([head, body], 1)


def unpack(code: Codec, messages: torch.Tensor) -> torch.Tensor:
    """The reverse: float32 [R, C]."""
    body = messages[:, code.header :].contiguous().view(code.dtype)
    scale = (
        messages[:, : code.header].contiguous().view(torch.float32)
        if code.header
        else body.new_ones(())
    )
    return code.decode(body, scale)


def coded_sum(
    values: torch.Tensor, code: Codec, line: Communicator, chance: Chance
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the ranks of float32 values [n], every number on the wire in ``code``. A collective.

    An all-to-all brings each rank its range of everybody's values; it adds them up in float32, in
    order of rank, and an all-gather hands the sums out. So a rank sends 2(N-1)/N of the coded
    bytes, as in an all-reduce, and sums never overflow.

    Returns:
        (total, sent): the sum, the same on every rank, and this rank's share of it: its own values
        as they arrived, and in the range that it added up also the rounding of the sum. The shares
        of all ranks add up to the total.
    """
    ranks, numel = line.size, values.numel()
    chunk = chunk_size(numel, ranks)
    padded = values.new_zeros(ranks * chunk)
    padded[:numel] = values
    codes, scale = code.encode(padded, chance(1))
    outbox = pack(code, codes.view(ranks, chunk), scale)
    inbox = torch.empty_like(outbox)
    dist.all_to_all_single(inbox, outbox, group=line.group)
    summed = unpack(code, inbox)
    mine = summed[0].clone()
    for rank in range(1, ranks):
        mine += summed[rank]
    again, scale_again = code.encode(mine, chance(2))
    message = pack(code, again.view(1, chunk), scale_again)
    gathered = message.new_empty((ranks, message.shape[1]))
    line.wait(line.all_gather(gathered.view(-1), message.view(-1)))
    total = unpack(code, gathered).view(-1)
    sent = code.decode(codes, scale).clone()
    own = slice(line.rank * chunk, (line.rank + 1) * chunk)
    sent[own] += total[own] - mine
    return total[:numel].clone(), sent[:numel]


class CastCompressor(Compressor):
    """`bf16`, `fp16`, `int8`: half the bytes, or a quarter. Without residual: int8's rounding is
    right in the mean, and that of the others is far below the gradient's own noise."""

    stateful = False

    def __init__(self, settings: Compression, seed: int) -> None:
        super().__init__(settings, seed)
        self.code = CODES[settings.chain[0]]

    def reduce(
        self,
        flat: torch.Tensor,
        bucket: BucketShape,
        state: CompressorState,
        line: Communicator,
        step: int,
    ) -> None:
        total, _ = coded_sum(
            flat,
            self.code,
            line,
            lambda turn: self.generator(step, bucket, flat.device, line.rank, turn),
        )
        flat.copy_(total)
