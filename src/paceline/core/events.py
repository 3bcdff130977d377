"""The types of events: the lines of :mod:`paceline.core.event_log`.

Readers must not rely on a field, because another version of Paceline may have written the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from pydantic import JsonValue


class _Logged(TypedDict, total=False):
    """``time``: seconds since the epoch, set by the log."""

    time: float


class ModelFigures(TypedDict, total=False):
    name: str
    parameters: int
    trainable_parameters: int


class MeshRank(TypedDict, total=False):
    """``coordinates``: by axis. A rank that only serves others has none, and a ``role``."""

    rank: int
    host: str
    device: str
    coordinates: dict[str, int]
    role: str


class Mesh(TypedDict, total=False):
    """``axes``: sizes by name."""

    axes: dict[str, int]
    ranks: list[MeshRank]


class MemoryParts(TypedDict, total=False):
    """Bytes; None where not known. ``total`` is the sum of what is known."""

    parameters: int | None
    gradients: int | None
    optimizer: int | None
    activations: int | None
    total: int | None


class Prediction(TypedDict, total=False):
    """Predicted by the cost model of the strategy: maximum over the ranks of memory and of traffic,
    which ``traffic_bytes`` splits by collective."""

    memory_bytes: MemoryParts
    traffic_bytes_per_step: float
    traffic_bytes: dict[str, float]
    traffic_is_bound: bool


class DataFigures(TypedDict, total=False):
    """Samples, and turns that are excluded from the loss. ``dropped``: by reason."""

    read: int
    kept: int
    truncated: int | None
    dropped: dict[str, int]
    excluded_turns: int


class RunStartEvent(_Logged, total=False):
    """``config``: resolved. ``launcher``: the process id of the launcher."""

    type: Literal["run_start"]
    config: dict[str, JsonValue]
    #: The fields of :class:`paceline.config.derive.ResolvedValues`.
    derived: dict[str, float | None]
    world_size: int
    axes: dict[str, int]
    mesh: Mesh
    predicted: Prediction
    device: str
    precision: str
    strategy: str
    model: ModelFigures
    data: DataFigures
    versions: dict[str, str]
    pid: int
    launcher: int | None
    host: str
    output_dir: str
    resumed_from_step: int | None


class ResumeEvent(_Logged, total=False):
    """Steps logged after ``step`` by an earlier attempt no longer count."""

    type: Literal["resume"]
    step: int
    path: str | None


class Fault(_Logged, total=False):
    """Why an attempt ended. ``step``: the last one logged. ``restart``: number of restarts since
    the newest checkpoint."""

    step: int | None
    ranks: list[int]
    hosts: list[str]
    reason: str
    restart: int
    seen_at: float


class FaultEvent(Fault, total=False):
    """An attempt ended, and this one continues from the checkpoint that ``resume`` names."""

    type: Literal["fault"]


class SkippedEvent(_Logged, total=False):
    """A gradient was not finite on these ranks, and its update was not made. If ranks train
    independently: at most ``updates`` updates by each of them since the last ``step`` line."""

    type: Literal["skipped"]
    step: int
    updates: int
    ranks: list[int]
    cause: str | None  # loss, gradient or overflow
    hosts: list[str]


class DriftEvent(_Logged, total=False):
    """Replicas that should hold the same bits do not. ``parameter``: the first that differs.
    ``tensors``: how many differ."""

    type: Literal["drift"]
    step: int
    ranks: list[int]
    hosts: list[str]
    parameter: str
    tensors: int


class RollbackEvent(_Logged, total=False):
    """The loss jumped at ``step``: the run returns to ``to_step``, and the batch of that step is
    skipped. A ``resume`` follows if a checkpoint was loaded."""

    type: Literal["rollback"]
    step: int
    to_step: int
    loss: float
    median: float | None


class WorkerLostEvent(_Logged, total=False):
    """A rank ended, and the others continued."""

    type: Literal["worker_lost"]
    step: int
    rank: int
    pid: int
    reason: str
    samples_unseen: int


class HangEvent(_Logged, total=False):
    """A rank blocks the others. ``rank``: None if the ranks wait for one another. ``stack``: lines,
    innermost first. ``mismatch``: set if the ranks have issued different collectives. If rank 0
    itself hangs, the others print this without an event."""

    type: Literal["hang"]
    text: str
    rank: int | None
    host: str | None
    phase: str | None
    step: int | None
    since_s: float
    why: str
    stack: list[str]
    mismatch: str | None


class HangEndEvent(_Logged, total=False):
    """The rank of a ``hang`` makes progress again."""

    type: Literal["hang_end"]
    text: str
    rank: int | None
    since_s: float


class StepShare(TypedDict, total=False):
    data_s: float
    compute_s: float
    communication_s: float


class _RankReport(_Logged, total=False):
    """A report about one rank."""

    text: str
    rank: int
    host: str
    step: int | None


class StragglerEvent(_RankReport, total=False):
    """``slower_by_s``: per step, than the median of the other ranks. ``steps``: that were compared.
    A rank whose process was paused in a step is reported by this alone, with ``steps`` 1."""

    type: Literal["straggler"]
    slower_by_s: float
    share: StepShare
    steps: int


class StragglerEndEvent(_RankReport, total=False):
    """The rank is as fast as the others again."""

    type: Literal["straggler_end"]


class LinkEvent(_RankReport, total=False):
    """``link``: this rank had to resend a share (0 to 1) of its last TCP segments to other hosts.
    ``link_end``: the link has recovered."""

    type: Literal["link", "link_end"]
    resent_share: float
    segments: int
    seconds: float


class BalanceEvent(_Logged, total=False):
    """The micro-batches per step of each rank, with ``parallel.balance``.

    ``reason``: ``weights`` (configured), ``checkpoint`` (stored in it), ``measured`` (with
    ``seconds`` per micro-batch, by rank, and the predicted ``gain``; equal shares may be kept),
    ``withdrawn`` (new shares made steps longer, and the previous ones are restored), ``reset``
    (those of the checkpoint are not used).
    """

    type: Literal["balance"]
    step: int
    shares: list[int]
    reason: str
    seconds: list[float]
    gain: float | None
    text: str


class NoticeEvent(_Logged, total=False):
    """``level``: info or warning."""

    type: Literal["notice"]
    level: str
    text: str


class RankStep(TypedDict, total=False):
    """Means per step of one rank. Waits for other ranks that no computation hid are taken out of
    the phases: they are ``communication_s``. ``other_s``: the rest of the step."""

    rank: int
    data_wait_s: float
    comm_wait_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    communication_s: float
    other_s: float
    memory_bytes: int


class DeviceFigures(TypedDict, total=False):
    """``utilisation``: 0 to 1. None where not known."""

    rank: int
    utilisation: float | None
    temperature_c: float | None
    power_w: float | None


class StepFigures(_Logged, total=False):
    """Means over the steps since the last such line; None where not known.

    ``tokens`` is the number of tokens of the global batch. With ``recovery.watchdog: false`` only
    the waits of Paceline's own collectives are measured, and those of FSDP and pipelines stay in
    the phase. If micro-batches run in threads (``dp``), time belongs to the phase that any of them
    entered last. On an accelerator all of these are times of the host, which queues work and
    continues: a phase is the time to queue its kernels, ``communication_s`` what the host waited,
    and ``other_s`` mostly the device's work that was waited for at the line. ``traffic``: bytes by
    collective that the rank which sends most sends in a step; if traffic has a period
    (``local_sgd``, ``diloco``) over the last complete one, None before the first. Collectives are
    counted as an algorithm with optimal bandwidth sends them. ``devices``: if NVML reports them,
    read every few seconds.
    """

    loss: float
    grad_norm: float
    tokens: int | None
    samples: int
    step_time_s: float
    data_wait_s: float
    comm_wait_s: float | None
    memory_bytes: list[int]
    ranks: list[RankStep]
    traffic: dict[str, int] | None
    devices: list[DeviceFigures]
    since_start_s: float


class StepEvent(StepFigures, total=False):
    type: Literal["step"]
    step: int
    epoch: float
    learning_rate: float | None


class MemoryEvent(_Logged, total=False):
    """Once, after the second step of an attempt: bytes at the peak of a step, in rank order; each
    storage once, the local part of sharded tensors. ``activations``: the device's peak in that step
    minus the others, workspace included; None on a CPU."""

    type: Literal["memory"]
    step: int
    ranks: list[MemoryParts]


class EvalEvent(_Logged, total=False):
    type: Literal["eval"]
    step: int
    loss: float
    count: int
    wall_s: float
    metrics: dict[str, float]


class SampleText(TypedDict, total=False):
    prompt: str
    text: str
    reference: str


class SampleEvent(_Logged, total=False):
    """At each evaluation of a language task: the answers by greedy decoding to the same held-out
    prompts."""

    type: Literal["sample"]
    step: int
    samples: list[SampleText]
    wall_s: float


class CheckpointEvent(_Logged, total=False):
    """``blocked_s``: how long training waited; the rest is written in the background. ``error``:
    set if it could not be written. ``url``: its place in ``checkpoint_dir``."""

    type: Literal["checkpoint"]
    step: int
    path: str | None
    size_bytes: int | None
    wall_s: float | None
    blocked_s: float
    url: str
    error: str


class RunEndEvent(_Logged, total=False):
    """``status``: done, stopped or failed. ``wall_s``: since the command was started. ``network``:
    a comment on the time that communication took, if there is one."""

    type: Literal["run_end"]
    status: str
    step: int | None
    reason: str | None
    wall_s: float
    network: str


#: What the watchdog reports.
HealthEvent = HangEvent | HangEndEvent | StragglerEvent | StragglerEndEvent | LinkEvent

Event = (
    HealthEvent
    | RunStartEvent
    | ResumeEvent
    | FaultEvent
    | SkippedEvent
    | DriftEvent
    | RollbackEvent
    | WorkerLostEvent
    | BalanceEvent
    | NoticeEvent
    | StepEvent
    | MemoryEvent
    | EvalEvent
    | SampleEvent
    | CheckpointEvent
    | RunEndEvent
)
