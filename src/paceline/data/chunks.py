"""Chunks of rows to token ids, in this process or in several at once, with the same result.

A chunk is encoded by itself: nothing that is counted or found in one chunk changes how another one is encoded. The results
are taken in the order of the chunks, so the number of worker processes and their speed change neither tokens nor counts.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.interruption import poll
from paceline.core.processes import end_with_parent, hidden_main
from paceline.data.chat import ChatTemplate
from paceline.data.encode import Encoded, Encoder
from paceline.data.formats import Converter, Malformed, Sample, Unsupported
from paceline.data.readers import BLANK, DOCUMENT, RawLine, parse_line
from paceline.data.sources import OpenSource, Place
from paceline.data.tokenizer import LoadedTokenizer, load_tokenizer

TOO_LONG, NO_ANSWER = "longer than max_length", "no answer left after truncation"
_CHUNK_ROWS, _CHUNK_CHARS = 256, 2 << 20
_CHUNKS_AHEAD = 4  # per worker: what may wait for an earlier chunk


@dataclass
class Account:
    """What became of rows, and where the first of each kind of dropped row is."""

    read: int = 0
    kept: int = 0
    truncated: int = 0
    documents_cut: int = 0
    lone_tokens: int = 0
    excluded_turns: int = 0
    shortest_overlong: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, Place] = field(default_factory=dict)

    def add(self, other: Account) -> None:
        """Add the account of later rows."""
        for name in ("read", "kept", "truncated", "documents_cut", "lone_tokens", "excluded_turns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        lengths = [one.shortest_overlong for one in (self, other) if one.shortest_overlong is not None]
        self.shortest_overlong = min(lengths) if lengths else None
        self.dropped.update(other.dropped)
        self.first = {**other.first, **self.first}

    def drop(self, reason: str, place: Place) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)

    def counts(self) -> dict[str, Any]:
        out = {"read": self.read, "kept": self.kept, "truncated": self.truncated, "dropped": dict(self.dropped)}
        return {**out, "excluded_turns": self.excluded_turns}


@dataclass
class Chunk:
    """Consecutive rows of the source number ``source``. ``size_bytes``: of their text, as far as it is known."""

    source: int
    rows: list[tuple[Place, Any]]
    size_bytes: int = 0


@dataclass
class EncodedChunk:
    """The samples of a chunk one after the other, and what was counted.

    Args:
        tokens, mask: int32 and bool values as bytes.
        lengths, label_counts: of each sample, as in :class:`paceline.data.token_dataset.TokenDataset`.
        converted: the counters of the :class:`Converter`, by name.
        facts, refusals: those of the :class:`Encoder`.
    """

    source: int
    num_rows: int
    size_bytes: int
    tokens: bytes
    mask: bytes
    lengths: list[int]
    label_counts: list[int]
    account: Account
    converted: dict[str, Counter[Any]]
    facts: Counter[str]
    refusals: Counter[str]


@dataclass(frozen=True)
class Setup:
    """What a process needs to encode chunks; small enough to be sent to it.

    Args:
        tokenizer: loaded, or None if it cannot be sent; then each process loads it from ``tokenizer_folder``.
        template: source of the chat template, or None.
        for_tools: source of the one for chats with tools, if it is another.
    """

    config: Config
    task: str
    tokenizer_folder: Path
    tokenizer: LoadedTokenizer | None
    template: str | None
    for_tools: str | None
    sources: tuple[Any, ...]  # DatasetSource


def encoder_of(
    config: Config, task: str, tokenizer: LoadedTokenizer, template: str | None, for_tools: str | None = None
) -> Encoder:
    """The encoder of a config's samples; ``template`` is the source of the chat template, ``for_tools`` that of the one for
    chats with tools if it is another."""
    return Encoder(
        tokenizer,
        ChatTemplate(template, tokenizer.special_tokens, for_tools) if template else None,
        pretrain=task == "pretrain",
        train_on_inputs=config.train_args.train_on_inputs,
        last_turn_only=config.train_args.train_on_turns == "last",
        system=config.system,
    )


def converter_of(source: OpenSource, encoder: Encoder, config: Config) -> Converter:
    """What turns the rows of ``source`` into samples for ``encoder``."""
    given = source.given
    return Converter(
        source.label, given.format, given.columns, config.system, encoder.pretrain,
        ignore_columns=given.ignore_columns, roles=given.roles, template=encoder.template,
    )  # fmt: skip


def refusal(error: Unsupported, place: Place) -> ConfigError:
    """The error that ends the preparation of a dataset with a row for another kind of training."""
    return ConfigError(f"{place}: {error.what}", allowed=error.allowed, fix=error.fix)


#: The counters of a Converter that are added up over chunks.
COUNTERS = ("seen", "unused", "misfits", "ignored", "binary_labels")


def chunks_of(number: int, source: OpenSource, seed: int) -> Iterator[Chunk]:
    """Cut the rows of a source into chunks. Lines of JSON stay as they are in the file, to be parsed where they are encoded."""
    chunk = Chunk(number, [])
    chars = 0
    for place, row in source.rows(seed, raw=True):
        chunk.rows.append((place, row))
        if isinstance(row, RawLine):
            chunk.size_bytes += len(row.data)
            chars += len(row.data)
        elif isinstance(row, dict):
            text = row.get(DOCUMENT) or row.get("text")
            chars += len(text) if isinstance(text, str) else 0
        if len(chunk.rows) >= _CHUNK_ROWS or chars >= _CHUNK_CHARS:
            yield chunk
            chunk, chars = Chunk(number, []), 0
    if chunk.rows:
        yield chunk


class ChunkEncoder:
    """Encodes chunks, each with a new converter."""

    def __init__(self, setup: Setup, encoder: Encoder | None = None) -> None:
        config = setup.config
        if encoder is None:
            tokenizer = setup.tokenizer or load_tokenizer(setup.tokenizer_folder, config.trust_remote_code)
            encoder = encoder_of(config, setup.task, tokenizer, setup.template, setup.for_tools)
        self.config, self.encoder = config, encoder
        self.sources = [OpenSource(given) for given in setup.sources]

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        converter = converter_of(self.sources[chunk.source], self.encoder, self.config)
        self.encoder.facts, self.encoder.refusals = Counter(), Counter()
        samples = _Samples(self.config)
        places: list[Place] = []
        converted: list[Sample] = []
        for place, row in chunk.rows:
            if isinstance(row, RawLine):
                row = parse_line(row)
                if row is BLANK:
                    continue
            samples.account.read += 1
            try:
                converted.append(converter(row))
                places.append(place)
            except Malformed as reason:
                samples.account.drop(str(reason), place)
            except Unsupported as error:
                raise refusal(error, place) from None
        for place, encoded in zip(places, self.encoder(converted) if converted else [], strict=True):
            if isinstance(encoded, str):
                samples.account.drop(encoded, place)
            elif encoded.is_document:
                samples.cut(encoded)
            else:
                samples.add(encoded, place)
        return EncodedChunk(
            chunk.source, len(chunk.rows), chunk.size_bytes, b"".join(samples.tokens), b"".join(samples.mask), samples.lengths,
            samples.label_counts, samples.account, {name: getattr(converter, name) for name in COUNTERS},
            self.encoder.facts, self.encoder.refusals,
        )  # fmt: skip


class _Samples:
    """Collects the samples of a chunk, and what became of each row."""

    def __init__(self, config: Config) -> None:
        self.limit, self.drops_overlong = config.train_args.max_length, config.train_args.overlong == "drop"
        self.account = Account()
        self.tokens: list[bytes] = []
        self.mask: list[bytes] = []
        self.lengths: list[int] = []
        self.label_counts: list[int] = []

    def add(self, encoded: Encoded, place: Place) -> None:
        ids, mask, account = encoded.input_ids, encoded.labels_mask, self.account
        if not mask[1:].any():
            account.drop("nothing to learn from", place)
            return
        if len(ids) > self.limit:
            account.shortest_overlong = min(len(ids), account.shortest_overlong or len(ids))
            if self.drops_overlong:
                account.drop(TOO_LONG, place)
                return
            ids, mask = ids[: self.limit], mask[: self.limit]
            if not mask[1:].any():
                account.drop(NO_ANSWER, place)
                return
            account.truncated += 1
        account.kept += 1
        account.excluded_turns += encoded.excluded_turns
        self._append(ids, mask)

    def cut(self, encoded: Encoded) -> None:
        """Cut a document into consecutive samples, the last one shorter; a lone token predicts nothing."""
        self.account.kept += 1
        self.account.documents_cut += len(encoded.input_ids) > self.limit
        for start in range(0, len(encoded.input_ids), self.limit):
            ids = encoded.input_ids[start : start + self.limit]
            if len(ids) < 2:
                self.account.lone_tokens += 1
                continue
            self._append(ids, encoded.labels_mask[start : start + self.limit])

    def _append(self, ids: np.ndarray, mask: np.ndarray) -> None:
        self.tokens.append(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
        self.mask.append(np.ascontiguousarray(mask, dtype=np.bool_).tobytes())
        self.lengths.append(len(ids))
        self.label_counts.append(int(np.count_nonzero(mask[1:])))


# -- processes ------------------------------------------------------------------------------------------------------------
def encode_chunks(chunks: Iterable[Chunk], setup: Setup, encoder: Encoder, workers: int) -> Iterator[EncodedChunk]:
    """Encode chunks with ``workers`` processes (1: in this one), and yield the results in the order of the chunks.

    Raises:
        ConfigError: a row because of which the data cannot be used; of several the first in the order of the rows.
        RunError: a worker process was killed.
    """
    if workers <= 1:
        encode = ChunkEncoder(setup, encoder)
        for chunk in chunks:
            poll()
            yield encode(chunk)
        return
    with hidden_main():
        # Spawned: this process may have threads, whose locks a fork would copy as they are.
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(setup, os.getpid()))
        try:
            yield from _in_order(pool, chunks, workers)
        except BrokenProcessPool as error:
            raise RunError(
                "a process that tokenizes the data was killed, perhaps because memory ran out",
                fix="free memory and give the command again: nothing of the data was stored",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterable[Chunk], workers: int) -> Iterator[EncodedChunk]:
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
        waiting.append(pool.submit(_encode, chunk))
        while len(waiting) >= workers * _CHUNKS_AHEAD or (waiting and waiting[0].done()):
            poll()
            yield waiting.popleft().result()
    while waiting:
        poll()
        yield waiting.popleft().result()
    if unread is not None:
        raise unread


_worker: ChunkEncoder | None = None


def _start_worker(setup: Setup, parent: int) -> None:
    global _worker
    end_with_parent()
    if os.getppid() != parent:  # it ended before that took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    _worker = ChunkEncoder(setup)


def _encode(chunk: Chunk) -> EncodedChunk:
    assert _worker is not None
    return _worker(chunk)
