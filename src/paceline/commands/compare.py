"""`paceline compare`: whether two runs trained the same."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from paceline.commands.options import AnyPath, Number, OptionParser
from paceline.core.errors import EXIT_DONE, EXIT_FAILED, ConfigError, RunError
from paceline.core.formatting import counted, loss

if TYPE_CHECKING:
    from pydantic import JsonValue

#: The largest relative difference of float32 losses that reordered sums explain in a short run.
_TOLERANCE = 1e-6


class ChangedKey(TypedDict):
    """A key in which the configs differ."""

    key: str
    a: JsonValue
    b: JsonValue


class ModelDigests(TypedDict):
    """Digests of the weights in the latest checkpoints; None without a checkpoint. ``equal`` is
    None if one is missing."""

    a: str | None
    b: str | None
    equal: bool | None


class RunComparison(TypedDict):
    """How two runs differ.

    Args:
        steps: number of steps that both runs have logged.
        loss_max_rel_diff: largest |a − b| / max(|a|, |b|) of the losses of a step; None if it is
            not finite.
        first_differing_step: first step whose losses differ by more than the tolerance, or None.
    """

    steps: int
    loss_max_rel_diff: float | None
    first_differing_step: int | None
    config: list[ChangedKey]
    model_digest: ModelDigests


def add_arguments(parser: OptionParser) -> None:
    parser.add_option("a", AnyPath("its output_dir"), "A", "run")
    parser.add_option("b", AnyPath("its output_dir"), "B", "other run")
    parser.add_option(
        "--tolerance",
        Number("a number from 0 on", (0.0, math.inf)),
        "X",
        "relative difference up to which losses count as equal",
        default=_TOLERANCE,
    )
    parser.example = "paceline compare output/ddp output/zero2"


def run(args: Namespace) -> int:
    """Compare losses, configs and weights. Exit code 1: losses differ by more than the
    tolerance."""
    losses = [_read_losses(folder) for folder in (args.a, args.b)]
    steps = sorted(losses[0].keys() & losses[1].keys())
    if not steps:
        raise ConfigError(
            "{a} and {b} have no step in common",
            code="no-common-step",
            fix="compare runs that have logged the same steps (`train_args.logging_steps`)",
            a=args.a,
            b=args.b,
        )
    differences = {step: _relative_difference(*(each[step] for each in losses)) for step in steps}
    largest = max(differences.values())
    differing = [step for step, difference in differences.items() if difference > args.tolerance]
    comparison: RunComparison = {
        "steps": len(steps),
        "loss_max_rel_diff": largest if math.isfinite(largest) else None,
        "first_differing_step": differing[0] if differing else None,
        "config": _compare_configs(args.a, args.b),
        "model_digest": _compare_models(args.a, args.b),
    }
    if args.json:
        print(json.dumps(comparison, indent=2))
    else:
        _print(comparison, args.tolerance, losses)
    return EXIT_FAILED if differing else EXIT_DONE


def _read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step that counts: of a step that was repeated, the last one."""
    from paceline.core.event_log import effective_steps, read_events
    from paceline.core.run_dir import RunDir

    if not RunDir(folder).events.is_file():
        raise ConfigError(
            "{folder} is not the folder of a run: it has no events.jsonl",
            code="not-a-run",
            fix="check the path",
            folder=folder,
        )
    steps = effective_steps(read_events(RunDir(folder).events))
    return {step["step"]: float(step["loss"]) for step in steps if step.get("loss") is not None}


def _relative_difference(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    difference = abs(a - b) / max(abs(a), abs(b))
    return difference if math.isfinite(difference) else math.inf


def _compare_configs(a: Path, b: Path) -> list[ChangedKey]:
    """Return the keys in which the configs differ, without the output folder."""
    from paceline.config.load import diff_configs, load_config
    from paceline.core.run_dir import RunDir

    configs = [load_config(RunDir(folder).config).config for folder in (a, b)]
    return [
        {"key": key, "a": old, "b": new}
        for key, old, new in diff_configs(*configs)
        if key != "output_dir"
    ]


def _compare_models(a: Path, b: Path) -> ModelDigests:
    first, second = _read_digest(a), _read_digest(b)
    is_known = first is not None and second is not None
    return {"a": first, "b": second, "equal": first == second if is_known else None}


def _read_digest(folder: Path) -> str | None:
    from paceline.checkpoint import store

    try:
        return store.inspect(store.find(folder))["model_digest"]
    except (ConfigError, RunError):
        return None


def _print(comparison: RunComparison, tolerance: float, losses: list[dict[int, float]]) -> None:
    print(f"steps         {counted(comparison['steps'], 'step')} in both runs")
    largest = comparison["loss_max_rel_diff"]
    bound = "not finite" if largest is None else f"{largest:.2g}"
    print(f"losses        {'equal' if largest == 0 else f'largest relative difference: {bound}'}")
    step = comparison["first_differing_step"]
    if step is not None:
        a, b = (loss(each[step]) for each in losses)
        print(f"              by more than {tolerance:g} from step {step} on: {a} and {b}")
    digests = comparison["model_digest"]
    texts = {
        True: "equal bit for bit",
        False: "not equal bit for bit",
        None: "unknown: a run has no checkpoint",
    }
    print(f"weights       {texts[digests['equal']]}")
    for change in comparison["config"]:
        print(f"config        {change['key']}: {change['a']!r} and {change['b']!r}")
    if not comparison["config"]:
        print("config        the same")
