"""`paceline explain sampler`: which samples each rank gets from torch's DistributedSampler and from
Paceline's order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from paceline.core.formatting import counted
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import Cell, Check, DrawnRow, Frame, Recording, Tone
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

PRELOAD = ("torch.utils.data", "paceline.data.order.samples")
_SEED = 42
_ABOUT = (
    "Every rank needs another part of the data, in an order that changes with the epoch. torch's"
    " DistributedSampler deals the shuffled samples out to the ranks. If their number is not"
    " divisible by the number of ranks, it repeats some or drops some, and without set_epoch() it"
    " repeats the order of epoch 0. Paceline's order has global batches that do not depend on the"
    " number of ranks, and each sample exactly once per epoch. No communication is needed: each"
    " rank computes its part."
)


@dataclass(frozen=True)
class RankSamples:
    """The samples that a rank gets, by case; and the bytes it sent."""

    samples: dict[str, list[int]]
    counted_bytes: int


def record(options: ExplainOptions) -> Recording:
    """Let each rank compute its samples, from a dataset whose size the number of ranks does not
    divide.

    The figures: ``ranks, num_samples``, ``samples`` (case → samples of each rank), ``repeated`` and
    ``missing`` (case → samples).
    """
    ranks = options.ranks
    num_samples = 3 * ranks + 1
    results: list[RankSamples] = run_on_ranks(_record_rank, ranks, num_samples)
    samples = {case: [rank.samples[case] for rank in results] for case in results[0].samples}
    repeated, missing = {}, {}
    for case, by_rank in samples.items():
        times = Counter(chain.from_iterable(by_rank))
        repeated[case] = sorted(sample for sample, number in times.items() if number > 1)
        missing[case] = sorted(set(range(num_samples)) - times.keys())
    width = max(len(part) for by_rank in samples.values() for part in by_rank)
    frames = tuple(
        Frame(_caption(case, repeated[case], missing[case]), _rows(samples, case, width))
        for case in samples
    )
    ours = [chain.from_iterable(samples[case]) for case in samples if case.startswith("Paceline")]
    return Recording(
        topic="sampler",
        title=f"Samples of {counted(ranks, 'rank')}, from a dataset of {num_samples}",
        about=_ABOUT,
        actors=tuple(f"rank {rank}" for rank in range(ranks)),
        frames=frames,
        checks=(
            Check.equal("bytes sent by each rank", [0] * ranks, [r.counted_bytes for r in results]),
            Check.equal(
                "Paceline's order has each sample once per epoch",
                [list(range(num_samples))] * len(ours),
                [sorted(order) for order in ours],
            ),
            Check.equal(
                "without set_epoch, epoch 1 repeats epoch 0",
                samples[_PADDED],
                samples[_NO_SET_EPOCH],
            ),
        ),
        facts=(
            ("Repeated by DistributedSampler", str(len(repeated[_PADDED]))),
            ("Dropped with drop_last", str(len(missing[_DROPPED]))),
            ("Repeated or dropped by Paceline", "0"),
        ),
        figures={
            "ranks": ranks,
            "num_samples": num_samples,
            "samples": samples,
            "repeated": repeated,
            "missing": missing,
        },
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


def _caption(case: str, repeated: list[int], missing: list[int]) -> str:
    note = _NOTES.get(case, "The last batch of the epoch is short; nothing is repeated or dropped.")
    repeats = f"{counted(len(repeated), 'sample')} repeated" if repeated else "none repeated"
    drops = f"{counted(len(missing), 'sample')} missing" if missing else "none missing"
    return f"{case}: {repeats}, {drops}. {note}"


def _rows(
    samples: dict[str, list[list[int]]], case: str, width: int
) -> tuple[tuple[DrawnRow, ...], ...]:
    """Return the samples of each rank. A sample that came before is marked, in the order in which
    the ranks read them."""
    by_rank, seen, tones = samples[case], set[int](), dict[tuple[int, int], Tone]()
    for place in range(width):
        for rank, part in enumerate(by_rank):
            if place < len(part):
                tones[rank, place] = "wrong" if part[place] in seen else ""
                seen.add(part[place])
    return tuple(
        (
            DrawnRow(
                "samples",
                tuple(
                    Cell(str(part[place]), tone=tones[rank, place])
                    if place < len(part)
                    else Cell("", tone="idle")
                    for place in range(width)
                ),
            ),
        )
        for rank, part in enumerate(by_rank)
    )


def _record_rank(world: Communicator, num_samples: int) -> RankSamples:
    from torch.utils.data import DistributedSampler

    from paceline.data.order.samples import SampleOrder

    def sampler(epoch: int = 0, **settings: bool) -> list[int]:
        made: DistributedSampler[int] = DistributedSampler(
            range(num_samples),  # type: ignore[arg-type]  # only its length is used
            num_replicas=world.size,
            rank=world.rank,
            seed=_SEED,
            **settings,
        )
        made.set_epoch(epoch)
        return list(made)

    def order(epoch: int) -> list[int]:
        samples = SampleOrder(num_samples, batch_size=world.size, seed=_SEED)
        steps = samples.steps_per_epoch
        batches = [
            samples.micro_batches(step, world.size)[world.rank]
            for step in range(epoch * steps, (epoch + 1) * steps)
        ]
        return [int(sample) for batch in batches for _, sample in batch]

    before = world.traffic.total
    samples = {
        _UNSHUFFLED: sampler(shuffle=False),
        _PADDED: sampler(),
        _DROPPED: sampler(drop_last=True),
        _NO_SET_EPOCH: sampler(),
        _SET_EPOCH: sampler(epoch=1),
        "Paceline, epoch 0": order(0),
        "Paceline, epoch 1": order(1),
    }
    return RankSamples(samples, world.traffic.total - before)
