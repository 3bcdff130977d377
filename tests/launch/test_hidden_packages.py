"""Packages that transformers and peft would import are hidden from ranks that do not use them."""

import os
import subprocess
import sys

from paceline.config.packages import unused_packages
from paceline.config.schema import Config

_SCRIPT = """
import paceline.launch.hidden_packages
from importlib.util import find_spec
print([name for name in ("bitsandbytes", "torchao") if find_spec(name) is None])
"""


def test_only_the_package_of_the_optimizer_is_visible() -> None:
    config = Config.model_validate({"model": "m", "dataset": "d"})
    assert unused_packages(config) == ["bitsandbytes", "torchao"]
    lora = config.lora.model_copy(update={"enable": True, "quantize": "nf4"})
    assert unused_packages(config.model_copy(update={"lora": lora})) == ["torchao"]
    own_task = config.model_copy(update={"task": "./file.py:Task"})
    assert unused_packages(own_task) == []


def test_hidden_packages_are_not_found() -> None:
    environment = {**os.environ, "PACELINE_HIDDEN_PACKAGES": "bitsandbytes torchao"}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['bitsandbytes', 'torchao']"
