"""Train with Paceline inside the process of a case, as a rank that torchrun has started."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from context import Context


@dataclass(frozen=True)
class TrainedRun:
    """The folder of a run, its report, and the events of its log."""

    folder: Path
    report: dict[str, Any]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    @property
    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events("step")]

    def digest(self, step: int | None = None) -> str:
        """Return the digest of the weights in a checkpoint; by default, in the latest one."""
        from paceline.checkpoint import store
        from paceline.checkpoint.format import name_of

        path = self.folder if step is None else self.folder / "checkpoints" / name_of(step)
        return str(store.inspect(store.find(path))["digest"])


def train(
    context: Context,
    name: str,
    settings: dict[str, Any],
    *,
    device: str = "cuda",
    port: int | None = None,
    saves_state: bool = False,
    allow_config_change: bool = False,
) -> TrainedRun:
    """Train, and return the run. All ranks of the case call this together; each of them has local
    rank 0, so that all use the first device.

    Args:
        settings: keys of the config. Paths are relative to the prepared folder.
        port: free port for the store of the ranks.
    """
    from paceline import api
    from paceline.config.load import load_config

    if device == "cuda" and not context.is_simulated:
        use_host_backend()
    folder = context.scratch / name
    values = {
        **settings,
        **{key: str(context.prepared / settings[key]) for key in ("model", "dataset")
           if not os.path.isabs(settings[key])},
        "parallel.device": device,
        "output_dir": str(folder),
    }  # fmt: skip
    loaded = load_config(None, values)
    store = _start_ranks(context, port)
    result = api.run(
        loaded,
        time.time(),
        allow_config_change=allow_config_change,
        saves_state=saves_state,
    )
    _close_ranks()
    del store
    if result.exit_code != 0 or result.report is None:
        raise RuntimeError(f"the run ended with exit code {result.exit_code}")
    return TrainedRun(folder, dict(result.report))


def _start_ranks(context: Context, port: int | None) -> Any:
    """Set the variables of torchrun; rank 0 serves and returns the store."""
    from torch.distributed import TCPStore

    from paceline.cluster import rounds

    store = None
    if context.rank == 0:
        store = TCPStore("127.0.0.1", port or 0, is_master=True, wait_for_workers=False)
        port = store.port
    rank, size = str(context.rank), str(context.num_ranks)
    os.environ.update(
        RANK=rank, GROUP_RANK=rank, WORLD_SIZE=size, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    # The number of the call is part of the keys in the store. The processes of a case have made
    # different numbers of calls, and each call has a store of its own.
    rounds._num_calls = 0
    return store


def _close_ranks() -> None:
    """Destroy the process group. Under torchrun, it remains for a later call in the process."""
    import torch.distributed as dist

    if dist.is_initialized():
        # The thread of Gloo needs the GIL to release the tensors of the last collective.
        time.sleep(0.1)
        dist.destroy_process_group()


def use_host_backend() -> None:
    """Let ranks that share a GPU communicate through the backend of the tests, because NCCL refuses
    several ranks on one device."""
    import hostnccl
    import torch
    import torch.distributed as dist

    if getattr(dist, "_uses_host_backend", False):
        return
    hostnccl.register()
    original = dist.get_default_backend_for_device

    def choose(device: str | torch.device) -> str:
        return hostnccl.NAME if torch.device(device).type == "cuda" else original(device)

    dist.get_default_backend_for_device = choose
    dist._uses_host_backend = True  # type: ignore[attr-defined]
