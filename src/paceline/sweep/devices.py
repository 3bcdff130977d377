"""Divide the devices of this machine among runs that train at the same time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.core.formatting import shares

#: Type of accelerator → the variable that limits the visible ones. ROCm's devices are `cuda` too.
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@dataclass(frozen=True)
class DeviceShare:
    """The devices of one of the runs at a time.

    Args:
        variables: environment variables that hide the other devices.
        cores: the cores of its processes; None for all.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] | None = None


def divide_devices(parallel: Parallel, num_runs: int) -> list[DeviceShare]:
    """Return disjoint shares for ``num_runs`` runs at a time, all with the same number of devices.

    Raises:
        ConfigError: there are not enough devices.
    """
    if num_runs == 1:
        return [DeviceShare()]
    kind: str | None = "cpu"
    names: list[str] = []
    if parallel.device != "cpu":
        from paceline.distributed.devices import accelerators

        kind, names = accelerators()
    if not names:
        return divide_cores(_usable_cores(), num_runs)
    available = len(names) // num_runs
    num_ranks = available if parallel.num_gpus == "auto" else int(parallel.num_gpus)
    if not 1 <= num_ranks <= available or kind not in _VISIBLE:
        raise ConfigError(
            "`--parallel {num_runs}` needs separate devices for {num_runs} runs with"
            " `parallel.num_gpus: {num_gpus}`, and this machine has {num_names} × {kind}",
            code="too-few-devices-for-sweep",
            fix="lower `--parallel` or `parallel.num_gpus`",
            num_runs=num_runs,
            num_gpus=parallel.num_gpus,
            num_names=len(names),
            kind=kind,
        )
    return divide_accelerators(kind, len(names), num_ranks, num_runs, os.environ)


def divide_accelerators(
    kind: str, count: int, num_ranks: int, num_runs: int, environment: Mapping[str, str]
) -> list[DeviceShare]:
    """Return shares of ``num_ranks`` of the ``count`` visible accelerators, which may already be
    limited by the environment."""
    variable = _VISIBLE[kind]
    visible = [name.strip() for name in environment.get(variable, "").split(",") if name.strip()]
    visible = visible[:count] or [str(index) for index in range(count)]
    return [
        DeviceShare({variable: ",".join(visible[run * num_ranks : (run + 1) * num_ranks])})
        for run in range(num_runs)
    ]


def divide_cores(cores: Sequence[int], num_runs: int) -> list[DeviceShare]:
    """Return shares of the processor's cores.

    Raises:
        ConfigError: there are fewer cores than runs.
    """
    if len(cores) < num_runs:
        raise ConfigError(
            "`--parallel {num_runs}`: runs on a CPU need separate cores, and this process may use"
            " {num_cores:core}",
            code="not-enough-cores",
            allowed="1 to {num_cores}",
            num_runs=num_runs,
            num_cores=len(cores),
        )
    divided, start = [], 0
    for size in shares(len(cores), num_runs):
        divided.append(DeviceShare(cores=tuple(cores[start : start + size])))
        start += size
    return divided


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
