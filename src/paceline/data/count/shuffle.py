"""The shuffle: each rank hands every other its part of the words, all to all, in rounds that fit
into memory."""

from pathlib import Path

import torch
import torch.distributed as dist

from paceline.data.count.runs import Run
from paceline.distributed.communicator import Communicator

_MOST_BYTES = 4 << 20


def shuffle(
    world: Communicator, run: Run, folder: Path, memory_bytes: int
) -> tuple[list[Path], int]:
    """Exchange the parts of every rank's ``run``. A collective.

    Args:
        run: this rank's, with one part for each rank.
        folder: where what comes in is written, one sorted file for each rank that sends.
        memory_bytes: for what is on its way, in and out.

    Returns:
        the files, in order of the sending rank, and the bytes this rank sent to others.
    """
    if world.size == 1:
        return [run.path], 0
    outgoing = [stop - start for start, stop in zip(run.edges[:-1], run.edges[1:], strict=True)]
    incoming_sizes = torch.zeros(world.size, dtype=torch.int64)
    dist.all_to_all_single(incoming_sizes, torch.tensor(outgoing), group=world.group)
    incoming: list[int] = incoming_sizes.tolist()
    piece = max(1024, min(_MOST_BYTES, memory_bytes // (4 * world.size)))
    rounds = torch.tensor([max(-(-size // piece) for size in outgoing)])
    world.wait(world.all_reduce(rounds, op=dist.ReduceOp.MAX))
    paths = [folder / f"from-{rank:03d}" for rank in range(world.size)]
    for path in paths:
        path.touch()
    with open(run.path, "rb") as source:
        for number in range(int(rounds)):
            out_sizes = [_piece(size, number, piece) for size in outgoing]
            in_sizes = [_piece(size, number, piece) for size in incoming]
            out = bytearray(max(1, sum(out_sizes)))  # a tensor over no memory cannot be made
            view, at = memoryview(out), 0
            for start, size in zip(run.edges, out_sizes, strict=False):
                source.seek(start + number * piece)
                if source.readinto(view[at : at + size]) != size:
                    raise OSError(f"{run.path} ends too early")
                at += size
            arrived = torch.empty(sum(in_sizes), dtype=torch.uint8)
            payload = torch.frombuffer(out, dtype=torch.uint8)[: sum(out_sizes)]
            dist.all_to_all_single(arrived, payload, in_sizes, out_sizes, group=world.group)
            _append(paths, arrived, in_sizes)
    return paths, sum(outgoing) - outgoing[world.rank]


def _piece(size: int, number: int, piece: int) -> int:
    return max(0, min(piece, size - number * piece))


def _append(paths: list[Path], arrived: torch.Tensor, sizes: list[int]) -> None:
    raw, at = arrived.numpy().data, 0
    for path, size in zip(paths, sizes, strict=True):
        if size:
            with open(path, "ab") as handle:
                handle.write(raw[at : at + size])
        at += size
