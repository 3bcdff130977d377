"""Count the kernels of simulated steps: those of a layer, of 1,000 label tokens, and of the
optimizer. ``budgets.json`` holds the counts. To write the file again:

    PYTHONPATH=src:tests python tests/simulated_cuda/step_budgets.py
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.models.hub_configs import read_raw_config
from paceline.parallel.registry import layout
from paceline.planner.devices import find_device
from paceline.planner.machine.hardware import named_machine
from paceline.planner.micro_batch import micro_batch
from paceline.simulation.records import RankJob, RankReport
from paceline.simulation.run import job_of, run_jobs

BUDGETS = Path(__file__).with_name("budgets.json")
#: A model with the vocabulary of Qwen2.5, 151,936 tokens, and layers of these sizes.
FAMILY = "Qwen/Qwen2.5-0.5B"
SIZES = {"hidden_size": 256, "intermediate_size": 512}
#: Number of layers, and share of the tokens that have a loss. The first is the step whose update is
#: counted; its differences to the others are those of two layers and of half of the tokens.
STEPS = ((2, 0.5), (4, 0.5), (2, 1.0))
NUM_TOKENS = 8192
#: Mode → ranks, and keys of the config.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"mode": "single"}),
    "ddp": (4, {"mode": "ddp"}),
    "zero1": (4, {"mode": "zero1"}),
    "zero2": (4, {"mode": "zero2"}),
    "zero3": (4, {"mode": "zero3"}),
    "tensor": (2, {"mode": "tensor"}),
    "pipeline": (2, {"mode": "pipeline"}),
    "hybrid": (4, {"data": 2, "tensor": 2}),
    "local_sgd": (4, {"mode": "local_sgd"}),
    "diloco": (4, {"mode": "diloco"}),
}
#: Name of the training → keys of the config.
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"enable": True, "rank": 16}},
    "bf16-true": {"train_args": {"precision": "bf16-true"}},
}
#: All pairs that have a budget. The weights in bfloat16 matter to the optimizer, which is the same
#: under every strategy.
CASES = [
    *((training, mode) for training in ("full", "lora") for mode in LAYOUTS),
    ("bf16-true", "single"),
]

#: Part of a step → phase and operation → number of kernels, and bytes that they read and write.
Budget = dict[str, dict[str, tuple[float, int]]]


@dataclass(frozen=True)
class Case:
    """The training of a model with a strategy."""

    training: str
    mode: str

    @property
    def micro_batches(self) -> int:
        return 2 if self.mode == "pipeline" else 1

    @property
    def pipeline_ranks(self) -> int:
        return 2 if self.mode == "pipeline" else 1

    def jobs(self, folder: Path) -> list[RankJob]:
        """Return the simulated rank in each of :data:`STEPS`: the last one, which computes the
        loss in a pipeline.

        Args:
            folder: receives the models.
        """
        return [self._job(folder, *step) for step in STEPS]

    def _job(self, folder: Path, num_layers: int, label_share: float) -> RankJob:
        world_size, parallel = LAYOUTS[self.mode]
        keys = TRAININGS[self.training]
        args = {
            "precision": "bf16-mixed",
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": self.micro_batches,
            "max_length": NUM_TOKENS,
            **keys.get("train_args", {}),
        }
        config = Config(
            model=_write_model(folder, num_layers),
            dataset="none.jsonl",
            parallel=parallel,
            local_sgd={"sync_every": 4},
            **{**keys, "train_args": args},
        )
        machine = named_machine(find_device("H100-SXM")[0], None, world_size, "bfloat16")
        planned, batch = layout(config.parallel, world_size), micro_batch(config)
        job = job_of(config, planned, batch, machine, world_size - 1)
        return RankJob(**{**vars(job), "label_share": label_share})


def _write_model(folder: Path, num_layers: int) -> str:
    path = folder / f"{num_layers}-layers"
    path.mkdir(exist_ok=True)
    content = read_raw_config(FAMILY)
    assert content is not None
    content |= {**SIZES, "num_hidden_layers": num_layers}
    content.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(content))
    return str(path)


def measure_budgets(cases: Iterable[Case], folder: Path) -> dict[str, Budget]:
    """Simulate the cases; return the budget of each by its name."""
    by_case = {case: case.jobs(folder) for case in cases}
    reports = iter(run_jobs([job for jobs in by_case.values() for job in jobs]))
    return {
        f"{case.training}, {case.mode}": _budget_of(case, [next(reports) for _ in jobs])
        for case, jobs in by_case.items()
    }


def _budget_of(case: Case, reports: list[RankReport]) -> Budget:
    step, deeper, more_labels = (_kernels_of(report) for report in reports)
    num_layers = (STEPS[1][0] - STEPS[0][0]) / case.pipeline_ranks
    num_labels = NUM_TOKENS * (STEPS[2][1] - STEPS[0][1])
    updates = ("update ", "synchronize ")
    layers = _difference(deeper, step, 1 / (num_layers * case.micro_batches))
    return {
        "per layer": {name: each for name, each in layers.items() if not name.startswith(updates)},
        "per 1,000 label tokens": _difference(
            more_labels, step, 1000 / (num_labels * case.micro_batches)
        ),
        "optimizer": {name: each for name, each in step.items() if name.startswith(updates)},
    }


def _kernels_of(report: RankReport) -> dict[str, tuple[float, int]]:
    return {
        f"{kernel['phase']} {kernel['operation']}": (round(kernel["launches"], 3), kernel["bytes"])
        for kernel in report["kernels"]
    }


def _difference(
    counts: Mapping[str, tuple[float, int]], others: Mapping[str, tuple[float, int]], factor: float
) -> dict[str, tuple[float, int]]:
    result = {}
    for name, (launches, size_bytes) in sorted(counts.items()):
        before = others.get(name, (0, 0))
        excess = round(factor * (launches - before[0]), 3), round(factor * (size_bytes - before[1]))
        if max(excess) > 0:
            result[name] = excess
    return result


def read_budgets() -> dict[str, Budget]:
    """Return the budgets of the file."""
    budgets: dict[str, Budget] = json.loads(BUDGETS.read_text())
    return budgets


def write_budgets() -> None:
    """Simulate all cases and write the file: a line for each operation."""
    with tempfile.TemporaryDirectory() as folder:
        budgets = measure_budgets([Case(*case) for case in CASES], Path(folder))
    BUDGETS.write_text(_lines(budgets, 0) + "\n")


def _lines(value: Any, depth: int) -> str:
    """Return JSON with a line for each value down to a part of a step."""
    if depth == 3 or not value:
        return json.dumps(value)
    margin = "  " * depth
    inner = ",\n".join(
        f"{margin}  {json.dumps(name)}: {_lines(each, depth + 1)}" for name, each in value.items()
    )
    return f"{{\n{inner}\n{margin}}}"


if __name__ == "__main__":
    write_budgets()
