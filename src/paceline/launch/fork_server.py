"""A fork server that imports torch and the rest while the launcher reads the config and the data.

The ranks are then forked from it, so the imports are paid once a host and beside other work. It is
started before torch is imported here, and never after an accelerator was touched.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import tempfile
import threading

from paceline.config.schema import Config
from paceline.core.files import Scratch


def start_fork_server(config: Config) -> None:
    """Start it for this config; returns at once."""
    # Every torch optimizer imports torch._dynamo when it is made: a second that is better spent
    # here.
    modules = ["paceline.launch.worker", "torch._dynamo"]
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        # First of all: whatever ends the launcher ends the server with it. (The kernel ties this to
        # the thread that starts it.)
        modules.insert(0, "paceline.launch.parent_death")
    if config.parallel.mode in ("zero2", "zero3", "fsdp") or config.parallel.shard:
        modules.append("torch.distributed.fsdp")
    if config.task in ("sft", "pretrain"):
        from paceline.models.builtin import model_type

        modules += ["transformers.models.auto.modeling_auto", "transformers.optimization"]
        kind = model_type(config.model)
        if kind is not None:
            modules.append(f"transformers.models.{kind}.modeling_{kind}")
        if config.lora.enable:
            modules.append("peft")
    elif config.task == "classify":
        modules.append("paceline.tasks.classify")
    multiprocessing.set_forkserver_preload(modules)
    keep_server_files()
    # A Ctrl-C or a closed terminal reaches the whole process group, and Slurm's SIGTERM every
    # process of a step. The server inherits "ignore": it prints no traceback, lets the ranks save
    # their checkpoint, and ends with the launcher.
    numbers = (
        [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
        if in_main
        else []
    )
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    warnings_before = os.environ.get("PYTHONWARNINGS")
    # Where a run is ended at once, what clears up behind it need not speak of it.
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [warnings_before, "ignore:resource_tracker:UserWarning"])
    )
    level_before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    if config.parameter_server.on_worker_failure == "continue":
        # rpc warns of each connection to a rank that is gone
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["PACELINE_FORK_SERVER_PARENT"] = str(os.getpid())  # see launch/parent_death.py
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PACELINE_FORK_SERVER_PARENT"]
        for name, value in (
            ("PYTHONWARNINGS", warnings_before),
            ("TORCH_CPP_LOG_LEVEL", level_before),
        ):
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_server_files() -> None:
    """To be called before the fork server is started. Its socket lies in a folder that goes even
    where this process is killed: with the next run."""
    if multiprocessing.current_process()._config.get("tempdir") is not None:  # type: ignore[attr-defined]
        return  # whoever calls this has used it before
    # The path of the server's socket may have 107 bytes, of which 55 are names below this folder.
    scratch, before = (
        Scratch(parent="/tmp" if len(os.fsencode(tempfile.gettempdir())) > 50 else None),
        tempfile.tempdir,
    )
    try:
        tempfile.tempdir = str(scratch.path)
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before
    # after what is in it: that has -100
    multiprocessing.util.Finalize(None, scratch.close, exitpriority=-200)
