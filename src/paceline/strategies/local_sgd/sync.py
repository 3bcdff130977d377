"""What local training sends: parameters as one long vector, and the mean of such vectors over the
workers, in float32 or in fewer bits."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.strategies.local_sgd.schedule import BLOCK, row_elements
from paceline.strategies.reducers.compression.codecs import CastCodec, Codec


class FlatParams:
    """Contiguous tensors, one after the other in row-major order, as one vector of float32
    (float64, if one of them is)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.detach().view(-1) for tensor in tensors]
        self.starts = [0, *accumulate(tensor.numel() for tensor in self.tensors)]
        self.size = self.starts[-1]
        is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.dtype = torch.float64 if is_double else torch.float32
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")

    def pieces(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield views of the tensors' elements from ``start`` to ``stop``."""
        for tensor, begin in zip(self.tensors, self.starts, strict=False):
            low, high = max(start, begin), min(stop, begin + tensor.numel())
            if low < high:
                yield tensor[low - begin : high - begin]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a copy of a range."""
        values = torch.empty(stop - start, dtype=self.dtype, device=self.device)
        pieces = list(self.pieces(start, stop))
        if pieces:
            torch_compat.foreach_copy_(list(values.split([len(piece) for piece in pieces])), pieces)
        return values

    def write(self, start: int, values: torch.Tensor) -> None:
        """Copy values into the range from ``start``."""
        pieces = list(self.pieces(start, start + values.numel()))
        if pieces:
            torch_compat.foreach_copy_(pieces, list(values.split([len(piece) for piece in pieces])))


class BlockInt8Codec(Codec):
    """int8, where each block of :data:`BLOCK` elements has its own scale, its largest magnitude
    divided by 127, in float32 behind the numbers. Rounds to nearest. Non-finite values stay
    non-finite."""

    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        blocks = rows.float().view(len(rows), -1, BLOCK)
        scales = blocks.abs().amax(dim=2, keepdim=True) / 127
        tiny = torch.finfo(torch.float32).tiny
        numbers = (blocks / scales.clamp(min=tiny)).round_().clamp_(-127, 127).to(torch.int8)
        parts = [part.view(len(rows), -1).view(torch.uint8) for part in (numbers, scales)]
        return torch.cat(parts, dim=1)

    def decode(self, messages: torch.Tensor) -> torch.Tensor:
        count = messages.shape[1] * BLOCK // (BLOCK + 4)
        numbers = messages[:, :count].contiguous().view(torch.int8).float()
        scales = messages[:, count:].contiguous().view(torch.float32)
        blocks = numbers.view(len(messages), -1, BLOCK) * scales[:, :, None]
        return blocks.view(len(messages), -1)


#: `local_sgd.outer_dtype` → the format in which means are sent.
CODECS: dict[str, Codec] = {"bf16": CastCodec(torch.bfloat16), "int8": BlockInt8Codec()}


class GroupMean:
    """The mean of each worker's ``message`` over ``group``. The collective starts when this is
    constructed.

    In float32 it is one all-reduce. In fewer bits it takes two messages: each worker sends the w-th
    part of its message to worker w, which adds up what it received, in float32 and in the order of
    the workers, and sends the mean of its part to all. So each element is rounded exactly twice,
    and as many bytes are sent as in an all-reduce in that type (2(N-1)/N of the message), whatever
    the number of workers.

    Every rank issues the calls in the same order; :meth:`advance` sends the second message.

    Args:
        message: [n]; its values are overwritten.
        dtype: ``float32``, ``bf16`` or ``int8``.
    """

    def __init__(self, message: torch.Tensor, group: Communicator, dtype: str = "float32") -> None:
        self.group = group
        self.size, self.dtype = message.numel(), message.dtype
        has_traffic = group.size > 1 and self.size > 0
        self.codec = CODECS.get(dtype) if has_traffic else None
        self._work: dist.Work | None = None
        self._second_sent = self.codec is None
        self._value: torch.Tensor | None = None
        if self.codec is None:
            self._buffers = [message]
            self._work = group.all_reduce(message) if self.size else None
            return
        rows = message.new_zeros(group.size, row_elements(self.size, group.size))
        rows.view(-1)[: self.size] = message
        sent = self.codec.encode(rows)
        self._buffers = [torch.empty_like(sent), sent]
        self._work = dist.all_to_all_single(
            self._buffers[0], sent, group=group.group, async_op=True
        )

    def advance(self) -> None:
        """Send the second message, if there is one and it is not sent yet."""
        if self._second_sent:
            return
        self._second_sent = True
        assert self.codec is not None
        self.group.wait(self._work)
        rows = self.codec.decode(self._buffers[0])
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        sent = self.codec.encode((total / self.group.size)[None])
        self._buffers = [sent.new_empty(self.group.size, sent.shape[1]), sent]
        self._work = self.group.all_gather(self._buffers[0].view(-1), sent.view(-1))

    def value(self) -> torch.Tensor:
        """Wait for the mean [n], and return it. It is the same on every rank."""
        if self._value is None:
            self.advance()
            self.group.wait(self._work)
            received = self._buffers[0]
            if self.codec is not None:
                self._value = self.codec.decode(received).view(-1)[: self.size].to(self.dtype)
            else:
                self._value = received if self.group.size == 1 else received.div_(self.group.size)
            self._buffers = []
        return self._value

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, or of the value once it is received."""
        tensors = self._buffers if self._value is None else [self._value]
        return sum(tensor.nbytes for tensor in tensors)


class PendingSync:
    """A started synchronization of a fragment: this rank's share of it.

    Args:
        mean: mean of what the workers sent.
        sent: a copy of what this rank sent, if the result is the mean's difference from it.
        result: the result, if it is from a checkpoint.
    """

    def __init__(
        self,
        mean: GroupMean | None,
        sent: torch.Tensor | None = None,
        result: torch.Tensor | None = None,
    ) -> None:
        self.mean = mean
        self.sent = sent
        self.result = result

    def advance(self) -> None:
        if self.mean is not None:
            self.mean.advance()

    def wait(self) -> torch.Tensor:
        """Wait for the result, and return it. It does not depend on when this is called."""
        if self.result is None:
            assert self.mean is not None
            mean = self.mean.value()
            self.result = mean if self.sent is None else mean - self.sent
            self.mean = self.sent = None
        return self.result

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for tensor in (self.sent, self.result) if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors) + (self.mean.num_bytes if self.mean else 0)
