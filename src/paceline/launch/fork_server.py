"""A fork server that imports torch and other modules while the launcher reads config and data.

The ranks are forked from it, so each host imports these modules only once, in parallel with other
work. It is started before the launcher imports torch, and never after an accelerator was used.
"""

import multiprocessing.forkserver
import os
from collections.abc import Collection
from importlib.util import find_spec

from paceline.config.packages import DEVICE_PACKAGES, unused_in_ranks
from paceline.config.schema import Config
from paceline.core.fork_server.server import start_server
from paceline.launch.ranks.tolerance import tolerates_exits
from paceline.parallel.registry import modules_to_preload
from paceline.tasks import uses_transformers

#: Every torch optimizer imports this module when it is created, which takes about a second.
OPTIMIZER_MODULE = "torch._dynamo"
#: Files of the drivers of NVIDIA, of AMD, and of GPUs in the Windows Subsystem for Linux.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
#: The packages that the running server hides; None if :func:`start_fork_server` has started none.
_hidden: set[str] | None = None


def start_fork_server(*configs: Config) -> None:
    """Start the fork server for the ranks of a run, or of several runs one after the other. Returns
    immediately. The server of an earlier run in this process is used again, unless it hides a
    package that these runs use."""
    global _hidden
    hidden = set.intersection(*(set(unused_in_ranks(config)) for config in configs))
    if _hidden is not None and not _hidden <= hidden:
        _stop_server()
    if _hidden is None:
        _hidden = hidden
    can_fork = all(can_fork_after_imports(config, hidden) for config in configs)
    modules = dict.fromkeys(name for config in configs for name in modules_of(config, can_fork))
    # The resource tracker would warn about semaphores that remain when a run is killed.
    warnings = filter(
        None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    )
    environment = {
        "PYTHONWARNINGS": ",".join(warnings),
        "PACELINE_HIDDEN_PACKAGES": " ".join(sorted(hidden)),
        "PACELINE_PRELOAD": " ".join(modules),
        # Counts devices without initializing CUDA, if a module asks for them when it is imported.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if tolerates_exits(configs):
        # torch.distributed.rpc warns about each connection to a lost rank.
        environment["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_server(["paceline.launch.preload"], environment)


def can_fork_after_imports(config: Config, hidden: Collection[str]) -> bool:
    """Return whether transformers and peft can be imported before the ranks are forked. They import
    bitsandbytes and torchao, unless these are hidden or not installed, which initialize CUDA. A
    process that is forked afterwards cannot use it, and cannot even ask it whether a graph is being
    captured, which torch's optimizers do on CPUs too."""
    if config.parallel.device == "cpu" and not any(map(os.path.exists, _DRIVERS)):
        return True
    return all(name in hidden or find_spec(name) is None for name in DEVICE_PACKAGES)


def modules_of(config: Config, can_fork: bool) -> list[str]:
    """Return the modules that the ranks of a run import.

    Args:
        can_fork: see :func:`can_fork_after_imports`.
    """
    modules = ["paceline.launch.ranks.worker", OPTIMIZER_MODULE]
    modules += modules_to_preload(config.parallel)
    if uses_transformers(config) and can_fork:
        from paceline.models.builtin import model_type

        modules += ["transformers.models.auto.modeling_auto", "transformers.optimization"]
        kind = model_type(config.model)
        if kind is not None:
            modules.append(f"transformers.models.{kind}.modeling_{kind}")
        if config.lora.enable:
            modules.append("peft")
    if config.task == "classify" and not uses_transformers(config):
        modules.append("paceline.tasks.classify")
    return modules


def _stop_server() -> None:
    """Stop the server of an earlier run, whose ranks have ended."""
    global _hidden
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    _hidden = None
