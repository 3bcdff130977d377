"""`paceline explain sampler`: which samples each rank gets from torch's DistributedSampler and from
Paceline's order."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from torch.utils.data import DistributedSampler

from paceline.data.order.samples import SampleOrder
from paceline.explain.rank_topic import RankFrame, RankTopic
from paceline.explain.record import Cell, Check, DrawnRow, Tone
from paceline.messages.pages import PageText

_SEED = 42
_ABOUT = (
    "Every rank needs another part of the data, in an order that changes with the epoch. torch's"
    " DistributedSampler deals the shuffled samples out to the ranks. If their number is not"
    " divisible by the number of ranks, it repeats some or drops some, and without set_epoch() it"
    " repeats the order of epoch 0. Paceline's order has global batches that do not depend on the"
    " number of ranks, and each sample exactly once per epoch. No communication is needed: each"
    " rank computes its part."
)
_UNSHUFFLED = "DistributedSampler(shuffle=False)"
_PADDED = "DistributedSampler, epoch 0"
_DROPPED = "DistributedSampler(drop_last=True)"
_NO_SET_EPOCH = "DistributedSampler, epoch 1 without set_epoch"
_SET_EPOCH = "DistributedSampler, epoch 1 after set_epoch(1)"
_NOTES = {
    _UNSHUFFLED: "Rank r gets samples r, r + N, r + 2N, ….",
    _PADDED: "All ranks shuffle with the same seed; each takes every N-th sample.",
    _DROPPED: "The ranks get equal numbers of samples, and the rest is never seen in this epoch.",
    _NO_SET_EPOCH: "The sampler does not notice the new epoch: the order is that of epoch 0.",
    _SET_EPOCH: "The epoch is part of the seed, so the order changes.",
}


class SamplerTopic(RankTopic):
    """Let each rank compute its samples, from a dataset whose size the number of ranks does not
    divide.

    The figures: ``ranks, num_samples``, ``samples`` (case → samples of each rank), ``repeated`` and
    ``missing`` (case → samples).
    """

    about = _ABOUT

    def run(self) -> None:
        self.num_samples = 3 * self.world.size + 1
        with self.count_traffic():
            samples = {
                _UNSHUFFLED: self._sampler(shuffle=False),
                _PADDED: self._sampler(),
                _DROPPED: self._sampler(drop_last=True),
                _NO_SET_EPOCH: self._sampler(),
                _SET_EPOCH: self._sampler(epoch=1),
                "Paceline, epoch 0": self._order(0),
                "Paceline, epoch 1": self._order(1),
            }
        self.samples = {case: self.gather(own) for case, own in samples.items()}
        self.repeated: dict[str, list[int]] = {}
        self.missing: dict[str, list[int]] = {}
        for case, by_rank in self.samples.items():
            times = Counter(chain.from_iterable(by_rank))
            self.repeated[case] = sorted(sample for sample, number in times.items() if number > 1)
            self.missing[case] = sorted(set(range(self.num_samples)) - times.keys())
        self.title = PageText(
            "Samples of {ranks:rank}, from a dataset of {count}",
            ranks=self.world.size,
            count=self.num_samples,
        )

    def _sampler(self, epoch: int = 0, **settings: bool) -> list[int]:
        sampler: DistributedSampler[int] = DistributedSampler(
            range(self.num_samples),  # type: ignore[arg-type]  # only its length is used
            num_replicas=self.world.size,
            rank=self.world.rank,
            seed=_SEED,
            **settings,
        )
        sampler.set_epoch(epoch)
        return list(sampler)

    def _order(self, epoch: int) -> list[int]:
        size = self.world.size
        order = SampleOrder(self.num_samples, batch_size=size, seed=_SEED)
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        batches = [order.micro_batches(step, size)[self.world.rank] for step in steps]
        return [int(sample) for batch in batches for _, sample in batch]

    def rank_frames(self) -> Iterator[RankFrame]:
        width = max(len(part) for by_rank in self.samples.values() for part in by_rank)
        for case, by_rank in self.samples.items():
            caption = _caption(case, self.repeated[case], self.missing[case])
            cells = _cells(by_rank, self.world.rank, width)
            yield RankFrame(caption, (DrawnRow("samples", cells),))

    def checks(self) -> list[Check]:
        orders = [
            sorted(chain.from_iterable(by_rank))
            for case, by_rank in self.samples.items()
            if case.startswith("Paceline")
        ]
        return [
            Check.equal(
                "Paceline's order has each sample once per epoch",
                [list(range(self.num_samples))] * len(orders),
                orders,
            ),
            Check.equal(
                "without set_epoch, epoch 1 repeats epoch 0",
                self.samples[_PADDED],
                self.samples[_NO_SET_EPOCH],
            ),
        ]

    def facts(self) -> dict[str, str]:
        return {
            "Repeated by DistributedSampler": str(len(self.repeated[_PADDED])),
            "Dropped with drop_last": str(len(self.missing[_DROPPED])),
            "Repeated or dropped by Paceline": "0",
        }

    def add_figures(self) -> None:
        self.figures.update(
            num_samples=self.num_samples,
            samples=self.samples,
            repeated=self.repeated,
            missing=self.missing,
        )


def _caption(case: str, repeated: list[int], missing: list[int]) -> str:
    note = _NOTES.get(case, "The last batch of the epoch is short; nothing is repeated or dropped.")
    repeats = (
        PageText("{count:sample} repeated", count=len(repeated)) if repeated else "none repeated"
    )
    drops = PageText("{count:sample} missing", count=len(missing)) if missing else "none missing"
    return PageText(
        "{case}: {repeats}, {drops}. {note}", case=case, repeats=repeats, drops=drops, note=note
    )


def _cells(by_rank: list[list[int]], rank: int, width: int) -> tuple[Cell, ...]:
    """Return the samples of a rank. A sample that came before is marked, in the order in which the
    ranks read them."""
    seen, cells = set[int](), []
    for place in range(width):
        for other, part in enumerate(by_rank):
            sample = part[place] if place < len(part) else None
            tone: Tone = "idle" if sample is None else "wrong" if sample in seen else ""
            if sample is not None:
                seen.add(sample)
            if other == rank:
                cells.append(Cell("" if sample is None else str(sample), tone=tone))
    return tuple(cells)
