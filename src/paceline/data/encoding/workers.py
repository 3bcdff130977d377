"""Encode chunks in this process or in several worker processes, and return them in order."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from paceline.core.errors import ConfigError, RunError
from paceline.core.stop import poll
from paceline.data.encoding.chunks import Chunk, ChunkEncoder, EncodedChunk
from paceline.data.kinds.base import KindSetup
from paceline.data.worker_pool import worker_pool

_CHUNKS_AHEAD = 4  # number of chunks per worker that may wait for an earlier chunk


def encode_chunks(
    chunks: Iterable[Chunk],
    setup: KindSetup,
    encode: ChunkEncoder,
    pool: ProcessPoolExecutor | None,
    num_workers: int,
    setup_file: Path,
) -> Iterator[EncodedChunk]:
    """Yield the encoded chunks in the order of ``chunks``.

    Args:
        encode: used if this process encodes them.
        pool: the result of :func:`start_workers`; None to encode in this process.
        setup_file: the path at which ``setup`` is stored for the worker processes.

    Raises:
        ConfigError: a row makes the data unusable. If there are several such rows, the error is
            about the first one.
        RunError: a worker process was killed.
    """
    if pool is None:
        for chunk in chunks:
            poll()
            yield encode(chunk)
        return
    # A pipe cannot buffer a tokenizer, so sending it would wait for each process in turn.
    setup_file.write_bytes(pickle.dumps(setup))
    try:
        yield from _in_order(pool, num_workers, chunks, setup_file)
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process that tokenizes the data was killed, possibly by the out-of-memory"
            " killer",
            code="tokenizer-process-killed",
            fix="free memory and run the command again; no tokens were stored",
        ) from error
    finally:
        setup_file.unlink(missing_ok=True)


def _in_order(
    pool: ProcessPoolExecutor, num_workers: int, chunks: Iterable[Chunk], setup_file: Path
) -> Iterator[EncodedChunk]:
    pending: deque[Future[EncodedChunk]] = deque()
    read_errors = []

    def readable_chunks() -> Iterator[Chunk]:
        try:
            yield from chunks
        except ConfigError as error:  # raised after the errors of earlier rows
            read_errors.append(error)

    for chunk in readable_chunks():
        pending.append(pool.submit(_encode, setup_file, chunk))
        while len(pending) >= num_workers * _CHUNKS_AHEAD or (pending and pending[0].done()):
            poll()
            yield pending.popleft().result()
    while pending:
        poll()
        yield pending.popleft().result()
    if read_errors:
        raise read_errors[0]


def start_workers(num_workers: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """Start the processes that encode chunks, unless there is only one worker. They import their
    modules while this process loads the tokenizer, and end with the block."""
    return worker_pool(num_workers, _import_encoders) if num_workers > 1 else nullcontext()


def _import_encoders() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    import jinja2  # noqa: F401
    import tokenizers  # noqa: F401


_encoder: ChunkEncoder | None = None


def _encode(setup_file: Path, chunk: Chunk) -> EncodedChunk:
    global _encoder
    if _encoder is None:
        _encoder = ChunkEncoder.from_setup(pickle.loads(setup_file.read_bytes()))
    return _encoder(chunk)
