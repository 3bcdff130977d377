"""Let the other ranks continue after a rank has ended, if the strategy supports it: the launcher
tells them through their store, instead of ending them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.failures import ExitRecord
from paceline.distributed.environment import CONTINUE_KEY, LOST_KEY
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import STRATEGIES, get_spec

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.parallel.spec import StrategySpec


@dataclass(frozen=True)
class ToleratedExit:
    """The end of a process without which the other ranks continue."""

    pid: int | None
    reason: str


class ExitTolerance:
    """Which ranks may end without ending the run, and which of them have ended.

    Args:
        ranks: the ranks that may end; the others continue as long as one of these is left.
        store: store of the ranks, served by this process. A rank sets ``CONTINUE_KEY`` in it once
            the ranks can continue.
    """

    def __init__(self, ranks: frozenset[int], store: Any) -> None:
        self._ranks, self._store = ranks, store
        self.exits: dict[int, ToleratedExit] = {}

    def tolerate(self, exits: Mapping[int, ToleratedExit]) -> bool:
        """Let the other ranks continue without these ranks. Return False if they cannot."""
        if not {*exits, *self.exits} < self._ranks or not self._store.check([CONTINUE_KEY]):
            return False
        self.exits |= exits
        texts = {rank: asdict(each) for rank, each in self.exits.items()}
        self._store.set(LOST_KEY, json.dumps(texts))
        return True

    def describe(self, spec: Any) -> str:
        """Return a sentence about the ranks that have ended; "" if there are none."""
        texts = [
            f"{name_process(rank, each.pid, spec)}, {each.reason}"
            for rank, each in self.exits.items()
        ]
        return f" Lost earlier: {'; '.join(texts)}." if texts else ""


def reason_of_exit(exit_text: str, record: ExitRecord | None) -> str:
    """Return why a process has ended: the failure that it recorded, or how it exited."""
    if record is None:
        return exit_text
    text = record.message.split(" To fix:")[0].rstrip(".")
    return f"failed: {text}"


def tolerated_ranks(spec: Any) -> frozenset[int]:
    """Return the ranks of a spec that may end without ending the run."""
    strategy = _strategy_of(spec)
    if strategy is None:
        return frozenset()
    return strategy.expendable_ranks(spec.config, spec.layout.axes)


def tolerates_exits(configs: Iterable[Config]) -> bool:
    """Return whether ranks of one of these runs may continue after others have ended."""
    modes = ((STRATEGIES.get(config.parallel.mode), config) for config in configs)
    return any(
        spec is not None and bool(spec.expendable_ranks(config, ParallelDims()))
        for spec, config in modes
    )


def name_process(rank: int, pid: int | None, spec: Any) -> str:
    """Return text that names a rank, its role (if ranks have different roles) and its process."""
    strategy = _strategy_of(spec)
    role = "" if strategy is None else strategy.rank_role(spec.config, spec.layout.axes, rank)
    return f"rank {rank}{f', {role}' if role else ''} (process {pid})"


def _strategy_of(spec: Any) -> StrategySpec | None:
    layout = getattr(spec, "layout", None)
    return None if layout is None else get_spec(layout.strategy)
