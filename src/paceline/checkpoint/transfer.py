"""Write and read checkpoints through rank 0, for ranks without access to the run's folder.

Nothing is written on the host of such a rank. Both directions use staging buffers of fixed size
(:mod:`paceline.distributed.side_group`), and the receiver compares the SHA-256 of every transfer.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch

from paceline.checkpoint.format import DTYPES, INDEX_ADAPTER, CheckpointMeta, state_file
from paceline.checkpoint.reader import CheckpointReader
from paceline.checkpoint.writer import (
    ShardRecord,
    StateFile,
    has_failed,
    write_and_report,
    write_shards,
)
from paceline.core.errors import ConfigError, ErrorRecord, PacelineError, RunError
from paceline.core.files import human_bytes
from paceline.core.log import ON_EVERY_RANK
from paceline.core.texts import UserText
from paceline.distributed.side_group import CHUNK_BYTES, SideGroup, TransferError
from paceline.distributed.timing.progress import PROGRESS
from paceline.distributed.traffic import uncounted
from paceline.parallel.state import StateReader

if TYPE_CHECKING:
    from paceline.parallel.state import TensorShard
    from paceline.parallel.strategy import Strategy

logger = logging.getLogger(__name__)

Tick = Callable[[], None]

#: If the transfer of a save takes longer than this, a warning suggests how to shorten it.
_LONG_SAVE_S = 60.0


# -- saving
def send_shards(
    side: SideGroup, rank: int, num_ranks: int, shards: Sequence[TensorShard], tick: Tick
) -> None:
    """Send this rank's shards to rank 0, which writes them as
    :func:`~paceline.checkpoint.writer.write_shards` does. Raises no exceptions: rank 0 reports a
    failure of the transfer as a failure of the save."""
    try:
        try:
            file = StateFile(state_file(rank, num_ranks), shards)
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
            f"rank {rank} could not send its shards of a checkpoint to rank {side.root}: {error}",
            extra=ON_EVERY_RANK,
        )


def receive_shards(
    side: SideGroup, staging_dir: Path, senders: Sequence[int], num_ranks: int, tick: Tick
) -> None:
    """Receive the shards of the ranks ``senders`` and write them to the hidden folder of a save,
    one rank after another. Called on rank 0. Raises no exceptions; a failure is recorded in the
    folder, as it is for a rank that writes there itself."""
    for rank in senders:
        if has_failed(staging_dir):
            _decline(side, staging_dir, rank, num_ranks)
        else:
            write_and_report(
                staging_dir, rank, num_ranks, partial(_receive_state_file, side, rank, tick)
            )


def _decline(side: SideGroup, staging_dir: Path, rank: int, num_ranks: int) -> None:
    """Decline the shards of a rank, because the save has already failed."""
    try:
        if "problem" not in side.receive_frame(rank):
            side.send_frame(rank, {"is_accepted": False})
    except TransferError:
        pass  # the first failure is the one to report
    write_shards(staging_dir, rank, num_ranks, ())


def _receive_state_file(side: SideGroup, rank: int, tick: Tick, path: Path) -> ShardRecord:
    """Receive the state file of a rank, write it to ``path`` and return its record.

    Raises:
        OSError, ValueError: the file could not be written, or did not arrive completely.
    """
    try:
        offer = side.receive_frame(rank)
        if "problem" in offer:
            raise ValueError(offer["problem"])
        size_bytes = int(offer["size_bytes"])
        try:
            if shutil.disk_usage(path.parent).free < size_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            handle = open(path, "wb", buffering=0)  # noqa: SIM115  (closed below)
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
                raise ValueError(f"the shards of rank {rank} arrived with a different SHA-256")
            os.fsync(handle.fileno())
    except TransferError as error:
        raise ValueError(f"the shards of rank {rank} did not arrive: {error}") from error
    tensors = INDEX_ADAPTER.validate_python(ending["tensors"])
    return ShardRecord(path.name, size_bytes, ending["sha256"], tensors)


class _Writer:
    """Writes chunks as they arrive. After a write error, the remaining chunks are received and
    discarded, because the sender does not wait for replies between chunks."""

    def __init__(self, handle: IO[bytes], tick: Tick) -> None:
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
    """The state in a checkpoint, together with its ``meta.json``."""

    meta: CheckpointMeta


@dataclass(frozen=True)
class ReadRequest:
    """A request to rank 0 for a box of a tensor or, with ``is_flat``, a range of its elements.
    ``size_bytes`` is the size of the reply."""

    name: str
    offset: list[int]
    shape: list[int]
    is_flat: bool = False
    size_bytes: int = 0


@contextmanager
def open_checkpoint(path: Path, side: SideGroup | None) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint: directly on ranks with access to its folder, through rank 0 on the others.
    A collective over the members of ``side``; ``path`` is valid on rank 0.

    Raises:
        ConfigError: the checkpoint is damaged, or belongs to another model.
    """
    if side is not None and side.is_remote:
        remote = _RemoteCheckpoint(side)
        try:
            yield remote
        finally:
            remote.close()
        return
    servers = []
    if side is not None and side.is_root:
        servers = [_Server(side, rank, path) for rank in side.remote_ranks]
    with CheckpointReader(path) as reader:
        yield reader
    for server in servers:  # after an error, the other ranks may never finish
        server.join()


