"""A rank's part of ``paceline verify``: train a few steps under each strategy, one after the other,
and compare the result with the reference.

The first trial is the reference, on one rank. Ranks exchange the results of a trial as files in a
folder, so that no collective waits for a rank that takes no part in it or has failed.
"""

import gc
import json
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.event_log import EventLog
from paceline.core.events import Event
from paceline.core.failures import ExitRecord
from paceline.core.files import write_atomic
from paceline.core.log import log_to_events
from paceline.core.run_dir import RunDir
from paceline.core.stop import StopFlag
from paceline.data.loader import MicroBatch
from paceline.data.progress import ProgressLine
from paceline.distributed.communicator import Communicator, init_communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.models.blocks import DROPOUTS
from paceline.observe.report.certificate import LeftOut
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import memory_bytes
from paceline.parallel.state import TensorShard
from paceline.parallel.strategy import Strategy
from paceline.tasks.base import num_positions, num_targets
from paceline.train.callback_setup import build_loggers
from paceline.train.components import build_components
from paceline.train.reports.figures import with_rows
from paceline.train.run_spec import RunSpec
from paceline.train.setup import build_trainer
from paceline.train.state import RankContext
from paceline.train.trainer import Trainer
from paceline.verify.certificate import RankTrialResult

logger = logging.getLogger(__name__)

_POLL_S = 0.01
#: All ranks refuse an unsupported mode at about the same time. If one rank alone refuses it, the
#: others would wait forever.
_REFUSED_WAIT_S = 20.0
#: Prefix of the masks' names in the file of the reference.
_EXCLUDED = "excluded/"

#: A gradient norm up to this share of the largest tensor's counts as rounding.
GRADIENT_RATIO = 1e-6
#: Largest share of the trained elements that may be excluded.
LARGEST_SHARE = 0.01


@dataclass(frozen=True)
class ModeTrial:
    """A mode to verify: its index, its name, and the spec that trains under it."""

    number: int
    name: str
    spec: RunSpec


@dataclass
class Certification:
    """The work of the ranks after one start.

    Args:
        trials: in this order. Number 0 is the reference, which saves its weights in ``folder``.
        steps: updates of each trial.
        total: number of all trials, including the trials of earlier starts.
        folder: where each rank writes its result of each trial.
    """

    trials: list[ModeTrial]
    steps: int
    total: int
    folder: str

    @property
    def config(self) -> Config:
        return self.trials[0].spec.config


def result_file(folder: str | Path, number: int, rank: int) -> Path:
    return Path(folder) / f"trial-{number}-rank-{rank}.json"


def certify_rank(certification: Certification, env: RankEnv, stop: StopFlag) -> ExitRecord:
    """Run all trials on this rank, and write each result to its :func:`result_file`.

    Raises:
        Exception: a trial failed on this rank; the following trials were not started.
    """
    first = certification.trials[0].spec
    world = init_communicator(env, first.device_type, first.config.parallel.collective_timeout_s)
    try:
        for trial in certification.trials:
            result = _run_trial(certification, trial, world, stop)
            write_atomic(
                result_file(certification.folder, trial.number, env.rank), json.dumps(result)
            )
            if not _wait_for_all(certification, trial, env, result, stop):
                return ExitRecord("stopped")
            if world.is_rank_zero:
                _log(certification, trial, result)
        return ExitRecord("done")
    finally:
        world.close()


def _run_trial(
    certification: Certification, trial: ModeTrial, world: Communicator, stop: StopFlag
) -> RankTrialResult:
    layout = trial.spec.layout
    if world.rank >= layout.num_processes:
        return {"status": "idle"}
    trial_world = Communicator(RankEnv(), world.device, ParallelDims())
    if layout.num_processes > 1:
        trial_world = Communicator(world.env, world.device, layout.axes)
    try:
        return _train(certification, trial, trial_world, stop)
    except ConfigError as error:
        return {"status": "refused", "reason": error.paragraph()}
    finally:
        gc.collect()
        if world.device.type != "cpu":
            torch.accelerator.memory.empty_cache()


