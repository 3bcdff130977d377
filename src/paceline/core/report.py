"""The keys of ``report.json``, their validation, and the figures that events have too."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NotRequired, TypedDict

if TYPE_CHECKING:
    from pydantic import JsonValue


#: The figures of rollouts that are one number.
ROLLOUT_NUMBERS = (
    "reward",
    "reward_std",
    "zero_std_groups",
    "skipped_groups",
    "completion_length",
    "truncated",
    "kl",
    "entropy",
    "clip_ratio",
    "logprob_diff",
    "importance_ratio",
    "importance_clipped",
    "tool_calls",
    "tool_failures",
    "rollout_s",
    "reward_s",
    "update_s",
)


# -- figures of events and of the report
class RolloutFigures(TypedDict, total=False):
    """Means over the steps since the previous ``step`` event; None if unknown.

    Attributes:
        reward: weighted sum of the rewards of a completion.
        reward_std: standard deviation of the rewards of a group.
        rewards: reward of each kind, over the completions to which it applies.
        zero_std_groups: number of groups of a step whose rewards are all equal.
        skipped_groups: number of groups that dynamic sampling has left out.
        completion_length: number of tokens.
        truncated: share of completions that reached the largest length.
        rollout_s, reward_s, update_s: seconds to generate completions, to compute their rewards,
            and of the rest of the step.
        kl: divergence from the reference model, per token.
        entropy: entropy of the distribution of a token, in nats.
        clip_ratio: share of tokens (of completions, if there is a ratio for each) whose ratio of
            probabilities is clipped.
        logprob_diff: mean difference between the log-probabilities of tokens when they were drawn
            and in training.
        importance_ratio: mean of the ratios of probabilities by which the loss is multiplied to
            correct for the engine.
        importance_clipped: share of these ratios that were outside of their limits.
        tool_calls: tool calls per completion, with an environment.
        tool_failures: share of the tool calls that failed.
    """

    reward: float | None
    reward_std: float | None
    rewards: dict[str, float | None]
    zero_std_groups: float | None
    skipped_groups: float | None
    completion_length: float | None
    truncated: float | None
    rollout_s: float | None
    reward_s: float | None
    update_s: float | None
    kl: float
    entropy: float
    clip_ratio: float
    logprob_diff: float
    importance_ratio: float
    importance_clipped: float
    tool_calls: float | None
    tool_failures: float | None


class PackingFigures(TypedDict, total=False):
    """Packed rows: ``rows`` per epoch (of each source, if sources are mixed), ``capacity`` in
    tokens, and ``fill``, the share of the capacity that has tokens."""

    strategy: str
    rows: list[int]
    capacity: int
    fill: float


class SourceFigures(TypedDict, total=False):
    """One of several sources. ``samples`` and ``tokens`` are counts per epoch of the source, or
    ``rows``, if it is streamed and their number is known; ``share`` is its share of the rows at the
    first step, if it is known."""

    name: str
    samples: int
    tokens: int
    rows: int
    share: float


class SourceRows(TypedDict):
    """The numbers of rows, samples and tokens of a streamed source so far. ``dropped`` is the sum
    over all reasons."""

    name: str
    read: int
    kept: int
    dropped: int
    samples: int
    tokens: int
    label_tokens: int


class SourceStep(TypedDict, total=False):
    """One of several sources in the steps since the previous ``step`` event: the mean loss, and the
    numbers of samples and tokens of all these steps."""

    name: str
    loss: float | None
    samples: int
    tokens: int


class ExpertStep(TypedDict):
    """The experts in the steps since the previous ``step`` event: the largest ratio of an expert's
    tokens to the mean of its layer, and the mean auxiliary loss without its coefficient (None if it
    is not trained)."""

    max_over_mean: float
    aux_loss: float | None


class DataFigures(TypedDict, total=False):
    """Numbers of samples (``dropped`` by reason), and of turns that are excluded from the loss. Of
    streamed data, the numbers so far, with the numbers of samples and tokens, and the sources."""

    read: int
    kept: int
    truncated: int | None
    dropped: dict[str, int]
    excluded_turns: int
    samples: int
    tokens: int
    label_tokens: int
    sources: list[SourceRows]


class PeakRate(TypedDict):
    """Dense matrix operations per second of a device in the precision of the run, and where the
    figure is from."""

    device: str
    flops_s: float
    source: str


class WorkerLoss(TypedDict, total=False):
    """The end of a rank without which the others continued."""

    step: int
    rank: int
    pid: int
    reason: str
    samples_unseen: int


class MemoryFallback(TypedDict, total=False):
    """An attempt ran out of memory in ``phase``, after logging ``step``; the next one had smaller
    memory settings. ``before`` and ``settings`` are by dotted key."""

    step: int | None
    ranks: list[int]
    phase: str
    before: dict[str, JsonValue]
    settings: dict[str, JsonValue]


# -- the report
class Predicted(TypedDict):
    """Number of bytes as predicted by the strategy, and as measured."""

    predicted: float
    measured: int | None


class PredictedTraffic(Predicted, total=False):
    """Traffic per step in bytes. ``bound`` tells whether the prediction is an upper bound."""

    bound: bool


class StepTime(TypedDict):
    """Seconds of a step as the planner predicts them, and as measured: the mean of all steps after
    the first. ``range`` is the range of 80 % of published results, and ``parts`` the prediction by
    kind of work, before earlier runs on the machine correct it. None: not known."""

    predicted: float | None
    measured: float | None
    measured_steps: int
    range: list[float] | None
    parts: dict[str, float] | None


class SkippedBatches(TypedDict):
    """Batches that were skipped after loss spikes. ``steps`` are counted from 1."""

    steps: list[int]
    samples: int


class BestModel(TypedDict):
    """The best evaluation. ``is_final``: the weights in ``model/`` are from this step."""

    step: int
    metric: str
    value: float
    is_final: bool


class DataReport(DataFigures, total=False):
    """Numbers of rows of the training data, and the batches that were skipped after loss spikes."""

    skipped_batches: SkippedBatches


class SourceReport(TypedDict):
    """One of several sources. ``epochs`` counts the epochs of the source; ``first_loss`` and
    ``final_loss`` are its losses at the first and the last logged step with its tokens."""

    name: str
    samples: int
    tokens: int
    epochs: float | None
    first_loss: float | None
    final_loss: float | None


class ExpertTokens(TypedDict):
    """The number of tokens that each expert of a layer got."""

    name: str
    tokens: list[int]


class ExpertReport(TypedDict, total=False):
    """The experts over all attempts of the run. ``size``: number of ranks that the experts of a
    layer are divided among. ``max_over_mean``: the largest ratio of an expert's tokens to the mean
    of its layer. ``from_step``: set if only the steps after it are counted, because the run resumed
    from a checkpoint without these counts. ``with_padding``: number of tokens, over all layers, of
    which Paceline does not know whether they are padding; set if there are any."""

    size: int
    layers: list[ExpertTokens]
    max_over_mean: float | None
    from_step: int
    with_padding: int


class _AlwaysReported(TypedDict):
    status: str
    strategy: str
    world_size: int
    device: str
    steps: int
    epochs: float | None
    samples_seen: int
    train_tokens: int | None
    label_tokens: int | None
    tokens_per_second: float | None
    time_to_first_step_s: float | None
    wall_s: float
    first_train_loss: float | None
    final_train_loss: float | None
    final_eval_loss: float | None
    peak_memory_bytes: list[int | None]
    state_memory_bytes: Predicted
    traffic_bytes_per_step: PredictedTraffic
    restarts: int
    resumed_from_step: int | None
    data: DataReport


class LmEvalReport(TypedDict, total=False):
    """The results of lm-evaluation-harness (task → metric → value), the versions and numbers of
    rows of the tasks, and the version of the package; or ``error``."""

    results: dict[str, dict[str, float]]
    versions: dict[str, float | str]
    num_rows: dict[str, int]
    lm_eval: str
    error: str


class ContextReport(TypedDict):
    """Context parallelism: the number of ranks that divide each row, how they exchange keys and
    values, and why in this way; with the head sizes of layers that use ``gather`` instead of
    ``ring``."""

    size: int
    method: str
    why: str
    gathered_head_sizes: NotRequired[list[int]]


class HubUpload(TypedDict):
    """The repository that the model was uploaded to, with the URL of the commit or the error."""

    repository: str
    url: str | None
    error: str | None


class Report(_AlwaysReported, total=False):
    """The content of ``report.json``. Figures that were not measured are None. ``communication``,
    ``link`` and ``staleness`` depend on the strategy; ``task``, ``model`` and ``dataset`` are as in
    the config, ``adapter`` is its method or None; ``balance`` has the shares of the ranks;
    ``best`` the best evaluation, if it is selected; ``stop_reason`` why the run ended before its
    last step; ``experts`` the tokens of the experts, if the model has any."""

    task: str
    model: str
    dataset: list[str]
    adapter: str | None
    step_time_s: StepTime
    samples_per_second: float | None
    flops_per_device_s: float | None
    mfu: float | None
    peak: PeakRate | None
    final_eval_metrics: dict[str, float] | None
    communication: dict[str, JsonValue]
    link: dict[str, JsonValue]
    staleness: JsonValue
    workers_lost: list[WorkerLoss]
    skipped_steps: int
    precision: str
    tf32: bool | None
    fp8: str
    balance: dict[str, list[int]]
    compile: dict[str, float]
    best: BestModel
    stop_reason: str
    memory_fallbacks: list[MemoryFallback]
    lm_eval: LmEvalReport
    hub: HubUpload
    packing: PackingFigures
    sources: list[SourceReport]
    context: ContextReport
    experts: ExpertReport


REPORT_KEYS = tuple(_AlwaysReported.__annotations__)
_PREDICTED_KEYS = tuple(Predicted.__annotations__)
#: key → (required keys of its value, allowed keys)
_INNER_KEYS = {
    "state_memory_bytes": (_PREDICTED_KEYS, _PREDICTED_KEYS),
    "traffic_bytes_per_step": (_PREDICTED_KEYS, tuple(PredictedTraffic.__annotations__)),
    "step_time_s": (tuple(StepTime.__annotations__), tuple(StepTime.__annotations__)),
    "data": (("read", "kept", "dropped"), tuple(DataReport.__annotations__)),
}


def check_report(report: Report) -> None:
    """Raise KeyError with all missing and unknown keys if ``report`` does not have the expected
    keys."""
    wrong = _wrong_keys(report, REPORT_KEYS, tuple(Report.__annotations__), "")
    for key, (required, known) in _INNER_KEYS.items():
        inner = report.get(key)
        if isinstance(inner, dict):
            wrong += _wrong_keys(inner, required, known, f"{key}.")
    if wrong:
        raise KeyError("; ".join(wrong))


def _wrong_keys(
    keys: Collection[str], required: tuple[str, ...], known: tuple[str, ...], prefix: str
) -> list[str]:
    missing = [f"missing {prefix}{key}" for key in required if key not in keys]
    return missing + [f"unknown {prefix}{key}" for key in keys if key not in known]
