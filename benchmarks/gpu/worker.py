"""A process that has imported torch and Paceline, and runs one case after another.

It reads a JSON object per case from standard input, and writes a JSON object per result to the file
descriptor in its first argument. `pool.py` starts it.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from cases import Skipped
from context import Context, device_lock

#: The longest reason in a result. The traceback is in the log of the process.
MAX_REASON = 600
#: Imported before the first case. Each is imported in several of the cases.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "paceline.api",
    "paceline.cluster.member",
    "paceline.launch.ranks.worker",
    "paceline.strategies.ddp.strategy",
    "paceline.tasks.language",
)


def main() -> None:
    channel = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    device = sys.argv[2]  # "cuda", "cpu", or "none", with which nothing is imported in advance
    try:
        if device != "none":
            for name in PRELOADED:
                importlib.import_module(name)
        _write(channel, {"card": gpu_name() if device == "cuda" else device})
    except BaseException as error:
        traceback.print_exc()
        _write(channel, {"error": reason_of(error)})
        return
    for line in sys.stdin:
        request = json.loads(line)
        print(f"== {request['name']}, rank {request['rank']}", flush=True)
        _write(channel, run_case(request))


def _write(channel: Any, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def gpu_name() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "torch finds no CUDA device. To fix: run on a machine with an NVIDIA GPU, or pass"
            " --simulated"
        )
    return str(torch.cuda.get_device_name())


def run_case(request: dict[str, Any]) -> dict[str, Any]:
    """Call the function of a case, and return its status, figures, reason and seconds."""
    context = Context(
        Path(request["prepared"]),
        Path(request["scratch"]),
        request["rank"],
        request["num_ranks"],
        request["is_simulated"],
    )
    outcome: dict[str, Any] = {"status": "ok", "figures": {}, "reason": ""}
    with device_lock(Path(request["lock"]), is_exclusive=request["is_timing"]):
        started_at = time.monotonic()
        try:
            module, _, name = request["function"].partition(":")
            function = getattr(importlib.import_module(module), name)
            outcome["figures"] = function(context, **request["arguments"]) or {}
        except Skipped as skipped:
            outcome.update(status="skipped", reason=str(skipped))
        except BaseException as error:
            traceback.print_exc()
            outcome.update(status="failed", reason=reason_of(error))
        outcome["seconds"] = time.monotonic() - started_at
        _free_memory()
    return outcome


def reason_of(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 1] + "…"


def _free_memory() -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