def _train(
    certification: Certification, trial: ModeTrial, world: Communicator, stop: StopFlag
) -> RankTrialResult:
    logged: list[Event] = []
    events = EventLog(None, [logged.append])
    with log_to_events(events):
        components, data, notices = build_components(trial.spec, world, adjust=turn_off_dropout)
        run_dir = RunDir(Path(trial.spec.config.output_dir))  # nothing is written there
        ctx = RankContext(components.strategy.world, run_dir, events, stop)
        trainer = build_trainer(trial.spec, ctx, components, data, notices, callbacks=build_loggers)
        strategy, positions, labels = trainer.strategy, list[float](), list[float]()
        rows = list[list[tuple[int, ...]]]()
        divides_rows = world.axes.context > 1

        def count(batches: Sequence[MicroBatch]) -> None:
            positions.append(statistics.fmean(num_positions(batch.data) for batch in batches))
            labels.append(statistics.fmean(num_targets(batch.data) for batch in batches))
            rows.append([batch.data["segment_lengths"] for batch in batches if divides_rows])

        trainer.data.observers.append(count)
        components.model.train()
        watch = GradientWatch(strategy) if trial.number == 0 else None
        is_complete = _train_steps(trainer, certification, trial, shows_progress=world.is_rank_zero)
        if not is_complete:
            return {"status": "stopped"}
        trainer.callbacks.before_pause(trainer.state)  # the figures of the last step
    steps = [event for event in logged if event["type"] == "step"]
    assert len(steps) == certification.steps
    # the cost of the batches that this rank's replica had, on average after the first step
    work = Workload(
        trial.spec.derived.gradient_accumulation_steps,
        statistics.fmean(_after_first(positions)),
        labels=statistics.fmean(_after_first(labels)),
        exchanged_rows=strategy.exchanged_rows(),
    )
    work = with_rows(
        work, components.task, world.axes, [row for step in _after_first(rows) for row in step]
    )
    layout = trial.spec.layout
    cost = estimate_cost(layout.strategy, components.shape, layout.axes, work, trial.spec.config)
    reference = Path(certification.folder) / "reference.safetensors"
    excluded = {} if watch is None else watch.negligible()
    if trial.number == 0:
        save_reference(strategy, reference, {name: mask for name, (_, mask) in excluded.items()})
    return {
        "status": "done",
        "losses": [float(event["loss"]) for event in steps],
        "step_time_s": statistics.median(
            _after_first([float(event["step_time_s"]) for event in steps])
        ),
        "state_predicted": cost.state,
        "state_measured": memory_bytes(strategy),
        "traffic_predicted": cost.traffic_per_step,
        "traffic_measured": statistics.fmean(_after_first(trainer.metrics.traffic_per_step)),
        "weights": distances(strategy, reference),
        "excluded": excluded_report(excluded),
        "notices": [
            event["text"]
            for event in logged
            if event["type"] == "notice" and event["level"] == "warning"
        ],
    }


def _train_steps(
    trainer: Trainer, certification: Certification, trial: ModeTrial, *, shows_progress: bool
) -> bool:
    """Return whether all steps were made."""
    progress = ProgressLine()
    prefix, total = f"[{trial.number + 1}/{certification.total}] {trial.name}", certification.steps
    try:
        for number in range(total):
            if trainer.run_step().stop or trainer.anomalies.is_exhausted:
                return False
            if number == 0:
                trainer.strategy.exchanged_rows()
            if shows_progress:
                progress.show(partial("{}: step {}/{}".format, prefix, number + 1, total))
    finally:
        progress.clear()
    return True


def _after_first(values: list[Any]) -> list[Any]:
    """Drop the first step, in which persistent buffers are allocated."""
    return values[1:] or values


def turn_off_dropout(model: nn.Module) -> int:
    """Set every float attribute of a module (and of its Hugging Face config) whose name contains
    "drop" to 0. Return the number of changed attributes."""
    changed = 0
    for module in model.modules():
        holders = [vars(module)]
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__"):
            holders.append(vars(config))
        for holder in holders:
            for name, value in list(holder.items()):
                is_dropout = "drop" in name.lower() or (
                    name == "p" and isinstance(module, DROPOUTS)
                )
                if is_dropout and isinstance(value, float) and value:
                    holder[name] = 0.0
                    changed += 1
    return changed


