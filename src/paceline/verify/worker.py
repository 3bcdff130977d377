"""A few steps under each strategy on the same ranks, one after the other, and how far each ends
from the reference: a rank's part of ``paceline verify``.

The first trial is the reference, on one rank. Ranks tell each other what came of a trial by files
in a folder, so that no collective waits for a rank that has none to take part in, or that has
failed.
"""

import gc
import json
import logging
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.event_log import EventLog
from paceline.core.events import Event
from paceline.core.files import write_atomic
from paceline.core.log import log_to_events
from paceline.core.outcome import Outcome
from paceline.core.run_dir import RunDir
from paceline.core.stop import StopFlag
from paceline.data.loader import MicroBatch
from paceline.distributed.communicator import Communicator, init_communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.models.blocks import DROPOUTS
from paceline.observe.report.certificate import LeftOut
from paceline.parallel.base import Strategy
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import memory_bytes, state_shards
from paceline.parallel.state import TensorShard
from paceline.tasks.base import num_positions
from paceline.train.run_spec import RunSpec
from paceline.train.setup import build_components, build_trainer
from paceline.train.state import RankContext
from paceline.verify.certificate import RankResult

logger = logging.getLogger(__name__)

_POLL_S = 0.01
# A mode that is refused is refused on all its ranks at about the same time. Where one alone
# refuses, the others wait for it in vain.
_REFUSED_WAIT_S = 20.0
_EXCLUDED = "excluded/"  # before the names of masks in the file of the reference

#: Largest share of the largest tensor's gradient norm that counts as rounding.
GRADIENT_RATIO = 1e-6
#: Largest share of the trained elements that may be left out.
LARGEST_SHARE = 0.01


@dataclass(frozen=True)
class Trial:
    """A mode to be tried: its number among all, its name, and the spec that trains under it."""

    number: int
    name: str
    spec: RunSpec


@dataclass
class Certification:
    """What one start of the ranks shall do.

    Args:
        trials: in this order; number 0 is the reference, whose weights then stand in ``folder``.
        steps: updates under each.
        total: number of all trials, of other starts too.
        folder: where each rank leaves its figures of each trial.
    """

    trials: list[Trial]
    steps: int
    total: int
    folder: str

    @property
    def config(self) -> Config:
        return self.trials[0].spec.config


def result_file(folder: str | Path, number: int, rank: int) -> Path:
    return Path(folder) / f"trial-{number}-rank-{rank}.json"


def certify_rank(certification: Certification, env: RankEnv, stop: StopFlag) -> Outcome:
    """Run all trials on this rank. What a trial gave stands in its file (see :func:`result_file`):
    ``status`` done | refused | idle (a rank that has no part in it), and the figures.

    Raises:
        Exception: a trial failed on this rank; the trials after it were not begun.
    """
    first = certification.trials[0].spec
    world = init_communicator(env, first.device_type, first.config.parallel.collective_timeout_s)
    try:
        for trial in certification.trials:
            result = _one_trial(certification, trial, world, stop)
            write_atomic(
                result_file(certification.folder, trial.number, env.rank), json.dumps(result)
            )
            if not _all_have_done(certification, trial, env, result, stop):
                return {"status": "stopped", "report": None}
            if world.is_rank_zero:
                _log(certification, trial, result)
        return {"status": "done", "report": None}
    finally:
        world.close()


def _one_trial(
    certification: Certification, trial: Trial, world: Communicator, stop: StopFlag
) -> RankResult:
    layout = trial.spec.layout
    if world.rank >= layout.num_processes:
        return {"status": "idle"}
    alone = layout.num_processes == 1
    env = RankEnv() if alone else world.env
    try:
        return _train(
            certification,
            trial,
            Communicator(env, world.device, ParallelDims() if alone else layout.axes),
            stop,
        )
    except ConfigError as error:
        return {"status": "refused", "reason": error.paragraph()}
    finally:
        gc.collect()
        if world.device.type != "cpu":
            torch.accelerator.memory.empty_cache()


