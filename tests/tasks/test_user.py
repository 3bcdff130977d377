"""User-defined tasks: loading, errors, and checks."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from raised import raises_error
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.cli import main
from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.tasks import load_task
from paceline.tasks.user import guard_dataset, guard_model

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK_CODE = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline

class Line(paceline.Task):
    def build_datasets(self):
        x = torch.linspace(0, 1, 20).unsqueeze(1)
        return TensorDataset(x, 2 * x), None
    def build_model(self):
        return nn.Linear(1, 1)
    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y, reduction="sum")

class NotATask:
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def _isolate_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in its temporary folder, and remove the modules that it imported from there."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(code: str, name: str = "my_line.py") -> None:
    Path(name).write_text(code)


def load(task: str, **keys: Any) -> Any:
    return load_task(
        Config.model_validate({"model": "custom", "dataset": "custom", "task": task, **keys})
    )


def test_loads_class_from_file() -> None:
    write(TASK_CODE)
    task = load("./my_line.py:Line")
    prepared = task.prepare()
    assert (prepared.num_train, prepared.num_eval, prepared.counts.kept) == (20, 0, 20)
    train, evaluation = task.build_datasets()
    assert evaluation is None
    batch = task.collate([train[0], train[1]])
    assert task.count(batch) == 2
    assert task.loss(task.build_model(), batch).requires_grad
    assert type(load("./my_line.py:Line").task) is type(task.task)  # the file is imported once


def test_loads_class_from_module_and_package() -> None:
    write(TASK_CODE, "line_module.py")
    Path("pack").mkdir()
    write(TASK_CODE, "pack/inner.py")
    assert type(load("line_module:Line").task).__name__ == "Line"
    assert type(load("pack.inner:Line").task).__module__ == "pack.inner"


def test_task_file_can_import_from_its_folder() -> None:
    Path("deep").mkdir()
    write("WIDTH = 5\n", "deep/widths_module.py")
    write("from widths_module import WIDTH\n" + TASK_CODE, "deep/wide.py")
    assert load("./deep/wide.py:Line").prepare().num_train == 20


def test_task_file_does_not_shadow_standard_module() -> None:
    write(TASK_CODE, "json.py")
    task = load("./json.py:Line")
    assert type(task.task).__module__.startswith("paceline_")
    import json

    assert json.loads("1") == 1


@pytest.mark.soak
def test_task_and_data_can_be_pickled_for_loader_processes() -> None:
    write(
        TASK_CODE.replace("return TensorDataset(x, 2 * x), None", "return Rows(), None")
        + "class Rows(list):\n    pass\n"
    )
    task = load("./my_line.py:Line")
    unpickled = pickle.loads(pickle.dumps((task, task.build_datasets()[0])))
    assert type(unpickled[0].task) is type(task.task)
    # A new process with the same sys.path finds the module by its name.
    code = (
        f"import sys, pickle; sys.path[:] = {sys.path!r};"
        f" print(type(pickle.loads({pickle.dumps(task)!r}).task).__name__)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "Line\n"
    )


@pytest.mark.parametrize(
    ("task", "error"),
    [
        ("./my_lime.py:Line", ("missing-user-file", "my_lime.py")),
        ("./my_line.py:Lime", ("unknown-task-class", "my_line.py")),
        ("./my_line.py", ("task-without-class", "")),
        ("./my_line.py:NotATask", ("not-a-task", "paceline.Task")),
        ("./my_line.py:number", ("not-a-task", "task")),
        ("no_such_package.tasks:Line", ("missing-module", "")),
        ("clasify", ("unknown-task", "task")),
        ("segment", ("unknown-task", "task")),
    ],
)
def test_error_for_task_that_cannot_be_found(task: str, error: tuple[str, str]) -> None:
    write(TASK_CODE)
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        load(task)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "import torch\n\n1 / 0\n" + TASK_CODE,
            ("user-code-failed", "ZeroDivisionError"),
        ),
        ("def broken(:\n", ("import-failed", "")),
        (
            "import no_such_thing\n",
            ("user-code-failed", "ModuleNotFoundError"),
        ),
        (TASK_CODE.replace("def loss", "def lost"), ("missing-method", "")),
        (
            TASK_CODE.replace(
                "    def build_model", "    def __init__(self):\n        pass\n    def build_model"
            ),
            ("user-code-failed", "TypeError"),
        ),
        (
            TASK_CODE.replace(
                "    def build_model",
                "    def __init__(self, config):\n        pass\n    def build_model",
            ),
            ("missing-config", ""),
        ),
        (
            TASK_CODE.replace(
                "    def build_model",
                "    def __init__(self, config):\n        config.nope\n    def build_model",
            ),
            ("user-code-failed", "AttributeError"),
        ),
    ],
)
def test_error_in_user_code_names_line(code: str, error: tuple[str, str]) -> None:
    write(code)
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        load("./my_line.py:Line")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            "return open('rows.txt')",
            ("user-code-failed", "FileNotFoundError"),
        ),
        (
            "return TensorDataset(x, x)",
            ("wrong-result", "TensorDataset"),
        ),
        ("return None", ("wrong-result", "")),
        (
            "return (1 for _ in x), None",
            (("not-a-dataset", "__getitem__")),
        ),
        ("return [x], (1 for _ in x)", ("not-a-dataset", "")),
    ],
)
def test_rejects_invalid_datasets(line: str, error: tuple[str, str]) -> None:
    write(TASK_CODE.replace("return TensorDataset(x, 2 * x), None", line))
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        load("./my_line.py:Line").prepare()


def test_rejects_lora_for_custom_task() -> None:
    write(TASK_CODE)
    with raises_error(ConfigError, code="no-effect"):
        load("./my_line.py:Line", lora={"enable": True})


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_rejects_streams_and_data_loaders_as_datasets() -> None:
    with raises_error(ConfigError, code="iterable-dataset"):
        guard_dataset(_Stream(), "the training dataset")
    with raises_error(ConfigError, code="data-loader"):
        guard_dataset(DataLoader(TensorDataset(torch.zeros(3))), "the training dataset")
    guard_dataset([1, 2], "the training dataset")
    guard_dataset(TensorDataset(torch.zeros(3)), "the training dataset")


def test_rejects_wrapped_model() -> None:
    unwrapped = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    guard_model(unwrapped)
    with raises_error(ConfigError, code="wrapped-model"):
        guard_model(nn.DataParallel(unwrapped))
    with raises_error(ConfigError, code="wrapped-model"):
        guard_model(nn.Sequential(unwrapped, nn.DataParallel(unwrapped)))
    with raises_error(ConfigError, code="not-a-module"):
        guard_model(None)


@pytest.mark.soak
def test_rejects_model_in_ddp_or_fsdp(tmp_path: Path) -> None:
    code = f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from paceline.core.errors import ConfigError
from paceline.tasks.user import guard_model
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
for model in (
    DistributedDataParallel(nn.Linear(2, 2)),
    fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh),
    FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
):
    try:
        guard_model(model)
        print("passed")
    except ConfigError as error:
        print(error.what.split(":")[1].split(".")[0].strip())
dist.destroy_process_group()
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines() == [
        "it is a DistributedDataParallel",
        "it is a FSDPModule",
        "it is a FullyShardedDataParallel",
    ]


def test_warns_about_methods_that_are_never_called() -> None:
    hooks = (
        "    def configure_optimizers(self):\n        pass\n    def train_dataloader(self):\n      "
        "  pass\n"
    )
    helpers = "    def colate(self, samples):\n        pass\n    def helper(self):\n        pass\n"
    write(TASK_CODE.replace("class NotATask", hooks + helpers + "\nclass NotATask"))
    notices = load("./my_line.py:Line").prepare().notices
    assert [level for level, _ in notices] == ["warning"] * 3
    texts = " ".join(text for _, text in notices)
    assert "Line defines configure_optimizers, which Paceline does not call" in texts
    assert "Line defines train_dataloader, which Paceline does not call" in texts
    assert "Did you mean collate?" in texts
    assert "helper" not in texts


def test_warns_about_loss_that_is_not_additive() -> None:
    write(
        TASK_CODE.replace("    def build_datasets", "    additive = False\n    def build_datasets")
    )
    ((level, text),) = load("./my_line.py:Line").prepare().notices
    assert (level, "depends on the micro-batch size" in text) == ("warning", True)


@pytest.mark.slow
def test_mean_loss_is_rejected_before_output_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    write(TASK_CODE.replace(', reduction="sum"', ""))
    args = [
        "model=custom",
        "dataset=custom",
        "task=./my_line.py:Line",
        "max_steps=2",
        "parallel.device=cpu",
        "output_dir=out",
    ]
    assert main(["sft", *args]) == 2
    assert "Line.loss returns the mean over the batch" in capsys.readouterr().err
    assert not Path("out").exists()


def test_example_task_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    task = load_task(load_config("examples/my_task.yaml", {}).config)
    prepared = task.prepare()
    assert (prepared.num_train, prepared.num_eval) == (3600, 400)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (x, y), held_out = task.build_datasets()[0].tensors, task.build_datasets()[1].tensors
    initial_loss = float(task.evaluate(model, list(held_out))["loss"].detach()) / 400
    for _ in range(200):
        loss = task.loss(model, [x, y]) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(task.evaluate(model, list(held_out))["loss"].detach()) / 400 < 0.5 * initial_loss
