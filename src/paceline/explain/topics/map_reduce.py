"""`paceline explain map-reduce`: a word count over ranks, with the pairs and groups of each
phase."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.core.files import Scratch, human_bytes
from paceline.core.formatting import counted
from paceline.data.count.job import CountSpec, count_shards, reduce
from paceline.data.count.runs import decode, read_rows
from paceline.data.count.shards import ScanStats, plan_shards, read_texts
from paceline.explain.rank_topic import RankFrame, RankTopic
from paceline.explain.record import Cell, Check, DrawnMessage, DrawnRow, Frame
from paceline.messages.pages import PageText

_TEXT = (
    "the ring sends the chunk to the next rank and the next rank adds the chunk to the sum"
    " then the ring sends the sum to all"
)
_ABOUT = (
    "MapReduce (Dean & Ghemawat, 2004) as in paceline data count: each rank counts the words of"
    " its part of the text (map, with a combiner that adds up equal words), sends each pair to the"
    " rank that its word belongs to by a checksum (shuffle), and adds up the counts of its words"
    " (reduce). Each word ends on exactly one rank, so no rank needs the full table. The sizes are"
    " the sizes of the sorted runs that the ranks exchange."
)


class WordCountTopic(RankTopic):
    """Count the words of a small text on real ranks.

    The figures: ``ranks, words`` (of each rank), ``pairs`` (of each rank for each destination),
    ``counts`` (of each rank) and ``shuffled_bytes``.

    Attributes:
        tokens: words of this rank's part of the text.
        pairs: (word, count) after the map: of each rank for each destination.
        sent_bytes: bytes of this rank's pairs for each destination.
        received_bytes: bytes from other ranks, as the reduce recorded them.
        counts: (word, count) of the words that this rank reduced.
    """

    about = _ABOUT

    def run(self) -> None:
        with Scratch("paceline-explain-") as folder:
            self._count(folder)
            self.world.barrier()  # the other ranks read this rank's pairs
        self.title = PageText("MapReduce: words of a text on {ranks:rank}", ranks=self.world.size)

    def _count(self, folder: Path) -> None:
        world, text, table = self.world, folder / "text.txt", folder / "table"
        text.write_text(_TEXT, encoding="utf-8")
        spec = CountSpec(((text, text.stat().st_size),))
        shards = plan_shards(list(spec.files), world.size)[world.rank]
        self.tokens = [
            token
            for shard in shards
            for part in read_texts(shard, spec.reading, ScanStats())
            for token in part.split()
        ]
        run, _ = count_shards(shards, spec, folder / "run", world.size)
        result = reduce(self.gather(run), world.rank, spec, table)
        rows = read_rows(table, 0, table.stat().st_size, 4096)
        targets = range(world.size)
        self.pairs = self.gather(
            [[(decode(key), count) for key, count in run.part(to, 4096)] for to in targets]
        )
        self.sent_bytes = [run.part_bytes(target) for target in targets]
        self.received_bytes = result.shuffled_bytes
        self.counts = [(decode(key), count) for key, count in rows]
        self.all_counts = self.gather(self.counts)

    def rank_frames(self) -> Iterator[RankFrame]:
        rank = self.world.rank
        yield RankFrame(
            "Split: each rank reads its part of the text, which ends between words.",
            (DrawnRow("text", tuple(Cell(token) for token in self.tokens)),),
            is_key=True,
        )
        pairs = tuple(
            Cell(f"{key} {count}", ranks=(target,))
            for target, pairs in enumerate(self.pairs[rank])
            for key, count in pairs
        )
        yield RankFrame(
            "Map: each rank counts its words. Colors show the rank that a word belongs to.",
            (DrawnRow("pairs", pairs),),
            phase="map",
            is_key=True,
        )
        messages = tuple(
            DrawnMessage(rank, target, counted(len(self.pairs[rank][target]), "pair"), size_bytes)
            for target, size_bytes in enumerate(self.sent_bytes)
            if target != rank and size_bytes
        )
        groups = tuple(
            Cell(f"{key} {'+'.join(map(str, counts))}", ranks=(rank,))
            for key, counts in self._groups().items()
        )
        yield RankFrame(
            "Shuffle: each pair is sent to the rank of its word. Counts of a word form a group.",
            (DrawnRow("groups", groups),),
            messages=messages,
            phase="shuffle",
            is_key=True,
        )
        counts = tuple(Cell(f"{key} {count}", tone="done") for key, count in self.counts)
        yield RankFrame(
            "Reduce: each rank adds up the groups of its words.",
            (DrawnRow("counts", counts),),
            phase="reduce",
            is_key=True,
        )

    def _groups(self) -> dict[str, list[int]]:
        """Return the counts that this rank has for each of its words after the shuffle, sorted by
        word."""
        groups: dict[str, list[int]] = {}
        for source in self.pairs:
            for key, count in source[self.world.rank]:
                groups.setdefault(key, []).append(count)
        return dict(sorted(groups.items()))

    def check_frames(self, frames: Sequence[Frame]) -> list[Check]:
        received = [0] * self.world.size
        for message in frames[2].messages:
            received[message.target] += message.size_bytes
        table = self._table()
        num_counts = sum(map(len, self.all_counts))
        return [
            Check.equal("bytes received by each rank", received, self.gather(self.received_bytes)),
            Check.equal(
                "counts equal the counts of one process", table, dict(Counter(_TEXT.split()))
            ),
            Check.equal("each word is on one rank", len(table), num_counts),
        ]

    def _table(self) -> dict[str, int]:
        return {key: count for counts in self.all_counts for key, count in counts}

    def facts(self) -> dict[str, str]:
        return {
            "Words": str(len(_TEXT.split())),
            "Distinct words": str(len(self._table())),
            "Pairs after map": str(sum(len(part) for pairs in self.pairs for part in pairs)),
            "Shuffled": human_bytes(self._shuffled_bytes()),
        }

    def add_figures(self) -> None:
        self.figures.update(
            words=self.gather(self.tokens),
            pairs=self.pairs,
            counts=self.all_counts,
            shuffled_bytes=self._shuffled_bytes(),
        )

    def _shuffled_bytes(self) -> int:
        return sum(self.gather(self.received_bytes))