def _train(
    certification: Certification, trial: Trial, world: Communicator, stop: StopFlag
) -> RankResult:
    heard: list[Event] = []
    events = EventLog(None, [heard.append])
    with log_to_events(events):
        components, data, notices = build_components(trial.spec, world, adjust=turn_off_dropout)
        run_dir = RunDir(Path(trial.spec.config.output_dir))  # of no run: nothing is written there
        ctx = RankContext(components.strategy.world, run_dir, events, stop)
        trainer = build_trainer(trial.spec, ctx, components, data, notices)
        strategy, positions = trainer.strategy, list[float]()
        trainer.data.observers.append(lambda batches: positions.append(_mean_positions(batches)))
        components.model.train()
        watch = GradientWatch(strategy) if trial.number == 0 else None
        for _ in range(certification.steps):
            if trainer.run_step().stop or trainer.anomalies.is_exhausted:
                return {"status": "stopped"}
    steps = [event for event in heard if event["type"] == "step"]
    # for the batches that this rank's replica really had: means over the steps after the first
    work = Workload(
        trial.spec.derived.gradient_accumulation_steps, statistics.fmean(_after_first(positions))
    )
    axes = trial.spec.layout.axes
    cost = estimate_cost(
        trial.spec.layout.strategy, components.shape, axes, work, trial.spec.config
    )
    reference = Path(certification.folder) / "reference.safetensors"
    left_out = {} if watch is None else watch.negligible()
    if trial.number == 0:
        save_reference(strategy, reference, {name: mask for name, (_, mask) in left_out.items()})
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
        "excluded": listing(left_out),
        "notices": [
            event["text"]
            for event in heard
            if event["type"] == "notice" and event["level"] == "warning"
        ],
    }


def _after_first(values: list[Any]) -> list[Any]:
    """Without the first step, in which lasting buffers are made."""
    return values[1:] or values


def _mean_positions(micro_batches: list[MicroBatch]) -> float:
    return statistics.fmean(num_positions(batch.data) for batch in micro_batches)


def turn_off_dropout(model: nn.Module) -> int:
    """Set every number of a module (and of its Hugging Face config) whose name speaks of dropout to
    0. Returns how many were not."""
    changed = 0
    for module in model.modules():
        holders = [vars(module)] + [
            vars(config)
            for config in (getattr(module, "config", None),)
            if hasattr(config, "__dict__")
        ]
        dropout = isinstance(module, DROPOUTS)
        for holder in holders:
            for name, value in list(holder.items()):
                if (
                    isinstance(value, float)
                    and value
                    and ("drop" in name.lower() or (dropout and name == "p"))
                ):
                    holder[name] = 0.0
                    changed += 1
    return changed


# -- weights
class GradientWatch:
    """Follows the gradients of a strategy that has them whole on one rank, step by step, to find
    those that are nothing but rounding: their weights are not compared.

    A bias that is added to all keys alike shifts every attention score of a query by the same
    amount, so its gradient is 0 (under rotary embedding, that of the dimensions without it). In
    floating point it is not exactly 0, and AdamW divides it by its own size: rounding errors, which
    differ between strategies, become steps as large as any other.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._parameters = {
            part.name: part.key for part in strategy.tensor_shards() if part.key is not None
        }
        self._tensors: dict[str, float] = {}  # largest ratio of each tensor so far
        # the same for each element of a tensor with one dimension
        self._elements: dict[str, torch.Tensor] = {}
        self._clip = strategy.clip_grad_norm
        strategy.clip_grad_norm = self._noting_clip  # type: ignore[method-assign]

    def _noting_clip(self, max_norm: float) -> torch.Tensor:
        self._note()
        return self._clip(max_norm)

    @torch.no_grad()
    def _note(self) -> None:
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
        """Name of a parameter → (the largest ratio of what is left out of it, a mask that is true
        there), the smallest first.

        Left out are tensors whose gradient norm stayed below :data:`GRADIENT_RATIO` times the
        largest tensor's in every step, and of tensors with one dimension also single elements:
        those of which a whole tensor would have stayed below it.
        """
        negligible: dict[str, tuple[float, torch.Tensor]] = {}
        for name, ratio in self._tensors.items():
            parameter = self._parameters[name]
            if 0 < ratio < GRADIENT_RATIO:
                negligible[name] = ratio, torch.ones(parameter.shape, dtype=torch.bool)
            elif name in self._elements and ratio:
                elements = self._elements[name].cpu()
                mask = elements < GRADIENT_RATIO / math.sqrt(elements.numel())
                # exact zeros alone are zeros under every strategy
                if bool((elements[mask] > 0).any()):
                    negligible[name] = float(elements[mask].norm()), mask
        most = LARGEST_SHARE * sum(parameter.numel() for parameter in self._parameters.values())
        kept, total = {}, 0
        for name, (ratio, mask) in sorted(negligible.items(), key=lambda entry: entry[1][0]):
            total += int(mask.sum())
            if total > most:
                break
            kept[name] = ratio, mask
        return kept


def listing(negligible: dict[str, tuple[float, torch.Tensor]]) -> list[LeftOut]:
    """For the certificate: ``{name, gradient_ratio, elements, of}``."""
    return [
        {"name": name, "gradient_ratio": ratio, "elements": int(mask.sum()), "of": mask.numel()}
        for name, (ratio, mask) in negligible.items()
    ]


def _trained_parts(strategy: Strategy) -> list[TensorShard]:
    """Running statistics are left out: under data parallelism they are those of rank 0's share, by
    definition."""
    return [part for part in state_shards(strategy) if part.name.startswith("model/")]


def save_reference(
    strategy: Strategy, path: Path, excluded: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the whole trained weights of a strategy that holds them on one rank, and which elements
    are not compared: masks, by the name of the parameter."""
    from safetensors.torch import save_file

    weights = {
        part.name: part.tensor.detach().cpu().contiguous().clone()
        for part in _trained_parts(strategy)
    }
    masks = {
        f"{_EXCLUDED}model/{name}": mask.to(torch.uint8) for name, mask in (excluded or {}).items()
    }
    save_file({**weights, **masks}, str(path))


