"""Simulate ranks of a planned run in processes of their own. Imports no torch."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted, rank_names
from paceline.core.texts import UserText
from paceline.distributed.devices import cpu_cores
from paceline.models.kinds import reads_images
from paceline.parallel.registry import ParallelLayout
from paceline.planner.api import Plan
from paceline.planner.estimate import ModeEstimate
from paceline.planner.machine.hardware import Machine
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch
from paceline.planner.search.trials import with_settings
from paceline.simulation.records import (
    RankJob,
    RankReport,
    SimulatedPart,
    SimulatedRankResult,
    SimulationReport,
    verdict_of,
)

logger = logging.getLogger(__name__)

#: Environment variable with the Python interpreter of an environment with the CPU build of torch.
PYTHON_VARIABLE = "PACELINE_SIMULATION_PYTHON"
#: Strategies that are not simulated, and why.
_NOT_SIMULATED = {
    "deepspeed": "DeepSpeed needs the values of tensors",
    "parameter_server": "its ranks exchange messages that depend on the values of the ids",
    "dp": "its threads drive several devices in one process",
}


@dataclass(frozen=True)
class Simulation:
    """The simulation of a plan.

    Args:
        mode: the mode that is simulated; None if the plan has none that is possible.
        report: None if it cannot be simulated, because of ``reason``.
    """

    mode: ModeEstimate | None
    report: SimulationReport | None
    reason: str | None = None

    def as_dict(self) -> SimulatedPart:
        """Return the keys that it adds to the JSON of the plan."""
        return {"simulated": self.report, "simulated_reason": self.reason}


def simulate_plan(plan: Plan) -> Simulation:
    """Simulate what runs on the config: the mode that it sets, or that ``auto`` chooses, with the
    settings that are chosen for it."""
    mode = plan.run_mode
    if plan.layout_error is not None:
        return Simulation(None, None, str(plan.layout_error))
    if mode is None:
        return Simulation(None, None, plan.choice.why)
    if mode.cost is None:
        return Simulation(mode, None, mode.reason)
    try:
        config = with_settings(plan.config, plan.run_settings)
        report = simulate(config, mode.layout, micro_batch(config), plan.machine)
    except ConfigError as error:
        return Simulation(mode, None, str(error))
    return Simulation(mode, report)


def simulate(
    config: Config, layout: ParallelLayout, batch: MicroBatchProfile, machine: Machine
) -> SimulationReport:
    """Simulate two steps of the first, a middle and the last rank.

    Raises:
        ConfigError: this run cannot be simulated, or not on this machine.
    """
    check_simulated(config, layout, machine)
    size = layout.axes.size
    ranks = sorted({0, size // 2, size - 1})
    logger.info(
        UserText(
            "simulating two steps of {rank_names} of {size}: {layout}",
            code="simulation-starts",
            rank_names=rank_names(ranks),
            size=size,
            layout=layout.text(),
        )
    )
    reports = run_jobs([job_of(config, layout, batch, machine, rank) for rank in ranks])
    peak = max(report["peak_memory_bytes"] for report in reports)
    return SimulationReport(
        verdict=verdict_of(peak, machine.memory_bytes), peak_memory_bytes=peak, ranks=reports
    )


def job_of(
    config: Config, layout: ParallelLayout, batch: MicroBatchProfile, machine: Machine, rank: int
) -> RankJob:
    """Return the job that simulates ``rank``."""
    assert machine.device is not None
    return RankJob(
        rank=rank,
        config=config.model_dump(mode="json"),
        strategy=layout.strategy,
        axes=asdict(layout.axes),
        lengths=batch.lengths,
        label_share=batch.label_share,
        device=machine.device.name,
        link_bytes_s=machine.link_bytes_s,
    )


def check_simulated(config: Config, layout: ParallelLayout, machine: Machine) -> None:
    """Raise ConfigError if a run cannot be simulated."""
    reason = _NOT_SIMULATED.get(layout.strategy)
    if ":" in layout.strategy:
        reason = "it is not a strategy of Paceline"
    if reason is not None:
        raise ConfigError(
            "`parallel.mode: {strategy}` is not simulated: {reason}",
            code="mode-not-simulated",
            strategy=layout.strategy,
            reason=reason,
        )
    if config.task not in ("sft", "pretrain"):
        raise ConfigError(
            "`task: {task}` is not simulated",
            code="task-not-simulated",
            allowed="language models: `sft`, `pretrain`",
            task=config.task,
        )
    if reads_images(config):
        raise ConfigError(
            "vision-language models are not simulated",
            code="vision-language-not-simulated",
            fix="leave `--simulate` out",
        )
    if machine.device is None:
        raise ConfigError(
            "{machine} is not simulated",
            code="machine-not-simulated",
            allowed="NVIDIA devices of the table of devices",
            fix="name one, such as `--device H100`",
            machine=machine.name,
        )
    if "8bit" in config.train_args.optim:
        raise ConfigError(
            "`train_args.optim: {optim}` is not simulated: its package computes the levels of the"
            " quantized state from values of tensors",
            code="optimizer-not-simulated",
            fix="simulate `train_args.optim: adamw`, whose state takes 8 bytes per element",
            optim=config.train_args.optim,
        )
    if config.train_args.fp8 != "none":
        raise ConfigError(
            "`train_args.fp8: {fp8}` is not simulated: float8 tensors have no kernels on simulated"
            " devices",
            code="fp8-not-simulated",
            fix="leave `train_args.fp8` out: it changes the memory of a run little",
            fp8=config.train_args.fp8,
        )
    if config.compression.chain and layout.axes.data > 1:
        raise ConfigError(
            "`compression` is not simulated: a thread compresses the gradients",
            code="compression-not-simulated",
        )
    if config.parallel.all_reduce_algorithm != "native" and layout.axes.data > 1:
        raise ConfigError(
            "`parallel.all_reduce_algorithm: {all_reduce_algorithm}` is not simulated",
            code="all-reduce-not-simulated",
            allowed="`native`",
            all_reduce_algorithm=config.parallel.all_reduce_algorithm,
        )


def run_jobs(jobs: Sequence[RankJob], program: Sequence[str] = ()) -> list[RankReport]:
    """Return the reports of the jobs, which are divided among a few processes.

    Args:
        program: arguments of the interpreter; default: the worker.

    Raises:
        ConfigError: a rank cannot be simulated.
    """
    workers = min(len(jobs), max(1, cpu_cores() // 2))
    parts = [jobs[start::workers] for start in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda part: _run_process(part, program), parts))
    by_rank = {
        id(job): result
        for part, part_results in zip(parts, results, strict=True)
        for job, result in zip(part, part_results, strict=True)
    }
    return [by_rank[id(job)] for job in jobs]


def _run_process(jobs: Sequence[RankJob], program: Sequence[str]) -> list[RankReport]:
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    command = [python, *(program or ("-m", "paceline.simulation.worker"))]
    lines = "".join(json.dumps(asdict(job)) + "\n" for job in jobs)
    try:
        done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise ConfigError(
            "`{python_variable}`: `{python}` cannot be started: {reason}",
            code="simulation-python-missing",
            fix="set it to the Python interpreter of an environment with Paceline and the CPU"
            " build of torch",
            python_variable=PYTHON_VARIABLE,
            python=python,
            reason=error.strerror,
        ) from error
    results: list[SimulatedRankResult] = [json.loads(line) for line in done.stdout.splitlines()]
    errors = [result["error"] for result in results if "error" in result]
    if len(results) < len(jobs):
        errors.append(
            f"the process that simulates ended with exit code {done.returncode} after"
            f" {counted(len(results), 'rank')}"
        )
    if errors:
        raise ConfigError(errors[0], code="simulation-failed")
    return [result["report"] for result in results]
