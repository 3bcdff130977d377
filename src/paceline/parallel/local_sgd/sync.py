"""What local training sends: parameters as one long vector, and the mean of such vectors over the
workers, in float32 or less."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.parallel.local_sgd.schedule import BLOCK, row_elements

_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}


class FlatParams:
    """Contiguous tensors, one after the other in row-major order, as one vector of float32
    (float64, where one of them is)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [one.detach().view(-1) for one in tensors]
        self.starts = [0, *accumulate(one.numel() for one in self.tensors)]
        self.size = self.starts[-1]
        self.dtype = (
            torch.float64 if any(one.dtype == torch.float64 for one in tensors) else torch.float32
        )
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")

    def pieces(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The tensors' own elements from ``start`` to ``stop``, live."""
        for one, begin in zip(self.tensors, self.starts, strict=False):
            low, high = max(start, begin), min(stop, begin + one.numel())
            if low < high:
                yield one[low - begin : high - begin]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A copy of a range."""
        found = torch.empty(stop - start, dtype=self.dtype, device=self.device)
        pieces = list(self.pieces(start, stop))
        if pieces:
            torch_compat.foreach_copy_(list(found.split([one.numel() for one in pieces])), pieces)
        return found

    def write(self, start: int, values: torch.Tensor) -> None:
        pieces = list(self.pieces(start, start + values.numel()))
        if pieces:
            torch_compat.foreach_copy_(pieces, list(values.split([one.numel() for one in pieces])))


class GroupMean:
    """The mean of each worker's ``message`` over ``world``, under way from the moment this is made.

    In float32 one all-reduce. In less, two messages: each worker sends the w-th part of its message
    to worker w; that one adds up what it got, in float32 and in the order of the workers, and sends
    the mean of its part to all. So each element is rounded twice, never more, and the bytes are
    those of an all-reduce in that type (2(N-1)/N of them), whatever the number of workers.

    Every rank makes the calls in the same order; :meth:`advance` sends the second message.

    Args:
        message: [n], given away.
        dtype: ``float32``, ``bf16`` or ``int8``.
    """

    def __init__(self, message: torch.Tensor, world: Communicator, dtype: str = "float32") -> None:
        self.world = world
        self.size, self.dtype = message.numel(), message.dtype
        self.code = (
            None if dtype == "float32" or world.size == 1 or not self.size else SyncCodec(dtype)
        )
        self._work: dist.Work | None = None
        self._halfway = self.code is None
        self._value: torch.Tensor | None = None
        if self.code is None:
            self._holds = [message]
            self._work = world.all_reduce(message) if self.size else None
            return
        rows = message.new_zeros(world.size, row_elements(self.size, world.size))
        rows.view(-1)[: self.size] = message
        sent = self.code.encode(rows)
        self._holds = [torch.empty_like(sent), sent]
        self._work = dist.all_to_all_single(self._holds[0], sent, group=world.group, async_op=True)

    def advance(self) -> None:
        """Send the second message, where there are two and it is not sent."""
        if self._halfway:
            return
        self._halfway = True
        assert self.code is not None
        self.world.wait(self._work)
        rows = self.code.decode(self._holds[0])
        mean = rows[0].clone()
        for row in rows[1:]:
            mean += row
        sent = self.code.encode((mean / self.world.size)[None])
        self._holds = [sent.new_empty(self.world.size, sent.shape[1]), sent]
        self._work = self.world.all_gather(self._holds[0].view(-1), sent.view(-1))

    def value(self) -> torch.Tensor:
        """The mean [n], the same on every rank, when it has come."""
        if self._value is None:
            self.advance()
            self.world.wait(self._work)
            if self.code is None:
                self._value = (
                    self._holds[0] if self.world.size == 1 else self._holds[0].div_(self.world.size)
                )
            else:
                self._value = self.code.decode(self._holds[0]).view(-1)[: self.size].to(self.dtype)
            self._holds = []
        return self._value

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages under way, or of what has come."""
        held = self._holds if self._value is None else [self._value]
        return sum(one.numel() * one.element_size() for one in held)


class PendingSync:
    """A synchronisation of a fragment that has begun: this rank's share of it.

    Args:
        mean: of what the workers sent.
        own: what this rank sent, where the mean's difference from it is wanted.
    """

    def __init__(
        self,
        mean: GroupMean | None,
        own: torch.Tensor | None = None,
        landed: torch.Tensor | None = None,
    ) -> None:
        self.mean = mean
        self.own = own
        self.landed = landed

    def advance(self) -> None:
        if self.mean is not None:
            self.mean.advance()

    def land(self) -> torch.Tensor:
        """What the synchronisation gave, when it has come. Its value does not depend on when this
        is asked."""
        if self.landed is None:
            assert self.mean is not None
            value = self.mean.value()
            self.landed = value if self.own is None else value - self.own
            self.mean = self.own = None
        return self.landed

    @property
    def held_bytes(self) -> int:
        tensors = [one for one in (self.own, self.landed) if one is not None]
        return sum(one.numel() * one.element_size() for one in tensors) + (
            self.mean.held_bytes if self.mean else 0
        )


class SyncCodec:
    """Rows of numbers as bytes: ``bf16``; or ``int8``, where each block of :data:`BLOCK` elements
    has a scale of its own, its largest magnitude divided by 127, in float32 behind the numbers;
    rounded to the nearest. What is not finite stays so."""

    def __init__(self, dtype: str) -> None:
        self.dtype = _DTYPES[dtype]

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """[r, n] → uint8 [r, bytes]."""
        if self.dtype != torch.int8:
            return rows.to(self.dtype).view(torch.uint8)
        blocks = rows.float().view(len(rows), -1, BLOCK)
        scales = blocks.abs().amax(dim=2, keepdim=True) / 127
        numbers = (
            (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny))
            .round_()
            .clamp_(-127, 127)
            .to(torch.int8)
        )
        parts = [
            numbers.view(len(rows), -1).view(torch.uint8),
            scales.view(len(rows), -1).view(torch.uint8),
        ]
        return torch.cat(parts, dim=1)

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        """uint8 [r, bytes] → float32 [r, n]."""
        if self.dtype != torch.int8:
            return raw.view(self.dtype).float()
        count = raw.shape[1] * BLOCK // (BLOCK + 4)
        numbers = raw[:, :count].contiguous().view(torch.int8).float().view(len(raw), -1, BLOCK)
        scales = raw[:, count:].contiguous().view(torch.float32)
        return (numbers * scales[:, :, None]).view(len(raw), -1)
