"""Encode chunks in this process or in several at once, with the same result.

The results are taken in the order of the chunks, so the number of worker processes and their speed
change neither tokens nor counts.
"""

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
from paceline.data.text.chunks import Chunk, ChunkEncoder, EncodedChunk, Setup
from paceline.data.text.encode import Encoder
from paceline.data.worker_pool import worker_pool

_CHUNKS_AHEAD = 4  # per worker: what may wait for an earlier chunk


def encode_chunks(
    chunks: Iterable[Chunk],
    setup: Setup,
    encoder: Encoder,
    pool: ProcessPoolExecutor | None,
    num_workers: int,
    setup_file: Path,
) -> Iterator[EncodedChunk]:
    """Yield the encoded chunks in the order of ``chunks``.

    Args:
        encoder: used where this process encodes them.
        pool: of :func:`start_workers`; None: this process encodes.
        setup_file: where ``setup`` is written for the processes while they encode.

    Raises:
        ConfigError: a row because of which the data cannot be used; of several the first in the
            order of the rows.
        RunError: a worker process was killed.
    """
    if pool is None:
        encode = ChunkEncoder(setup, encoder)
        for chunk in chunks:
            poll()
            yield encode(chunk)
        return
    # Through a file: a pipe would hold less than a tokenizer, so each process would have to be
    # waited for in turn.
    setup_file.write_bytes(pickle.dumps(setup))
    try:
        yield from _in_order(pool, num_workers, chunks, setup_file)
    except BrokenProcessPool as error:
        raise RunError(
            "a process that tokenizes the data was killed, perhaps because memory ran out",
            fix="free memory and give the command again: nothing of the data was stored",
        ) from error
    finally:
        setup_file.unlink(missing_ok=True)


def _in_order(
    pool: ProcessPoolExecutor, num_workers: int, chunks: Iterable[Chunk], setup_file: Path
) -> Iterator[EncodedChunk]:
    waiting: deque[Future[EncodedChunk]] = deque()
    unread: BaseException | None = None
    rest = iter(chunks)
    while True:
        try:
            chunk = next(rest, None)
        except ConfigError as error:  # it is raised after those of earlier rows
            chunk, unread = None, error
        if chunk is None:
            break
        waiting.append(pool.submit(_encode, setup_file, chunk))
        while len(waiting) >= num_workers * _CHUNKS_AHEAD or (waiting and waiting[0].done()):
            poll()
            yield waiting.popleft().result()
    while waiting:
        poll()
        yield waiting.popleft().result()
    if unread is not None:
        raise unread


def start_workers(num_workers: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """Start processes that encode chunks; with one worker, none. They import what they need while
    this process loads the tokenizer, and end with the block."""
    return worker_pool(num_workers, _import_encoders) if num_workers > 1 else nullcontext()


def _import_encoders() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    import jinja2  # noqa: F401
    import tokenizers  # noqa: F401


_encoder: ChunkEncoder | None = None


def _encode(setup_file: Path, chunk: Chunk) -> EncodedChunk:
    global _encoder
    if _encoder is None:
        _encoder = ChunkEncoder(pickle.loads(setup_file.read_bytes()))
    return _encoder(chunk)
