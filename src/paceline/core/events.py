"""The types of events: the lines of :mod:`paceline.core.event_log`.

Readers must not rely on a field, because another version of Paceline may have written the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from paceline.core.report import (
    DataFigures,
    ExpertStep,
    MemoryFallback,
    PackingFigures,
    PeakRate,
    RolloutFigures,
    SourceFigures,
    SourceStep,
    WorkerLoss,
)

if TYPE_CHECKING:
    from pydantic import JsonValue

    from paceline.core.texts import Values


class _Logged(TypedDict, total=False):
    """Base of all events. ``time`` is in seconds since the epoch and is set by the log."""

    time: float


class ModelFigures(TypedDict, total=False):
    """``attention`` is the attention implementation of a transformers model, or the kernel that
    computes packed rows; None without attention layers. ``layers``: the kernels of recurrent and
    convolution layers."""

    name: str
    parameters: int
    trainable_parameters: int
    attention: str | None
    layers: list[LayerFigures]


class LayerFigures(TypedDict):
    """A kind of layers, what computes them, and the packages with kernels for them that are not
    installed."""

    kind: str
    kernel: str
    missing: list[str]


class MeshRank(TypedDict, total=False):
    """A rank of the device mesh, with its coordinate on each axis. A rank outside of the mesh, such
    as a parameter server, has a ``role`` instead of coordinates."""

    rank: int
    host: str
    device: str
    coordinates: dict[str, int]
    role: str


class Mesh(TypedDict, total=False):
    """The device mesh: the size of each axis, and the ranks."""

    axes: dict[str, int]
    ranks: list[MeshRank]


class MemoryParts(TypedDict, total=False):
    """Memory in bytes by purpose; None if unknown. ``total`` is the sum of the known values."""

    parameters: int | None
    gradients: int | None
    optimizer: int | None
    activations: int | None
    total: int | None


class Prediction(TypedDict, total=False):
    """Memory and traffic as predicted by the cost model of the strategy: the maximum over the
    ranks. ``traffic_bytes`` splits the traffic by collective."""

    memory_bytes: MemoryParts
    traffic_bytes_per_step: float
    traffic_bytes: dict[str, float]
    traffic_is_bound: bool


class RunStartEvent(_Logged, total=False):
    """An attempt starts. ``config`` is the resolved config; ``launcher`` is the process ID of the
    launcher; ``command_started_at`` and ``cwd`` are the time and the working directory of the
    command."""

    type: Literal["run_start"]
    config: dict[str, JsonValue]
    #: The fields of :class:`paceline.config.derive.ResolvedValues`.
    derived: dict[str, float | None]
    world_size: int
    axes: dict[str, int]
    mesh: Mesh
    predicted: Prediction
    device: str
    peak: PeakRate | None
    precision: str
    strategy: str
    model: ModelFigures
    data: DataFigures
    packing: PackingFigures
    sources: list[SourceFigures]
    versions: dict[str, str]
    pid: int
    launcher: int | None
    host: str
    output_dir: str
    cwd: str
    command_started_at: float
    resumed_from_step: int | None


class ResumeEvent(_Logged, total=False):
    """The run continues from the checkpoint of ``step``. Steps that an earlier attempt logged after
    it no longer count."""

    type: Literal["resume"]
    step: int
    path: str | None


class Fault(_Logged, total=False):
    """Why an attempt ended. ``step`` is the last logged step, ``restart`` the number of restarts
    since the latest checkpoint; ``code`` tells the kind of failure, and ``values`` what the reason
    contains."""

    step: int | None
    ranks: list[int]
    hosts: list[str]
    reason: str
    code: str
    values: Values
    restart: int
    seen_at: float


class MemoryFallbackEvent(MemoryFallback, _Logged, total=False):
    """The previous attempt ran out of memory. This one has smaller memory settings."""

    type: Literal["memory_fallback"]


class FaultEvent(Fault, total=False):
    """The previous attempt ended with a fault. This one continues from the checkpoint in its
    ``resume`` event."""

    type: Literal["fault"]


class SkippedEvent(_Logged, total=False):
    """The optimizer step was skipped because gradients were not finite on these ranks. If ranks
    train independently, each of them skipped at most ``updates`` updates since the last ``step``
    event."""

    type: Literal["skipped"]
    step: int
    updates: int
    ranks: list[int]
    cause: str | None  # loss, gradient or overflow
    hosts: list[str]


class DriftEvent(_Logged, total=False):
    """Replicas that should be identical bit for bit differ. ``parameter`` is the first tensor that
    differs, ``tensors`` the number of those that do."""

    type: Literal["drift"]
    step: int
    ranks: list[int]
    hosts: list[str]
    parameter: str
    tensors: int


class RollbackEvent(_Logged, total=False):
    """The loss spiked at ``step``: the run rolls back to ``to_step`` and skips the batch of
    ``step``. If a checkpoint was loaded, a ``resume`` event follows."""

    type: Literal["rollback"]
    step: int
    to_step: int
    loss: float
    median: float | None


class WorkerLostEvent(WorkerLoss, _Logged, total=False):
    """A rank ended, and the others continued."""

    type: Literal["worker_lost"]


class HangEvent(_Logged, total=False):
    """A rank makes no progress and blocks the others. If that is rank 0, which writes the events,
    the others only print it.

    Attributes:
        rank: None if the ranks wait for one another.
        stack: lines of the stack trace, innermost first.
        mismatch: set if the ranks have issued different collectives.
    """

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
    """A rank is slower than the others: by ``slower_by_s`` seconds per step than their median, over
    ``steps`` steps. A rank whose process was paused during one step is reported with ``steps`` 1
    and has no ``straggler_end``."""

    type: Literal["straggler"]
    slower_by_s: float
    share: StepShare
    steps: int


class StragglerEndEvent(_RankReport, total=False):
    """The rank is as fast as the others again."""

    type: Literal["straggler_end"]


class LinkEvent(_RankReport, total=False):
    """``link``: the rank had to resend the share ``resent_share`` (0 to 1) of its latest TCP
    segments to other hosts. ``link_end``: the link has recovered."""

    type: Literal["link", "link_end"]
    resent_share: float
    segments: int
    seconds: float


class BalanceEvent(_Logged, total=False):
    """The micro-batches per step of each rank, with ``parallel.balance``.

    ``reason`` is ``weights`` (configured), ``checkpoint`` (restored from it), ``measured`` (with
    ``seconds`` per micro-batch by rank and the predicted ``gain``; the shares may stay equal),
    ``withdrawn`` (new shares made steps longer, so the previous ones are restored) or ``reset``
    (the checkpoint's shares are not used).
    """

    type: Literal["balance"]
    step: int
    shares: list[int]
    reason: str
    seconds: list[float]
    gain: float | None
    text: str


class DataEvent(_Logged, total=False):
    """The rows of all ranks up to ``step``, if the data is streamed."""

    type: Literal["data"]
    step: int
    data: DataFigures


class NoticeEvent(_Logged, total=False):
    """A log message of the run. ``level`` is info or warning; ``code`` tells the kind of message,
    and ``values`` what the text contains."""

    type: Literal["notice"]
    level: str
    text: str
    code: str
    values: Values


class RankStep(TypedDict, total=False):
    """Means per step of one rank. Waiting for other ranks that does not overlap with computation
    counts as ``communication_s``, not as part of a phase. ``other_s`` is the rest of the step."""

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
    """Measurements of a device; None if unknown. ``utilisation`` is between 0 and 1."""

    rank: int
    utilisation: float | None
    temperature_c: float | None
    power_w: float | None


class StepFigures(_Logged, RolloutFigures, total=False):
    """Means over the steps since the previous ``step`` event; None if unknown.

    With ``recovery.watchdog: false``, waiting is measured for Paceline's own collectives only, and
    waiting in FSDP or a pipeline counts as part of the phase. If micro-batches run in threads
    (``dp``), time counts towards the phase that any of them entered last.

    On an accelerator, phases and ``communication_s`` are times of the device, from events on its
    streams. They are read a step late, so the times of the last step may count in the next event.
    ``step_time_s`` and ``data_wait_s`` are times of the host.

    Attributes:
        tokens: number of tokens of the global batch.
        flops_per_device_s: FLOPs of the model per second and device, without recomputation; known
            for language models.
        mfu: model FLOPs utilization, which is ``flops_per_device_s`` divided by the device's
            ``peak`` in the ``run_start`` event.
        traffic: bytes per step and collective, sent by the rank that sends most, as an algorithm
            with optimal bandwidth sends them. If traffic is periodic (``local_sgd``, ``diloco``),
            the mean over the last complete period, or None before the first.
        devices: read every few seconds, if NVML reports them.
        fill: with packed rows, the share of their capacity that has tokens.
        sources: the figures of each source, if there are several.
        metrics: means of the task's metrics, such as ``rewards/margins``, if it has any.
        experts: the load of the experts and their auxiliary loss, if the model has any.
    """

    loss: float
    grad_norm: float
    tokens: int | None
    samples: int
    step_time_s: float
    flops_per_device_s: float | None
    mfu: float | None
    data_wait_s: float
    comm_wait_s: float | None
    memory_bytes: list[int]
    ranks: list[RankStep]
    traffic: dict[str, int] | None
    devices: list[DeviceFigures]
    since_start_s: float
    fill: float
    sources: list[SourceStep]
    metrics: dict[str, float]
    experts: ExpertStep


class StepEvent(StepFigures, total=False):
    type: Literal["step"]
    step: int
    epoch: float | None
    learning_rate: float | None


class MemoryEvent(_Logged, total=False):
    """Memory of each rank at the peak of a step, in rank order; logged once, after the second step
    of an attempt. Each storage counts once, and sharded tensors with their local shard.
    ``activations`` is the device's peak in that step minus the others, workspace included; None on
    a CPU."""

    type: Literal["memory"]
    step: int
    ranks: list[MemoryParts]


class EvalEvent(_Logged, total=False):
    """Loss and metrics over the evaluation set. ``count``: number of targets that they are averaged
    over, which are label tokens, images or clicks. ``answered_rows``: number of rows with a
    generated answer, for metrics of generated text. ``best_step``: step of the best evaluation so
    far, this one included, if the best model is selected."""

    type: Literal["eval"]
    step: int
    loss: float
    count: int
    answered_rows: int
    wall_s: float
    metrics: dict[str, float]
    best_step: int


class SampleText(TypedDict, total=False):
    prompt: str
    text: str
    reference: str


class SampleEvent(_Logged, total=False):
    """Answers to the same held-out prompts, generated by greedy decoding at each evaluation of a
    language task."""

    type: Literal["sample"]
    step: int
    samples: list[SampleText]
    wall_s: float


class CheckpointEvent(_Logged, total=False):
    """A checkpoint was written, or could not be (``error``). Training waited for ``blocked_s``; the
    rest was written in the background. ``url`` is its location in ``checkpoint_dir``."""

    type: Literal["checkpoint"]
    step: int
    path: str | None
    size_bytes: int | None
    wall_s: float | None
    blocked_s: float
    url: str
    error: str


class ProfileEvent(_Logged, total=False):
    """The profiler recorded the steps from ``first_step`` to ``step``. ``traces`` and
    ``memory_snapshots`` are the files of the ranks, in rank order, relative to the folder of the
    run on the host of each rank."""

    type: Literal["profile"]
    first_step: int
    step: int
    traces: list[str]
    memory_snapshots: list[str]


class RunEndEvent(_Logged, total=False):
    """The run ended. ``status`` is done, stopped or failed; ``code`` and ``values`` are about the
    reason; ``wall_s`` counts from the start of the command; ``network`` comments on the time that
    communication took, if that is worth a comment."""

    type: Literal["run_end"]
    status: str
    step: int | None
    reason: str | None
    code: str
    values: Values
    wall_s: float
    network: str


#: Events that the watchdog reports.
HealthEvent = HangEvent | HangEndEvent | StragglerEvent | StragglerEndEvent | LinkEvent

Event = (
    HealthEvent
    | RunStartEvent
    | ResumeEvent
    | FaultEvent
    | MemoryFallbackEvent
    | SkippedEvent
    | DriftEvent
    | RollbackEvent
    | WorkerLostEvent
    | BalanceEvent
    | DataEvent
    | NoticeEvent
    | StepEvent
    | MemoryEvent
    | EvalEvent
    | SampleEvent
    | CheckpointEvent
    | ProfileEvent
    | RunEndEvent
)
