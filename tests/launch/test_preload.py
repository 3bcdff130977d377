"""The fork server imports the modules of the ranks; packages that a run does not use are hidden."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config.packages import unused_in_ranks, unused_packages
from paceline.config.schema import Config
from paceline.launch import fork_server
from paceline.launch.fork_server import can_fork_after_imports, modules_of
from paceline.tasks import uses_transformers

_SCRIPT = """
import gc, sys
import paceline.launch.preload
from importlib.util import find_spec
print([name for name in ("bitsandbytes", "torchao", "scipy") if find_spec(name) is None])
print("paceline.core.stop" in sys.modules, gc.isenabled(), gc.get_freeze_count() > 0)
"""


def make_config(**keys: Any) -> Config:
    return Config.model_validate({"model": "m", "dataset": "d", **keys})


def test_packages_that_a_run_uses_are_visible() -> None:
    assert unused_packages(make_config()) == ["bitsandbytes", "torchao"]
    assert unused_in_ranks(make_config()) == [
        "bitsandbytes", "torchao", "scipy", "sklearn", "boto3",
    ]  # fmt: skip
    lora = {"enable": True, "quantize": "nf4"}
    assert unused_in_ranks(make_config(lora=lora)) == ["torchao", "boto3"]
    optimizer = {"optim": "adamw_8bit"}
    assert unused_in_ranks(make_config(train_args=optimizer)) == ["torchao", "boto3"]
    assert "boto3" not in unused_in_ranks(make_config(checkpoint_dir="s3://bucket/run"))
    assert "scipy" not in unused_in_ranks(make_config(task="classify"))


def test_packages_are_visible_to_code_of_the_user() -> None:
    assert unused_in_ranks(make_config(task="./file.py:Task")) == []
    names = unused_in_ranks(make_config(trust_remote_code=True))
    assert names == ["bitsandbytes", "torchao"]


@pytest.mark.parametrize(
    "keys",
    [
        {"lora": {"enable": True, "quantize": "nf4"}},
        {"train_args": {"optim": "adamw_8bit"}},
        {"train_args": {"optim": "adamw_torchao_8bit"}},
        {"task": "./file.py:Task"},
    ],
)
def test_ranks_are_forked_before_packages_initialize_cuda(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers and peft import bitsandbytes and torchao, which initialize CUDA. Without a
    driver, they do not."""
    driver = tmp_path / "driver"
    monkeypatch.setattr(fork_server, "_DRIVERS", (str(driver),))
    name = "transformers.models.qwen2.modeling_qwen2"

    def imported(**others: Any) -> list[str]:
        config = make_config(model="builtin:qwen2-micro", **others)
        hidden = unused_in_ranks(config)
        return modules_of(config, can_fork_after_imports(config, hidden))

    assert name in imported()
    assert not any(each.startswith(("transformers", "peft")) for each in imported(**keys))
    on_cpu = imported(**keys, parallel={"device": "cpu"})
    assert (name in on_cpu) == uses_transformers(make_config(**keys))
    driver.touch()
    assert name not in imported(**keys, parallel={"device": "cpu"})


_TWO_RUNS = """
import multiprocessing.forkserver
from paceline.config.schema import Config
from paceline.launch.fork_server import start_fork_server

pids = []
for optim in ("adamw", "sgd", "adamw_8bit", "adamw"):
    keys = {"model": "m", "dataset": "d", "task": "classify", "train_args": {"optim": optim}}
    start_fork_server(Config.model_validate(keys))
    pids.append(multiprocessing.forkserver._forkserver._forkserver_pid)
print([pids.index(pid) for pid in pids])
"""


@pytest.mark.slow
def test_server_that_hides_a_package_of_the_next_run_is_replaced() -> None:
    command = [sys.executable, "-c", _TWO_RUNS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[0, 0, 2, 2]"]


def test_modules_are_imported_and_hidden_packages_are_not_found() -> None:
    environment = {
        **os.environ,
        "PACELINE_HIDDEN_PACKAGES": "bitsandbytes torchao scipy",
        "PACELINE_PRELOAD": "paceline.no_such_module paceline.core.stop",
    }
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['bitsandbytes', 'torchao', 'scipy']", "True True True"]


_USER_CODE = """
import sys
from importlib.util import find_spec
from paceline.core.user_code import hide_packages, import_user_module
hide_packages(["scipy", "sklearn"])
hidden = find_spec("scipy"), find_spec("sklearn")
module = import_user_module(sys.argv[1], "callbacks: [...]", "a file")
print(hidden, module.stats.__name__)
"""


def test_code_of_the_user_can_import_hidden_packages(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from scipy import stats\n")
    command = [sys.executable, "-c", _USER_CODE, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["(None, None) scipy.stats"]
