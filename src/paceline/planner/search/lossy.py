"""Settings that make a step faster or smaller and change the result: they are proposed, and taken
only with ``parallel.allow_lossy``. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.models.transforms.float8_check import check_float8
from paceline.parallel.registry import ParallelLayout
from paceline.planner.search.search import Candidate, Objective, SearchResult, search
from paceline.planner.search.trials import Settings, Trials, with_settings

#: A proposal must improve the objective by this share.
_MINIMUM_GAIN = 0.05


@dataclass(frozen=True)
class Proposal:
    """A set-up with another result.

    Args:
        effect: what it does to the result.
    """

    candidate: Candidate
    settings: Settings
    effect: str


def variants(config: Config, trials: Trials, *, installed: bool) -> Iterator[tuple[Settings, str]]:
    """Yield settings that the config leaves open, each with its effect on the result.

    Args:
        installed: whether required packages must be installed.
    """
    args, machine = config.train_args, trials.machine
    device = machine.device
    is_full = config.task in CAUSAL_TASKS and not config.lora.enable
    if is_full and device is not None and args.precision == "bf16-mixed":
        if "precision" not in args.model_fields_set:
            yield (
                {"train_args.precision": "bf16-true"},
                UserText(
                    "weights, gradients and optimizer state are rounded to bfloat16",
                    code="weights-rounded",
                ),
            )
        if "fp8" not in args.model_fields_set and device.float8_speedup > 1:
            settings = {"train_args.fp8": "rowwise"}
            changed = with_settings(config, settings)
            try:
                check_float8(changed, "cuda", device.compute_capability, installed=installed)
            except ConfigError:
                pass
            else:
                effect = UserText(
                    "inputs of the blocks' linear layers are rounded to float8",
                    code="inputs-rounded",
                )
                yield settings, effect
    if machine.count > 1 and "method" not in config.compression.model_fields_set:
        for method in ("bf16", "int8"):
            yield (
                {"compression.method": method},
                UserText(
                    "gradients are rounded to {method} for the all-reduce",
                    code="gradients-rounded",
                    method=method,
                ),
            )


def proposals(
    trials: Trials,
    layouts: list[ParallelLayout],
    chosen: Candidate | None,
    objective: Objective,
    *,
    installed: bool,
) -> list[Proposal]:
    """Return what would be better with another result, the best first.

    If nothing fits as it is, all layouts are searched, else the chosen one and `ddp`.
    """
    if chosen is not None:
        layouts = [each for each in layouts if each in (chosen.mode.layout, _ddp(layouts))]
    result = []
    for settings, effect in variants(trials.config, trials, installed=installed):
        searched = search_variant(trials, layouts, objective, settings)
        best = searched.chosen(objective)
        if best is None:
            continue
        limit = float("inf") if chosen is None else chosen.value(objective) * (1 - _MINIMUM_GAIN)
        if best.value(objective) <= limit:
            result.append(Proposal(best, settings, effect))
    return sorted(result, key=lambda each: each.candidate.value(objective))


def search_variant(
    trials: Trials, layouts: list[ParallelLayout], objective: Objective, settings: Settings
) -> SearchResult:
    """Search with these settings, which are part of the candidates."""
    changed = trials.with_config(with_settings(trials.config, settings))
    searched = search(changed, layouts, objective)
    fitting = [replace(each, settings={**each.settings, **settings}) for each in searched.fitting]
    return replace(searched, fitting=fitting)


def _ddp(layouts: list[ParallelLayout]) -> ParallelLayout | None:
    return next((each for each in layouts if each.strategy == "ddp"), None)