def distances(strategy: Strategy, path: Path) -> dict[str, list[float]]:
    """How far this rank's own parts of the trained weights lie from the reference's: {name: [sum of
    squared differences, elements, squared norm of the reference's whole tensor, its elements, those
    of them that are compared]}, for every tensor of the reference. The first and the third are
    taken over compared elements."""
    from safetensors import safe_open

    mine: dict[str, list[TensorShard]] = {}
    for part in _trained_parts(strategy):
        mine.setdefault(part.name, []).append(part)
    sums = {}
    with safe_open(str(path), framework="pt") as reference:
        keys = set(reference.keys())
        names = [name for name in reference.keys() if not name.startswith(_EXCLUDED)]  # noqa: SIM118 - not a mapping
        unknown = sorted(set(mine) - set(names))
        if unknown:
            raise RunError(
                "the strategy's state has weights that the reference has not:"
                f" {', '.join(unknown[:5])}"
            )
        for name in names:
            whole = reference.get_tensor(name)
            compared = (
                1 - reference.get_tensor(_EXCLUDED + name) if _EXCLUDED + name in keys else None
            )
            counted = whole.numel() if compared is None else int(compared.sum())
            numbers = [
                0.0,
                0.0,
                _squares(whole if compared is None else whole * compared),
                float(whole.numel()),
                float(counted),
            ]
            for part in mine.get(name, []):
                apart = part.tensor.cpu().double() - _cut(whole, part).double()
                numbers[0] += _squares(apart if compared is None else apart * _cut(compared, part))
                numbers[1] += part.tensor.numel()
            sums[name] = numbers
    return sums


def _squares(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def _cut(whole: torch.Tensor, part: TensorShard) -> torch.Tensor:
    if tuple(whole.shape) != tuple(part.shape):
        raise RunError(
            f"{part.name} has the shape {tuple(part.shape)}, and {tuple(whole.shape)} in the"
            " reference"
        )
    if part.flat:
        return whole.reshape(-1)[part.offset[0] : part.offset[0] + part.tensor.numel()].view(
            part.tensor.shape
        )
    box = tuple(
        slice(start, start + size)
        for start, size in zip(part.offset, part.tensor.shape, strict=True)
    )
    return whole[box]


# -- among the ranks
def _all_have_done(
    certification: Certification, trial: Trial, env: RankEnv, result: RankResult, stop: StopFlag
) -> bool:
    """Wait until every rank has left its figures of the trial. False where the ranks are asked to
    stop."""
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
                f"rank {env.rank} refused what the other ranks had begun: {result['reason']}"
            )
        time.sleep(_POLL_S)


def _log(certification: Certification, trial: Trial, result: RankResult) -> None:
    text = "refused"
    if result["status"] == "done":
        text = (
            f"{certification.steps} steps, loss {result['losses'][-1]:.6g},"
            f" {result['step_time_s']:.3g} s a step"
        )
    logger.info("[%d/%d] %s: %s", trial.number + 1, certification.total, trial.name, text)
