"""Search the layouts and open settings of a run for the best that fits. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.config.chosen import ACCUMULATION
from paceline.core.errors import ConfigError
from paceline.parallel.registry import STRATEGIES, ParallelLayout
from paceline.planner.estimate import ModeEstimate
from paceline.planner.search.buckets import bucket_size
from paceline.planner.search.space import Saving, SettingSpace, open_space
from paceline.planner.search.trials import Settings, Trials, settings_text, with_settings

Objective = Literal["time", "memory", "cost"]

#: Set-ups with at least this share of the best one's speed (memory, cost) count as equally good,
#: because estimates are not more accurate.
EQUAL = 0.98
#: Number of set-ups that are reported: the choice and the two runners-up.
_REPORTED = 3
#: Number of layouts for which a search for the least memory, or for a front, tries all settings.
_FULLY_TRIED = 24
#: Modes by their complexity.
_ORDER = tuple(STRATEGIES)


@dataclass(frozen=True)
class Candidate:
    """A mode with changed settings of the config (without those that select the mode).

    Args:
        buckets: the setting of the size of gradient buckets, if another is faster.
    """

    mode: ModeEstimate
    settings: Settings
    buckets: Settings = field(default_factory=dict)

    @property
    def name(self) -> str:
        text = settings_text(self.settings)
        return f"{self.mode.name} {text}" if text else self.mode.name

    @property
    def all_settings(self) -> Settings:
        """The settings, including those that select the mode."""
        mode = {f"parallel.{key}": value for key, value in self.mode.settings.items()}
        return {**mode, **self.settings, **self.buckets}

    @property
    def seconds_per_sample(self) -> float:
        return 1 / self.mode.per_second

    def value(self, objective: Objective) -> float:
        """Return what the objective minimizes."""
        if objective == "memory":
            return float(self.mode.total)
        count = self.mode.layout.world_size if objective == "cost" else 1
        return self.seconds_per_sample * count

    @property
    def complexity(self) -> tuple[int, ...]:
        """Changed settings, the mode, its cuts, and micro-batches."""
        name, axes = self.mode.layout.strategy, self.mode.layout.axes
        order = _ORDER.index(name) if name in _ORDER else len(_ORDER)
        batches = [key for key in self.settings if "batch" in key or "accumulation" in key]
        changes = len(self.settings) - len(batches)
        count = int(self.settings.get(ACCUMULATION, 1))
        return changes, order, axes.tensor * axes.pipeline, len(batches), count


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        fitting: the best candidates that fit, the best first.
        count: number of layouts that were compared.
        smallest: the candidate with the least memory, whether or not it fits; None if no layout is
            possible.
    """

    fitting: list[Candidate]
    count: int = 0
    smallest: Candidate | None = None

    def chosen(self, objective: Objective) -> Candidate | None:
        """Return the simplest of those that are as good as the best."""
        if not self.fitting:
            return None
        limit = min(each.value(objective) for each in self.fitting) / EQUAL
        equal = [each for each in self.fitting if each.value(objective) <= limit]
        if objective == "memory":
            return min(equal, key=lambda each: (each.seconds_per_sample, each.complexity))
        return min(equal, key=lambda each: each.complexity)


def search(
    trials: Trials,
    layouts: Iterable[ParallelLayout],
    objective: Objective,
    *,
    offloads_all: bool = True,
) -> SearchResult:
    """Return the best candidate of each layout that fits.

    Of the slow layouts, not all settings are tried: a layout that is slower than the third best
    even if nothing saves memory is not in the result.

    Args:
        offloads_all: whether the weights may be in host memory if nothing fits otherwise.
    """
    layouts = list(layouts)
    searched = _search(trials, open_space(trials), layouts, objective)
    space = open_space(trials, offloads_all=True)
    if searched.fitting or not offloads_all or "all" not in space.offloads:
        return searched
    return _search(trials, space, layouts, objective)


def _search(
    trials: Trials, space: SettingSpace, layouts: Iterable[ParallelLayout], objective: Objective
) -> SearchResult:
    bases = [_Layout(trials, space, layout) for layout in layouts]
    possible = [base for base in bases if base.fastest is not None]
    if objective == "memory":
        possible = sorted(possible, key=lambda each: each.least_memory)[:_FULLY_TRIED]
        tried: list[Candidate] = [each for base in possible for each in base.smallest()]
        tried = [each for each in tried if each.mode.fits] or tried
    else:
        tried = _fastest(possible, objective)
    fitting = sorted(
        (each for each in tried if each.mode.fits), key=lambda each: each.value(objective)
    )
    smallest = min(tried, key=lambda each: each.mode.total, default=None)
    if not fitting and possible:
        base = min(possible, key=lambda each: each.least_memory)
        smallest = min(base.smallest(), key=lambda each: each.mode.total)
    return SearchResult(fitting, len(possible), smallest)


def _fastest(possible: list[_Layout], objective: Objective) -> list[Candidate]:
    """Return the fastest candidates of the layouts, in the order of their optimistic speeds, until
    no further layout can be among the best."""
    result: list[Candidate] = []
    best: list[float] = []  # negated values of the best that fit
    for base in sorted(possible, key=lambda each: each.bound(objective)):
        limit = -best[0] / EQUAL if len(best) == _REPORTED else float("inf")
        if base.bound(objective) > limit:
            break
        candidates = base.fast(objective, limit)
        result += candidates
        fitting = [each.value(objective) for each in candidates if each.mode.fits]
        if fitting:
            heapq.heappush(best, -min(fitting))
            if len(best) > _REPORTED:
                heapq.heappop(best)
    return result