# -- weights
class GradientWatch:
    """Watch the gradients of a strategy that has all of them on one rank, to find those that are
    only rounding errors: their weights are not compared.

    A bias that is added to all keys shifts every attention score of a query by the same amount, so
    its gradient is 0 (under rotary embedding, for the dimensions without it). In floating point it
    is not exactly 0, and AdamW divides it by its own size: rounding errors, which differ between
    strategies, become updates as large as any other.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._parameters = {
            shard.name: shard.key for shard in strategy.tensor_shards() if shard.key is not None
        }
        #: the largest ratio of each tensor so far, and of each element of one-dimensional tensors
        self._tensors: dict[str, float] = {}
        self._elements: dict[str, torch.Tensor] = {}
        self._clip = strategy.clip_grad_norm
        strategy.clip_grad_norm = self._observe_and_clip  # type: ignore[method-assign]

    def _observe_and_clip(self, max_norm: float) -> torch.Tensor:
        self._observe()
        return self._clip(max_norm)

    @torch.no_grad()
    def _observe(self) -> None:
        gradients = {
            name: parameter.grad.float()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        norms = {name: float(gradient.norm()) for name, gradient in gradients.items()}
        largest = max(norms.values(), default=0.0)
        if not math.isfinite(largest) or largest == 0:
            return  # an update that is skipped
        for name, norm in norms.items():
            self._tensors[name] = max(self._tensors.get(name, 0.0), norm / largest)
            if gradients[name].dim() == 1:
                ratios = gradients[name].abs() / largest
                before = self._elements.get(name)
                self._elements[name] = ratios if before is None else torch.maximum(before, ratios)

    def negligible(self) -> dict[str, tuple[float, torch.Tensor]]:
        """Return for each parameter with excluded elements the largest ratio of these elements, and
        a mask that is true for them, the smallest ratio first.

        Tensors are excluded whose gradient norm stayed below :data:`GRADIENT_RATIO` times the
        largest tensor's in every step. Single elements of one-dimensional tensors are
        excluded too, if a whole tensor of such elements would have stayed below it.
        """
        negligible: dict[str, tuple[float, torch.Tensor]] = {}
        for name, ratio in self._tensors.items():
            parameter = self._parameters[name]
            if 0 < ratio < GRADIENT_RATIO:
                negligible[name] = ratio, torch.ones(parameter.shape, dtype=torch.bool)
            elif name in self._elements and ratio:
                elements = self._elements[name].cpu()
                mask = elements < GRADIENT_RATIO / math.sqrt(elements.numel())
                # exact zeros are zeros under every strategy
                if bool((elements[mask] > 0).any()):
                    negligible[name] = float(elements[mask].norm()), mask
        limit = LARGEST_SHARE * sum(parameter.numel() for parameter in self._parameters.values())
        excluded, total = {}, 0
        for name, (ratio, mask) in sorted(negligible.items(), key=lambda entry: entry[1][0]):
            total += int(mask.sum())
            if total > limit:
                break
            excluded[name] = ratio, mask
        return excluded


def excluded_report(excluded: dict[str, tuple[float, torch.Tensor]]) -> list[LeftOut]:
    """Return the excluded elements for the certificate: ``{name, gradient_ratio, elements,
    of}``."""
    return [
        {"name": name, "gradient_ratio": ratio, "elements": int(mask.sum()), "of": mask.numel()}
        for name, (ratio, mask) in excluded.items()
    ]


def _trained_shards(strategy: Strategy) -> list[TensorShard]:
    """Return the shards of the parameters. Running statistics are not compared: under data
    parallelism they describe rank 0's batches."""
    return [shard for shard in strategy.state_shards() if shard.name.startswith("model/")]


