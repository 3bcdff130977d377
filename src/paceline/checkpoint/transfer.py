"""Checkpoints of ranks that do not see the run's folder: rank 0 writes what they own, and reads for
them.

Nothing is written on the host of such a rank. Both directions use staging buffers of fixed size
(:mod:`paceline.distributed.side_group`), and the SHA-256 of every transfer is compared at the
receiving end.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.checkpoint.format import DTYPES, INDEX_ADAPTER, CheckpointMeta, state_file
from paceline.checkpoint.reader import CheckpointReader
from paceline.checkpoint.writer import ShardRecord, StateFile, deliver, has_failed, write_part
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import human_bytes
from paceline.core.log import ON_EVERY_RANK
from paceline.distributed.progress import PROGRESS
from paceline.distributed.side_group import CHUNK_BYTES, SideGroup, TransferError
from paceline.distributed.traffic import uncounted
from paceline.parallel.state import StateReader

if TYPE_CHECKING:
    from paceline.parallel.base import Strategy
    from paceline.parallel.state import TensorShard

logger = logging.getLogger(__name__)

Tick = Callable[[], None]

#: A save that takes longer than this between the hosts is worth a warning.
_LONG_SAVE_S = 60.0


# -- saving
def send_part(
    side: SideGroup, rank: int, num_ranks: int, parts: Sequence[TensorShard], tick: Tick
) -> None:
    """Send what this rank owns to rank 0, which writes it as
    :func:`~paceline.checkpoint.writer.write_part` does. Raises nothing: rank 0 reports a failure as
    one of the save."""
    try:
        try:
            file = StateFile(state_file(rank, num_ranks), parts)
        except TypeError as error:
            side.send_frame(side.root, {"problem": str(error)})
            return
        side.send_frame(side.root, {"size_bytes": file.size_bytes})
        if not side.receive_frame(side.root)["is_accepted"]:
            return
        with side.outgoing(side.root, file.size_bytes, tick) as out:
            sha256 = file.write(out)
            tensors = INDEX_ADAPTER.dump_python(file.index, mode="json")
            out.finish({"sha256": sha256, "tensors": tensors})
    except Exception as error:
        logger.warning(
            f"the part of rank {rank} of a checkpoint did not reach rank {side.root}: {error}",
            extra=ON_EVERY_RANK,
        )


def receive_parts(
    side: SideGroup, aside: Path, senders: Sequence[int], num_ranks: int, tick: Tick
) -> None:
    """On rank 0: write what the ranks ``senders`` own, one rank after another, into the hidden
    folder of a save. Raises nothing; what fails is marked in the folder, as by a rank that writes
    there itself."""
    for rank in senders:
        if has_failed(aside):
            _decline(side, aside, rank, num_ranks)
        else:
            deliver(aside, rank, num_ranks, partial(_receive_part, side, rank, tick))


def _decline(side: SideGroup, aside: Path, rank: int, num_ranks: int) -> None:
    """The save has failed already: do not let the rank send what would be thrown away."""
    try:
        if "problem" not in side.receive_frame(rank):
            side.send_frame(rank, {"is_accepted": False})
    except TransferError:
        pass  # the first failure is the one to report
    write_part(aside, rank, num_ranks, ())


def _receive_part(side: SideGroup, rank: int, tick: Tick, path: Path) -> ShardRecord:
    """Returns what rank 0 must know of the file. Raises why it was not written."""
    host = f"rank {rank}"
    try:
        offer = side.receive_frame(rank)
        if "problem" in offer:
            raise ValueError(offer["problem"])
        size_bytes = int(offer["size_bytes"])
        try:
            handle = _open_for(path, size_bytes)
        except OSError:
            side.send_frame(rank, {"is_accepted": False})
            raise
        with handle:
            side.send_frame(rank, {"is_accepted": True})
            writer = _Writer(handle, tick)
            ending = side.receive(rank, size_bytes, writer.consume)
            if writer.error is not None:
                raise writer.error
            if "problem" in ending:
                raise ValueError(ending["problem"])
            if ending["sha256"] != writer.digest.hexdigest():
                raise ValueError(
                    f"the part of {host} arrived with another SHA-256 than it was sent with"
                )
            os.fsync(handle.fileno())
    except TransferError as error:
        raise ValueError(f"the part of {host} did not arrive: {error}") from error
    tensors = INDEX_ADAPTER.validate_python(ending["tensors"])
    return ShardRecord(path.name, size_bytes, ending["sha256"], tensors)


def _open_for(path: Path, size_bytes: int) -> Any:
    if shutil.disk_usage(path.parent).free < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return open(path, "wb", buffering=0)


class _Writer:
    """Writes chunks as they arrive. After an error of the disk the rest is received and dropped:
    the sender does not wait for an answer in between."""

    def __init__(self, handle: Any, tick: Tick) -> None:
        self.handle, self.tick = handle, tick
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def consume(self, chunk: memoryview) -> None:
        self.tick()
        if self.error is not None:
            return
        self.digest.update(chunk)
        try:
            while len(chunk):
                chunk = chunk[self.handle.write(chunk) :]
        except OSError as error:
            self.error = error


# -- reading
class OpenCheckpoint(StateReader, Protocol):
    """The state in a checkpoint together with its ``meta.json``."""

    meta: CheckpointMeta


@dataclass(frozen=True)
class ReadRequest:
    """A box of a tensor, or with ``is_flat`` a range of its elements, that rank 0 shall send.
    ``size_bytes``: of the answer."""

    name: str
    offset: list[int]
    shape: list[int]
    is_flat: bool = False
    size_bytes: int = 0


@contextmanager
def open_checkpoint(path: Path, side: SideGroup | None) -> Iterator[OpenCheckpoint]:
    """A checkpoint, read from its folder by the ranks that see it and through rank 0 by the others.
    A collective of the members of ``side``; ``path`` is rank 0's.

    Raises:
        ConfigError: it is broken, or one of another model.
    """
    if side is not None and side.is_remote:
        remote = _RemoteCheckpoint(side)
        try:
            yield remote
        finally:
            remote.close()
        return
    servers = (
        []
        if side is None or not side.is_root
        else [_Server(side, rank, path) for rank in side.remote_ranks]
    )
    with CheckpointReader(path) as reader:
        yield reader
    for server in servers:  # not after an error: the other ranks may never end
        server.join()


class _RemoteCheckpoint:
    """A checkpoint that rank 0 reads for this rank: each request names a box or a flat range, which
    arrives in chunks."""

    def __init__(self, side: SideGroup) -> None:
        self.side = side
        self._request(None)
        opened = self._call(lambda: side.receive_frame(side.root))
        if "error" in opened:
            raise _error_from(*opened["error"])
        self.meta: CheckpointMeta = opened["meta"]
        self._tensors = {
            name: (str(dtype), tuple(shape)) for name, (dtype, shape) in opened["tensors"].items()
        }

    def close(self) -> None:
        if not self.side.is_broken:
            self._request(None)

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of each whole tensor, by name."""
        return {
            name: (getattr(torch, DTYPES[dtype][0]), shape)
            for name, (dtype, shape) in self._tensors.items()
        }

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, on the CPU."""
        return self._read(ReadRequest(name, [*offset], [*shape])).view(tuple(shape))

    def read_flat(self, name: str, start: int, count: int) -> torch.Tensor:
        """``count`` elements from ``start`` on of the flattened tensor, on the CPU."""
        return self._read(ReadRequest(name, [start], [count], is_flat=True))

    def _read(self, request: ReadRequest) -> torch.Tensor:
        # rank 0 answers a request for a name that it does not have with the error
        dtype, count = "U8", 0
        if request.name in self._tensors:
            dtype, count = self._tensors[request.name][0], math.prod(request.shape)
        values = torch.empty(count, dtype=getattr(torch, DTYPES[dtype][0]))
        memory = values.view(torch.uint8).numpy()
        digest = hashlib.sha256()
        self._request(replace(request, size_bytes=len(memory)))
        ending = self._call(lambda: self.side.receive_into(self.side.root, memory, digest.update))
        if "error" in ending:
            raise _error_from(*ending["error"])
        if ending.get("sha256") != digest.hexdigest():
            raise RunError(
                f"{request.name} of the checkpoint arrived with another SHA-256 than rank"
                f" {self.side.root} read it with"
            )
        return values

    def _request(self, request: ReadRequest | None) -> None:
        frame = None if request is None else asdict(request)
        self._call(lambda: self.side.send_frame(self.side.root, frame))

    def _call(self, transfer: Callable[[], Any]) -> Any:
        try:
            return transfer()
        except TransferError as error:
            raise RunError(
                f"the checkpoint cannot be read through rank {self.side.root}: {error}"
            ) from error


class _Server(threading.Thread):
    """On rank 0: reads a checkpoint for one remote rank until that rank closes it."""

    def __init__(self, side: SideGroup, rank: int, path: Path) -> None:
        super().__init__(name=f"checkpoint-for-{rank}", daemon=True)
        self.side, self.rank, self.path = side, rank, path
        self.start()

    def run(self) -> None:
        try:
            self._serve()
        except TransferError:
            return  # the rank has ended, and what ended it is reported there

    def _serve(self) -> None:
        side, rank = self.side, self.rank
        side.receive_frame(rank)
        try:
            reader = CheckpointReader(self.path)
        except ConfigError as error:
            side.send_frame(rank, {"error": _error_to(error)})
            return
        with reader:
            tensors = {name: (entry.dtype, entry.shape) for name, entry in reader.entries.items()}
            side.send_frame(rank, {"meta": reader.meta, "tensors": tensors})
            while (frame := side.receive_frame(rank, any_time=True)) is not None:
                self._answer(reader, ReadRequest(**frame))

    def _answer(self, reader: CheckpointReader, request: ReadRequest) -> None:
        digest = hashlib.sha256()
        with self.side.outgoing(self.rank, request.size_bytes) as out:
            try:
                for block in _blocks(reader, request):
                    digest.update(block)
                    while len(block):
                        block = block[out.write(block) :]
                out.finish({"sha256": digest.hexdigest()})
            except TransferError:
                raise
            except Exception as error:  # the rank that asked raises it
                out.finish({"error": _error_to(error)})

    def join(self, timeout: float | None = None) -> None:
        with PROGRESS.waiting("other ranks to read the checkpoint"):
            super().join(timeout)


def _blocks(reader: CheckpointReader, request: ReadRequest) -> Iterator[memoryview]:
    name, offset, shape = request.name, request.offset, request.shape
    if request.is_flat:
        return reader.flat_blocks(name, offset[0], shape[0], CHUNK_BYTES)
    return reader.box_blocks(name, offset, shape, CHUNK_BYTES)


def _error_to(error: Exception) -> tuple[bool, str, str | None, str | None]:
    """The arguments of :func:`_error_from`."""
    if isinstance(error, ConfigError):
        return True, error.what, error.allowed, error.fix
    return False, str(error) or type(error).__name__, None, None


def _error_from(
    is_config: bool, what: str, allowed: str | None, fix: str | None
) -> ConfigError | RunError:
    return (ConfigError if is_config else RunError)(what, allowed=allowed, fix=fix)


# -- what it costs
def transfer_notices(
    strategy: Strategy, side: SideGroup | None, moment_bytes: int
) -> list[tuple[str, str]]:
    """Return what is sent to rank 0 at each save, as (level, text). A collective.

    Args:
        moment_bytes: of optimizer state per element of a parameter.
    """
    if side is None:
        return []
    comm, config, size_bytes = strategy.world, strategy.config, 0
    for shard in strategy.tensor_shards():
        item = shard.tensor.element_size()
        if shard.owned or strategy.replicas_diverge:
            size_bytes += shard.tensor.numel() * (
                item + (moment_bytes if shard.key is not None else 0)
            )
        elif config.compression.chain and shard.key is not None:
            # what compression keeps of the gradient until later
            size_bytes += shard.tensor.numel() * item
    with uncounted():
        sizes: list[Any] = comm.gather_objects(size_bytes if side.is_remote else None)
        rate = side.measure_bytes_per_s()
    if not comm.is_rank_zero:
        return []
    remote_sizes = [size for size in sizes if size is not None]
    return [transfer_text(remote_sizes, rate, config.parallel.timeout_s)]


def transfer_text(
    sizes: Sequence[int], bytes_per_s: float | None, timeout_s: float
) -> tuple[str, str]:
    """(level, text) of what travels to rank 0 at each save.

    Args:
        sizes: bytes that each rank sends that does not see the run's folder.
        bytes_per_s: that rank 0 receives from the slowest of their hosts.
        timeout_s: a save that the ranks wait for must end within it.
    """
    size_bytes = sum(sizes)
    text = "the hosts do not share the run's folder: checkpoints are written on the host of rank 0"
    if not size_bytes:
        return "info", f"{text}, whose ranks own everything that goes into them"
    text += f"; at each save about {human_bytes(size_bytes)} travel there"
    if not bytes_per_s:
        return "info", text
    wall_s = size_bytes / bytes_per_s
    text += f", which takes about {wall_s:.1f} s at {human_bytes(bytes_per_s)}/s (measured)"
    if wall_s < _LONG_SAVE_S:
        return "info", text
    text += (
        ". To save less often, raise `save_steps`. To send less, shard within a host"
        " (`parallel.shard`: the number of its devices; `parallel.data`: the number of hosts) or"
        " use `mode: ddp`. To send nothing, use an `output_dir` that all hosts share"
    )
    if 2 * wall_s > timeout_s:
        text += (
            f". The last save must end within `parallel.timeout_s` ({timeout_s:.0f} s): set it to"
            f" {4 * wall_s:.0f}"
        )
    return "warning", text
