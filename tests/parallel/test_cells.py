"""The first support table: three steps of training for each cell that says yes, on ranks that run
one cell after the other, and the reason on the page for each other cell. Offloading needs an
accelerator: its cells are trained in `tests/simulated_cuda/test_features.py`."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import digest, losses
from families import make_model
from ranks import free_port, run_ranks

from paceline.config.diff import OTHER_TRAINING
from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.stop import StopFlag
from paceline.distributed.communicator import Communicator
from paceline.distributed.devices import Devices
from paceline.distributed.environment import RankEnv
from paceline.launch.passes.draft import Draft, Host
from paceline.launch.passes.layout import choose_layout
from paceline.launch.plan import make_spec, plan
from paceline.parallel import support_table
from paceline.parallel.support_table import COLUMNS
from paceline.train.mixed_devices import check_mixed_devices
from paceline.train.run_spec import RunSpec
from paceline.train.setup import run_rank

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
ROWS = {name: (mode, dims, parallel) for name, mode, dims, parallel in support_table.rows()}
#: Columns that are trained here. A CPU has no offloading.
ON_CPU = [
    name for name, column in COLUMNS.items() if "cpu_offload" not in column.get("parallel", {})
]
#: Columns that change the training of each mode.
OTHER_COLUMNS = ("`compression`",)
#: Two workers, and one server with `parameter_server`.
NUM_RANKS = 3
_TRAINING = {
    "max_steps": 3,
    "logging_steps": 1,
    "save_steps": 0,
    "precision": "32",
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,
    "global_batch_size": 8,
    "per_device_train_batch_size": 1,
    "dataloader_num_workers": 0,
}
_TEXTS = {
    "model": "builtin:qwen2-micro",
    "dataset": "builtin:python-docs#64",
    "train_args": {**_TRAINING, "max_length": 64},
}
_CLICKS = {
    "model": "builtin:dlrm",
    "dataset": "builtin:clicks#2000",
    "task": "recommend",
    "train_args": {**_TRAINING, "global_batch_size": 64, "per_device_train_batch_size": 16},
}
#: Parts of the table with starts of their own.
NUM_PARTS = 2
#: Largest relative difference to the losses of `single`; 1e-5 for other columns.
_TOLERANCES = {"`fp16-mixed`": 2e-3}


@dataclass(frozen=True)
class Cell:
    """A cell of the table: the name of its row and of its column, and where its runs write."""

    row: str
    column: str
    folder: Path

    @property
    def reason(self) -> str | None:
        """The reason why the table says that the cell is not supported."""
        return support_table.reason_against(*ROWS[self.row], COLUMNS[self.column])

    @property
    def trains_differently(self) -> bool:
        return self.column in OTHER_COLUMNS or ROWS[self.row][0] in OTHER_TRAINING

    def output(self, name: str) -> Path:
        number = list(COLUMNS).index(self.column)
        return self.folder / f"{self.row}-{number}" / name

    def spec(self, name: str, **args: Any) -> RunSpec:
        """Return the spec of a run.

        Args:
            name: name of the run; ``experts`` is the reference of a model with experts.
            args: values of ``train_args``.

        Raises:
            ConfigError: the cell is not supported.
        """
        mode, dims, parallel = ROWS["single" if name == "reference" else self.row]
        base: dict[str, Any] = _CLICKS if mode == "parameter_server" else _TEXTS
        if self.row == "expert":
            base = {**base, "model": str(self.folder / "mixtral"), "tokenizer": _TEXTS["model"]}
        settings = COLUMNS[self.column]
        config: dict[str, Any] = {
            **base,
            **settings,
            "output_dir": str(self.output(name)),
            "split_dataset_ratio": 0.1,
            "local_sgd": {"sync_every": 2},
            "evaluation": {"num_samples": 0, **settings.get("evaluation", {})},
            "train_args": {**base["train_args"], **settings.get("train_args", {}), **args},
            "parallel": {
                "mode": mode,
                "device": "cpu",
                "num_gpus": dims.size,
                "collective_timeout_s": 60,
                **parallel,
                **settings.get("parallel", {}),
            },
        }
        devices = Devices("cpu", dims.size)
        draft = Draft(load_config(None, config), time.time(), allow_config_change=True,
                      host=Host(devices))  # fmt: skip
        return make_spec(plan(draft, first=choose_layout))


def run_specs(env: RankEnv, specs: list[tuple[RunSpec, int]]) -> list[str]:
    """Run specs one after the other on a rank, and return their errors; empty for success. Rank 0,
    which takes part in each, tells by a file that it starts one, so that no rank waits for it in a
    collective."""
    errors = []
    for spec, port in specs:
        started = Path(f"{spec.config.output_dir}-{port}.started")
        if env.rank == 0:
            started.parent.mkdir(parents=True, exist_ok=True)
            started.touch()
        while not started.exists():
            time.sleep(0.01)
        size = spec.layout.num_processes
        errors.append("")
        if env.rank >= size:
            continue
        os.environ["MASTER_PORT"] = str(port)
        here = RankEnv() if size == 1 else RankEnv(env.rank, size, env.rank, size)
        try:
            run_rank(spec, here, StopFlag())
        except Exception as error:
            errors[-1] = f"rank {env.rank}: {type(error).__name__}: {error}"
    return errors


def train(specs: list[RunSpec]) -> list[str]:
    """Run specs on the same started ranks, and return the errors of each."""
    if not specs:
        return []
    errors: dict[int, str] = {}
    # The ranks of a parameter server are started anew for each run.
    shared = [number for number, spec in enumerate(specs) if spec.layout.num_processes < NUM_RANKS]
    alone = [[number] for number in range(len(specs)) if number not in shared]
    for numbers in filter(None, [shared, *alone]):
        work = [(specs[number], free_port()) for number in numbers]
        num_ranks = max(spec.layout.num_processes for spec, _ in work)
        by_rank = run_ranks(run_specs, num_ranks, work, timeout_s=1200.0, init_process_group=False)
        for number, found in zip(numbers, zip(*by_rank, strict=True), strict=True):
            errors[number] = "; ".join(filter(None, found))
    return [errors[number] for number in range(len(specs))]


def plans(cell: Cell) -> Iterator[RunSpec]:
    """Yield the first runs of a supported cell."""
    if not cell.trains_differently:
        yield cell.spec("run")
        return
    yield cell.spec("whole", max_steps=4)
    yield cell.spec("parts", max_steps=2)


def problem_of(cell: Cell) -> str:
    """Return what is wrong with the losses or the weights of a cell that was trained."""
    if cell.trains_differently:
        found = losses(cell.output("whole")) + losses(cell.output("parts"))
        if not all(0 < loss < 100 for loss in found):
            return f"losses {found}"
        same = digest(cell.output("whole")) == digest(cell.output("parts"))
        return "" if same else "another digest after resuming"
    reference = cell if cell.row == "expert" else replace(cell, row="single")
    found, expected = losses(cell.output("run")), losses(reference.output("reference"))
    close = pytest.approx(expected, rel=_TOLERANCES.get(cell.column, 1e-5))
    return "" if found == close and len(found) == 3 else f"losses {found}, not {expected}"


def refused_as_printed(cell: Cell) -> str:
    """Return what is wrong with the refusal of a cell that is not supported."""
    try:
        cell.spec("run")
    except ConfigError as error:
        printed = support_table.is_printed(error.what, PAGE.read_text(encoding="utf-8"))
        return "" if printed else f"reason not on the page: {error.what}"
    return "not refused"


def train_cells(cells: list[Cell]) -> dict[Cell, str]:
    """Train supported cells, and return what is wrong with each."""
    # DeepSpeed leaves global state in the process.
    cells = sorted(cells, key=lambda cell: cell.row.startswith("deepspeed"))
    references = [
        cell for cell in cells if cell.row in ("single", "expert") and not cell.trains_differently
    ]
    runs = [(cell, cell.spec("reference")) for cell in references]
    runs += [(cell, spec) for cell in cells for spec in plans(cell)]
    problems = dict.fromkeys(cells, "")
    for (cell, _), error in zip(runs, train([spec for _, spec in runs]), strict=True):
        problems[cell] = problems[cell] or error
    resumed = [
        (cell, cell.spec("parts", max_steps=4))
        for cell in cells
        if cell.trains_differently and not problems[cell]
    ]
    for (cell, _), error in zip(resumed, train([spec for _, spec in resumed]), strict=True):
        problems[cell] = error
    for cell in cells:
        problems[cell] = problems[cell] or problem_of(cell)
    return problems


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_each_cell(part: int, tmp_path: Path) -> None:
    columns = ON_CPU[part::NUM_PARTS]
    make_model("mixtral", tmp_path)
    cells = [Cell(row, column, tmp_path) for column in columns for row in ROWS]
    refused = [cell for cell in cells if cell.reason is not None]
    problems = {cell: refused_as_printed(cell) for cell in refused}
    problems |= train_cells([cell for cell in cells if cell.reason is None])
    assert len(problems) == len(columns) * len(ROWS)
    found = {(cell.row, cell.column): text for cell, text in problems.items() if text}
    assert not found, found


def test_reasons_against_offloading_are_printed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for column in COLUMNS.keys() - set(ON_CPU):
        reasons = [support_table.reason_against(*row, COLUMNS[column]) for row in ROWS.values()]
        assert None in reasons
        assert all(reason is None or support_table.is_printed(reason, page) for reason in reasons)


def test_rows_accept_mixed_devices_as_the_table_says() -> None:
    world = Communicator(RankEnv(0, 2, 0, 1), torch.device("cpu"))
    world.device_types = frozenset(("cpu", "cuda"))
    refused = set()
    for name, (mode, _, _) in ROWS.items():
        try:
            check_mixed_devices(world, Config(model="m", dataset="d"), mode)
        except ConfigError:
            refused.add(name)
    table = support_table.table()
    line = {row.split(" | ")[0]: row for row in table.splitlines()}
    assert refused == {name for name in ROWS if line[f"| `{name}`"].endswith("| – |")}
