"""The draft of a run: what is known of it before its ranks are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from paceline.core.run_dir import RunDir

if TYPE_CHECKING:
    from paceline.checkpoint.format import CheckpointMeta
    from paceline.config.derive import ResolvedValues
    from paceline.config.load import Loaded
    from paceline.config.schema import Config
    from paceline.core.events import Fault
    from paceline.core.report import Report
    from paceline.distributed.devices import Devices
    from paceline.distributed.environment import RankEnv
    from paceline.launch.passes.rank_memory import RankMemory
    from paceline.parallel.registry import ParallelLayout
    from paceline.planner.search.trials import Setting
    from paceline.tasks.base import Prepared

T = TypeVar("T")


def known(value: T | None) -> T:
    """Return a field of a draft that an earlier pass has set."""
    assert value is not None, "the pass that sets this field has not run"
    return value


@dataclass(frozen=True)
class Host:
    """The devices of this host, and the memory that each of its ranks may use.

    Args:
        memory: memory of a rank, for which the memory settings are chosen that the config leaves
            open; None to leave them as they are.
    """

    devices: Devices
    memory: RankMemory | None = None


@dataclass(frozen=True)
class Draft:
    """A run that is being planned. Each pass of :mod:`paceline.launch.plan` returns a new draft.

    Args:
        loaded: the config, as the passes so far have changed it.
        started_at: start time of the command, in seconds since the epoch.
        dry_run: whether the run is only checked. The model is then checked too, which the ranks do
            otherwise.
        allow_config_change: whether the run may resume with another config.
        saves_state: whether the run writes checkpoints and the trained model.
        outer: rank that an outer launcher assigned to this process, or None.
        failure: content of the ``fault`` event if the ranks were restarted after a failure, else
            None.
        is_first_attempt: whether no attempt precedes this one. Later attempts resume the latest
            checkpoint of the run regardless of ``resume``.
        reads_folder: whether this process reads the run's folder. Over several hosts only rank 0
            does, and sends what it found to the other ranks.
        kept: memory settings of the previous attempt; None to read them from the run's folder.
        host: devices and memory of this host.
        layout: strategy and mesh of the run.
        settings: settings that were chosen for the layout; ``loaded`` has them.
        data: the data that the task prepared.
        history_key: key under which memory settings that work are stored; None if they depend on
            what other processes hold.
        global_batch_size: global batch size of the checkpoint or of the previous attempt, which
            may have ended before its first checkpoint; None in a new run.
        resume_from: path of the checkpoint to resume from, on rank 0's host, or None.
        meta: content of its ``meta.json``; None where the folder is not read.
        derived: batch sizes, steps and learning rate.
        finished: report of the run in the same folder if it is already complete, else None.
    """

    loaded: Loaded
    started_at: float
    dry_run: bool = False
    allow_config_change: bool = False
    saves_state: bool = True
    outer: RankEnv | None = None
    failure: Fault | None = None
    is_first_attempt: bool = True
    reads_folder: bool = True
    kept: Mapping[str, Setting] | None = None
    host: Host | None = None
    layout: ParallelLayout | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    data: Prepared | None = None
    history_key: str | None = None
    global_batch_size: int | None = None
    resume_from: str | None = None
    meta: CheckpointMeta | None = None
    derived: ResolvedValues | None = None
    finished: Report | None = None

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.loaded.config

    @property
    def run_dir(self) -> RunDir:
        """The folder of the run."""
        return RunDir(Path(self.config.output_dir))

    @property
    def device_type(self) -> str:
        """Type of the devices of this host."""
        return known(self.host).devices.type

    @property
    def num_devices(self) -> int:
        """Number of devices of the run, over all hosts. For ranks of an outer launcher, the number
        of ranks, servers included."""
        if self.outer is not None:
            return self.outer.world_size
        return known(self.host).devices.count * self.config.parallel.hosts[1]

    def with_config(self, config: Config) -> Self:
        """Return a draft with another config."""
        return replace(self, loaded=replace(self.loaded, config=config))
