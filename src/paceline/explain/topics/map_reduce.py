"""`paceline explain map-reduce`: a word count over ranks, with the pairs and groups of each
phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.files import Scratch, human_bytes
from paceline.core.formatting import counted
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import Cell, Check, DrawnMessage, DrawnRow, Frame, Recording, Tone
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.data.count.job",)
_TEXT = (
    "the ring sends the chunk to the next rank and the next rank adds the chunk to the sum"
    " then the ring sends the sum to all"
)
_ABOUT = (
    "MapReduce (Dean & Ghemawat, 2004) as in paceline data count: each rank counts the words of"
    " its part of the text (map, with a combiner that adds up equal words), sends each pair to the"
    " rank that its word belongs to by a checksum (shuffle), and adds up the counts of its words"
    " (reduce). Each word ends on exactly one rank, so no rank needs the full table. The sizes are"
    " those of the sorted runs that the ranks exchange."
)


@dataclass(frozen=True)
class RankCount:
    """The recording of one rank.

    Args:
        tokens: words of its part of the text.
        pairs: (word, count) after the map, for each destination.
        sent_bytes: bytes of the pairs for each destination.
        received_bytes: bytes from other ranks, as the reduce recorded them.
        counts: (word, count) of the words that it reduced.
    """

    tokens: list[str]
    pairs: list[list[tuple[str, int]]]
    sent_bytes: list[int]
    received_bytes: int
    counts: list[tuple[str, int]]


def record(options: ExplainOptions) -> Recording:
    """Count the words of a small text on real ranks.

    The figures: ``ranks, words`` (of each rank), ``pairs`` (of each rank for each destination),
    ``counts`` (of each rank) and ``shuffled_bytes``.
    """
    with Scratch("paceline-explain-") as folder:
        (folder / "text.txt").write_text(_TEXT, encoding="utf-8")
        results: list[RankCount] = run_on_ranks(_record_rank, options.ranks, str(folder))
    frames = _frames(results)
    messages = [message for frame in frames for message in frame.messages]
    received = [0] * options.ranks
    for message in messages:
        received[message.target] += message.size_bytes
    table = {key: count for rank in results for key, count in rank.counts}
    num_counts = sum(len(rank.counts) for rank in results)
    total_bytes = sum(message.size_bytes for message in messages)
    return Recording(
        topic="map-reduce",
        title=f"MapReduce: words of a text on {counted(options.ranks, 'rank')}",
        about=_ABOUT,
        actors=tuple(f"rank {rank}" for rank in range(options.ranks)),
        frames=frames,
        checks=(
            Check.equal(
                "bytes received by each rank",
                received,
                [rank.received_bytes for rank in results],
            ),
            Check.equal("counts equal those of one process", table, dict(Counter(_TEXT.split()))),
            Check.equal("each word is on one rank", len(table), num_counts),
        ),
        facts=(
            ("Words", str(len(_TEXT.split()))),
            ("Distinct words", str(len(table))),
            ("Pairs after map", str(sum(len(part) for rank in results for part in rank.pairs))),
            ("Shuffled", human_bytes(total_bytes)),
        ),
        figures={
            "ranks": options.ranks,
            "words": [rank.tokens for rank in results],
            "pairs": [rank.pairs for rank in results],
            "counts": [rank.counts for rank in results],
            "shuffled_bytes": total_bytes,
        },
    )


def _frames(results: list[RankCount]) -> tuple[Frame, ...]:
    ranks = range(len(results))
    sent = [
        DrawnMessage(source, target, f"{counted(len(results[source].pairs[target]), 'pair')}", size)
        for source in ranks
        for target, size in enumerate(results[source].sent_bytes)
        if source != target and size
    ]
    groups = [_groups(results, rank) for rank in ranks]
    return (
        Frame(
            "Split: each rank reads its part of the text, which ends between words.",
            tuple(
                (DrawnRow("text", tuple(Cell(token) for token in rank.tokens)),) for rank in results
            ),
            is_key=True,
        ),
        Frame(
            "Map: each rank counts its words. Colors show the rank that a word belongs to.",
            tuple(
                (
                    DrawnRow(
                        "pairs",
                        tuple(
                            Cell(f"{key} {count}", ranks=(target,))
                            for target, pairs in enumerate(rank.pairs)
                            for key, count in pairs
                        ),
                    ),
                )
                for rank in results
            ),
            phase="map",
            is_key=True,
        ),
        Frame(
            "Shuffle: each pair is sent to the rank of its word. Counts of a word form a group.",
            tuple(
                (
                    DrawnRow(
                        "groups",
                        tuple(
                            Cell(f"{key} {'+'.join(map(str, counts))}", ranks=(rank,))
                            for key, counts in groups[rank].items()
                        ),
                    ),
                )
                for rank in ranks
            ),
            phase="shuffle",
            messages=tuple(sent),
            is_key=True,
        ),
        Frame(
            "Reduce: each rank adds up the groups of its words.",
            tuple((DrawnRow("counts", _cells(rank.counts, "done")),) for rank in results),
            phase="reduce",
            is_key=True,
        ),
    )


def _groups(results: list[RankCount], rank: int) -> dict[str, list[int]]:
    """Return the counts that a rank has for each of its words after the shuffle, sorted by word."""
    groups: dict[str, list[int]] = {}
    for source in results:
        for key, count in source.pairs[rank]:
            groups.setdefault(key, []).append(count)
    return dict(sorted(groups.items()))


def _cells(pairs: list[tuple[str, int]], tone: Tone) -> tuple[Cell, ...]:
    return tuple(Cell(f"{key} {count}", tone=tone) for key, count in pairs)


def _record_rank(world: Communicator, folder: str) -> RankCount:
    from paceline.data.count.job import CountSpec, count_shards, reduce
    from paceline.data.count.runs import decode, read_rows
    from paceline.data.count.shards import ScanStats, plan_shards, read_texts

    text = Path(folder) / "text.txt"
    spec = CountSpec(((text, text.stat().st_size),))
    shards = plan_shards(list(spec.files), world.size)[world.rank]
    tokens = [
        token
        for shard in shards
        for part in read_texts(shard, spec.reading, ScanStats())
        for token in part.split()
    ]
    run, _ = count_shards(shards, spec, Path(folder) / f"rank-{world.rank}", world.size)
    runs = world.gather_objects(run)
    table = Path(folder) / f"table-{world.rank}"
    result = reduce(runs, world.rank, spec, table)
    rows = read_rows(table, 0, table.stat().st_size, 4096)
    return RankCount(
        tokens,
        [[(decode(key), count) for key, count in run.part(to, 4096)] for to in range(world.size)],
        [run.part_bytes(target) for target in range(world.size)],
        result.shuffled_bytes,
        [(decode(key), count) for key, count in rows],
    )
