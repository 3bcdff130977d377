"""Compare the losses of each config on the device with the losses of a float32 run on the CPU."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases import Case, Section
from configs import FLOAT32, complete
from context import Context
from training import train

#: Simulated ranks share two cores, and the first run of a process is slow.
LIMIT_S = 60.0


def one_rank_section(prepared: Path, is_simulated: bool) -> Section:
    section = _section("losses", 130, prepared, is_simulated, several=False)
    repeated = Case("reference on this CPU", "sections.losses:repeat_reference", limit_s=LIMIT_S)
    return replace(section, cases=[repeated, *section.cases])


def several_ranks_section(prepared: Path, is_simulated: bool) -> Section:
    return _section("ranks", 150, prepared, is_simulated, several=True)


def _section(
    name: str, limit_s: float, prepared: Path, is_simulated: bool, *, several: bool
) -> Section:
    trainings = json.loads((prepared / "configs.json").read_text())
    cases = [
        Case(
            each["name"],
            "sections.losses:compare",
            {"training": each},
            num_ranks=each["num_ranks"],
            limit_s=LIMIT_S,
            why_skipped=_why_skipped(each, is_simulated),
        )
        for each in trainings
        if (each["num_ranks"] > 1) == several
    ]
    return Section(name, limit_s, cases)


def _why_skipped(training: dict[str, Any], is_simulated: bool) -> str:
    if is_simulated and training["needs_gpu"]:
        return f"needs a GPU: {training['needs_gpu']}"
    return ""


def compare(context: Context, training: dict[str, Any], port: int | None = None) -> dict[str, Any]:
    """Train with the config, and compare the loss of each step with the reference."""
    context.needs_packages(training["packages"])
    if not context.is_simulated:
        context.needs_capability(*training["capability"], training["name"])
    # The last averaging of a delayed exchange ends with the save after training.
    is_delayed = "local_sgd.fragment_sync_delay" in training["settings"]
    run = train(context, "run", training["complete"], port=port, saves_state=is_delayed)
    if context.rank > 0:
        return {}
    reference = json.loads((context.prepared / "references.json").read_text())
    expected = reference[training["reference_key"]]["losses"]
    losses = run.losses
    if run.report["device"] != "cuda" or run.report["world_size"] != context.num_ranks:
        raise AssertionError(f"ran on {run.report['world_size']} × {run.report['device']}")
    return {
        "largest_difference": check_losses(losses, expected, training["tolerance"]),
        "tolerance": training["tolerance"],
        "losses": losses,
        "seconds_per_step": run.events("step")[-1]["step_time_s"],
    }


def check_losses(losses: list[float], expected: list[float], tolerance: float) -> float:
    """Return the largest relative difference of a loss; raise if it is above the tolerance, or if
    a loss is missing or not a number."""
    if len(losses) != len(expected):
        raise AssertionError(f"{len(losses)} losses instead of {len(expected)}")
    differences = [abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True)]
    if not all(difference <= tolerance for difference in differences):
        shown = [[round(loss, 5), round(other, 5)] for loss, other in zip(losses, expected)]  # noqa: B905
        raise AssertionError(
            f"a loss differs from the CPU's by more than {tolerance:g}: [loss, on the CPU] of each"
            f" step: {shown}"
        )
    return max(differences)


def repeat_reference(context: Context) -> dict[str, Any]:
    """Train the reference of most configs again, on the CPU of this machine. Its digest is the
    prepared one if the machine has the same release of torch and the same kind of CPU; its losses
    must agree in any case, or the device is compared with something else."""
    known = json.loads((context.prepared / "references.json").read_text())
    trainings = json.loads((context.prepared / "configs.json").read_text())
    plain = next(each for each in trainings if not each["reference"])
    expected = known[plain["reference_key"]]
    result = record(context, complete(plain["reference"], 1))
    return {
        "largest_difference": check_losses(result["losses"], expected["losses"], FLOAT32),
        "has_same_digest": result["digest"] == expected["digest"],
        "torch": result["torch"],
        "torch_of_reference": expected["torch"],
    }


def record(context: Context, settings: dict[str, Any], port: int | None = None) -> dict[str, Any]:
    """Train a reference on the CPU; return its losses and the digest of its weights."""
    run = train(context, "run", settings, device="cpu", port=port, saves_state=True)
    if context.rank > 0:
        return {}
    if len(run.losses) != settings["max_steps"]:
        raise AssertionError(f"{len(run.losses)} losses of {settings['max_steps']} steps")
    return {"losses": run.losses, "digest": run.digest(), "torch": version("torch")}