def pareto_front(trials: Trials, layouts: Iterable[ParallelLayout]) -> list[Candidate]:
    """Return the candidates that no other beats in both time per sample and memory, the fastest
    first, whether or not they fit. All settings are tried with the layouts that are among the
    fastest, or among the smallest."""
    space = open_space(trials)
    bases = [_Layout(trials, space, layout) for layout in layouts]
    possible = [base for base in bases if base.fastest is not None]
    by_time = sorted(possible, key=lambda each: each.bound("time"))[:_FULLY_TRIED]
    by_memory = sorted(possible, key=lambda each: each.least_memory)[:_FULLY_TRIED]
    tried = [each for base in dict.fromkeys(by_time + by_memory) for each in base.all()]
    front: list[Candidate] = []
    for each in sorted(tried, key=lambda each: (each.seconds_per_sample, each.mode.total)):
        if not front or each.mode.total < front[-1].mode.total:
            front.append(each)
    return front


class _Layout:
    """A layout and the settings to try with it."""

    def __init__(self, trials: Trials, space: SettingSpace, layout: ParallelLayout) -> None:
        self.trials = trials
        self.layout = layout
        self.savings = space.savings()
        self.batches = space.batches(layout.axes.replicas)
        self._tried: dict[tuple[int, int], Candidate | None] = {}
        self._ends = sorted({0, len(self.batches) - 1})
        first = [
            self._candidate(0, number)
            for number in (self._ends if layout.axes.pipeline > 1 else [0])
        ]
        possible = [each for each in first if each is not None]
        # A pipeline is idle less with many small micro-batches.
        self.fastest = min(possible, key=lambda each: each.seconds_per_sample, default=None)

    def bound(self, objective: Objective) -> float:
        """Return the value without anything that saves memory."""
        assert self.fastest is not None
        return self.fastest.value(objective)

    @property
    def least_memory(self) -> int:
        assert self.fastest is not None
        ends = [self.fastest]
        for saving in {0, len(self.savings) - 1}:
            tried = (self._candidate(saving, batch) for batch in self._ends)
            ends += [each for each in tried if each is not None]
        return min(each.mode.total for each in ends)

    def fast(self, objective: Objective, limit: float) -> list[Candidate]:
        """Return the fastest candidates that fit and whose value is at most ``limit``. What saves
        more than necessary is not tried."""
        fitting: list[Candidate] = []
        enough: list[Saving] = []
        for number, saving in enumerate(self.savings):
            if any(saving.includes(each) for each in enough):
                continue
            for batch in range(len(self.batches)):
                candidate = self._candidate(number, batch)
                if candidate is None or candidate.value(objective) > limit:
                    if self.layout.axes.pipeline > 1:
                        continue
                    break  # smaller micro-batches are slower
                if not candidate.mode.fits:
                    continue
                fitting.append(candidate)
                if batch == 0:
                    enough.append(saving)
                if self.layout.axes.pipeline == 1:
                    break
        return fitting

    def smallest(self) -> list[Candidate]:
        """Return the candidates with the smallest and the largest micro-batch: with a single one,
        a strategy that adds up gradients may need less."""
        tried = [
            self._candidate(number, batch)
            for number in range(len(self.savings))
            for batch in self._ends
        ]
        return [each for each in tried if each is not None]

    def all(self) -> list[Candidate]:
        tried = [
            self._candidate(saving, batch)
            for saving in range(len(self.savings))
            for batch in range(len(self.batches))
        ]
        return [each for each in tried if each is not None]

    def _candidate(self, saving: int, batch: int) -> Candidate | None:
        key = saving, batch
        if key not in self._tried:
            settings = {**self.savings[saving].settings, **self.batches[batch]}
            try:
                mode = self.trials.estimate(self.layout, settings)
            except ConfigError:
                mode = None
            # On one device, sharding only serves to offload.
            has_shards = self.layout.strategy != "single" and self.layout.world_size == 1
            offload = with_settings(self.trials.config, settings).parallel.state_offload
            if has_shards and offload == "none":
                mode = None
            self._tried[key] = None
            if mode is not None and mode.cost is not None:
                buckets = bucket_size(self.trials, self.layout, settings, mode)
                if buckets:
                    mode = self.trials.estimate(self.layout, {**settings, **buckets})
                self._tried[key] = Candidate(mode, settings, buckets)
        return self._tried[key]


def runners_up(
    searched: SearchResult, chosen: Candidate, objective: Objective
) -> Sequence[Candidate]:
    """Return the two best other candidates: of other layouts, or if there are none, of the same
    one with other settings."""
    others = sorted(
        (each for each in searched.fitting if each is not chosen),
        key=lambda each: each.value(objective),
    )
    first: dict[str, Candidate] = {}
    for each in others:
        if each.mode.name != chosen.mode.name:
            first.setdefault(each.mode.name, each)
    result = list(first.values())
    result += [each for each in others if each not in result]
    return result[: _REPORTED - 1]