def save_reference(strategy: Strategy, path: Path, excluded: Mapping[str, torch.Tensor]) -> None:
    """Write the full trained weights of a strategy that holds them on one rank, and masks of the
    elements that are not compared, by the name of the parameter."""
    from safetensors.torch import save_file

    weights = {
        shard.name: shard.tensor.detach().cpu().contiguous().clone()
        for shard in _trained_shards(strategy)
    }
    masks = {f"{_EXCLUDED}model/{name}": mask.to(torch.uint8) for name, mask in excluded.items()}
    save_file({**weights, **masks}, str(path))


def distances(strategy: Strategy, path: Path) -> dict[str, list[float]]:
    """Compare this rank's shards of the trained weights with the reference.

    Returns:
        For every tensor of the reference: the sum of squared differences, the number of elements of
        this rank, the squared norm of the reference's tensor, its number of elements, and how many
        of these are compared. The first and the third are over compared elements."""
    from safetensors import safe_open

    shards: dict[str, list[TensorShard]] = {}
    for shard in _trained_shards(strategy):
        shards.setdefault(shard.name, []).append(shard)
    sums = {}
    with safe_open(str(path), framework="pt") as reference:
        keys = set(reference.keys())
        names = [name for name in reference.keys() if not name.startswith(_EXCLUDED)]  # noqa: SIM118 - not a mapping
        unknown = sorted(set(shards) - set(names))
        if unknown:
            raise RunError(
                "the strategy's state has weights that the reference lacks: {unknown}",
                code="unknown-weights-in-strategy",
                unknown=", ".join(unknown[:5]),
            )
        for name in names:
            full = reference.get_tensor(name)
            compared = torch.ones(full.shape, dtype=torch.uint8)
            if _EXCLUDED + name in keys:
                compared -= reference.get_tensor(_EXCLUDED + name)
            difference, num_elements = 0.0, 0
            for shard in shards.get(name, []):
                change = shard.tensor.cpu().double() - _slice(full, shard).double()
                difference += _sum_of_squares(change * _slice(compared, shard))
                num_elements += shard.tensor.numel()
            sums[name] = [
                difference,
                num_elements,
                _sum_of_squares(full * compared),
                full.numel(),
                int(compared.sum()),
            ]
    return sums


def _sum_of_squares(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def _slice(full: torch.Tensor, shard: TensorShard) -> torch.Tensor:
    """Return the part of a full tensor that corresponds to a shard."""
    if tuple(full.shape) != tuple(shard.shape):
        raise RunError(
            "{shard} has the shape {shape}, but {expected} in the reference",
            code="shard-shape-mismatch",
            shard=shard.name,
            shape=tuple(shard.shape),
            expected=tuple(full.shape),
        )
    if shard.flat:
        start = shard.offset[0]
        return full.reshape(-1)[start : start + shard.tensor.numel()].view(shard.tensor.shape)
    box = tuple(
        slice(start, start + size)
        for start, size in zip(shard.offset, shard.tensor.shape, strict=True)
    )
    return full[box]


# -- among the ranks
def _wait_for_all(
    certification: Certification,
    trial: ModeTrial,
    env: RankEnv,
    result: RankTrialResult,
    stop: StopFlag,
) -> bool:
    """Wait until every rank has written its result of the trial. Return False if the ranks were
    requested to stop."""
    waiting = [
        result_file(certification.folder, trial.number, rank) for rank in range(env.world_size)
    ]
    start = time.monotonic()
    while True:
        if result["status"] == "stopped" or (result["status"] == "idle" and stop.wanted):
            return False
        waiting = [path for path in waiting if not path.exists()]
        if not waiting:
            return not stop.wanted
        if result["status"] == "refused" and time.monotonic() - start > _REFUSED_WAIT_S:
            raise RunError(
                "rank {rank} refused a mode that the other ranks started: {reason}",
                code="mode-refused-by-rank",
                rank=env.rank,
                reason=result["reason"],
            )
        time.sleep(_POLL_S)


def _log(certification: Certification, trial: ModeTrial, result: RankTrialResult) -> None:
    text = "refused"
    if result["status"] == "done":
        text = (
            f"{certification.steps} steps, loss {result['losses'][-1]:.6g},"
            f" {result['step_time_s']:.3g} s per step"
        )
    logger.info("[%d/%d] %s: %s", trial.number + 1, certification.total, trial.name, text)