class _RemoteCheckpoint:
    """A checkpoint that rank 0 reads on behalf of this rank. Each request is for a box or a flat
    range, which arrives in chunks."""

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
        """Return the dtype and the full shape of each tensor, by name."""
        return {
            name: (getattr(torch, DTYPES[dtype][0]), shape)
            for name, (dtype, shape) in self._tensors.items()
        }

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor, on the CPU."""
        return self._read(ReadRequest(name, [*offset], [*shape])).view(tuple(shape))

    def read_flat(self, name: str, start: int, count: int) -> torch.Tensor:
        """Return ``count`` elements of the flattened tensor, beginning at index ``start``, on the
        CPU."""
        return self._read(ReadRequest(name, [start], [count], is_flat=True))

    def _read(self, request: ReadRequest) -> torch.Tensor:
        # An unknown name is requested as well, so that rank 0 replies with the error.
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
                "{request} of the checkpoint arrived from rank {root} with a different SHA-256",
                code="damaged-transfer",
                request=request.name,
                root=self.side.root,
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
                "the checkpoint cannot be read through rank {root}: {reason}",
                code="checkpoint-unreadable",
                root=self.side.root,
                reason=error,
            ) from error


class _Server(threading.Thread):
    """A thread of rank 0 that reads a checkpoint for one remote rank until that rank closes it."""

    def __init__(self, side: SideGroup, rank: int, path: Path) -> None:
        super().__init__(name=f"checkpoint-for-{rank}", daemon=True)
        self.side, self.rank, self.path = side, rank, path
        self.start()

    def run(self) -> None:
        with suppress(TransferError):  # the rank has ended and reports why
            self._serve()

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
                self._reply(reader, ReadRequest(**frame))

    def _reply(self, reader: CheckpointReader, request: ReadRequest) -> None:
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
            except Exception as error:  # raised by the rank that sent the request
                out.finish({"error": _error_to(error)})

    def join(self, timeout: float | None = None) -> None:
        with PROGRESS.waiting("other ranks to read the checkpoint"):
            super().join(timeout)


def _blocks(reader: CheckpointReader, request: ReadRequest) -> Iterator[memoryview]:
    name, offset, shape = request.name, request.offset, request.shape
    if request.is_flat:
        return reader.flat_blocks(name, offset[0], shape[0], CHUNK_BYTES)
    return reader.box_blocks(name, offset, shape, CHUNK_BYTES)


def _error_to(error: Exception) -> tuple[bool, ErrorRecord]:
    """Return the arguments of :func:`_error_from`."""
    if not isinstance(error, PacelineError):
        text = str(error) or type(error).__name__
        error = RunError("{reason}", code="checkpoint-read-failed", reason=text)
    return isinstance(error, ConfigError), error.record()


def _error_from(is_config: bool, record: ErrorRecord) -> PacelineError:
    return (ConfigError if is_config else RunError).from_record(record)


# -- cost
def transfer_notices(
    strategy: Strategy, side: SideGroup | None, moment_bytes: int
) -> list[tuple[str, str]]:
    """Return notices (level, text) about the bytes sent to rank 0 at each save. A collective.

    Args:
        moment_bytes: size of the optimizer state per parameter element, in bytes.
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
            # the residuals of gradient compression (error feedback)
            size_bytes += shard.tensor.numel() * item
    with uncounted():
        sizes: list[Any] = comm.gather_objects(size_bytes if side.is_remote else None)
        rate = side.measure_bytes_per_s()
    if not comm.is_rank_zero:
        return []
    remote_sizes = [size for size in sizes if size is not None]
    return [transfer_text(remote_sizes, rate)]


def transfer_text(sizes: Sequence[int], bytes_per_s: float | None) -> tuple[str, str]:
    """Return the notice (level, text) about the bytes sent to rank 0 at each save.

    Args:
        sizes: number of bytes sent by each rank without access to the run's folder.
        bytes_per_s: bandwidth at which rank 0 receives from the slowest of their hosts, or None if
            unknown.
    """
    size_bytes = sum(sizes)
    if not size_bytes:
        return "info", UserText(
            "the hosts do not share the run's folder: the host of rank 0 writes the checkpoints,"
            " and its ranks own the entire state",
            code="folder-not-shared",
        )
    wall_s = size_bytes / bytes_per_s if bytes_per_s else 0.0
    is_long = wall_s >= _LONG_SAVE_S
    return "warning" if is_long else "info", UserText(
        "the hosts do not share the run's folder: the host of rank 0 writes the checkpoints; each"
        " save sends about {size} to it{time}{advice}",
        code="slow-saves-over-network" if is_long else "saves-over-network",
        size=human_bytes(size_bytes),
        time=f", which takes about {wall_s:.1f} s at {human_bytes(bytes_per_s)}/s (measured)"
        if bytes_per_s
        else "",
        seconds=f"{wall_s:.1f}" if bytes_per_s else "",
        rate=f"{human_bytes(bytes_per_s)}/s" if bytes_per_s else "",
        advice=_SEND_LESS if is_long else "",
    )


_SEND_LESS = (
    ". To save less often, raise `save_steps`. To send less, shard within a host"
    " (`parallel.shard`: the number of its devices; `parallel.data`: the number of hosts) or"
    " use `mode: ddp`. To send nothing, use an `output_dir` that all hosts share"
)
