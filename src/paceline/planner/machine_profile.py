"""What was measured on this machine, kept for the planner."""

import json
import socket
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from paceline.core.files import cache_dir, write_json_atomic

_VERSION = 1


@dataclass(frozen=True)
class Profile:
    """Args: host: name of the machine that was measured; on another the profile is not used.
    device_type: between devices of which kind. num_ranks, num_hosts: that took part. latency_s,
    bandwidth_bytes_s: of an all-reduce, by the α–β model
    (:class:`~paceline.distributed.link.Link`). day: when, as 2026-01-31.
    """

    host: str
    device_type: str
    num_ranks: int
    num_hosts: int
    latency_s: float
    bandwidth_bytes_s: float | None
    day: str


def profile_path() -> Path:
    return cache_dir() / "machine.json"


def keep(
    device_type: str,
    num_ranks: int,
    num_hosts: int,
    latency_s: float,
    bandwidth_bytes_s: float | None,
) -> Path:
    """Write the profile of this machine; the newest measurement wins. Returns where."""
    found = Profile(
        socket.gethostname(),
        device_type,
        num_ranks,
        num_hosts,
        latency_s,
        bandwidth_bytes_s,
        date.today().isoformat(),
    )
    path = profile_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"version": _VERSION, **asdict(found)})
    return path


def read(device_type: str) -> Profile | None:
    """The profile of this machine for devices of this kind; None where there is none, or none that
    can be read."""
    try:
        found = json.loads(profile_path().read_text())
        if found.pop("version") != _VERSION:
            return None
        profile = Profile(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return (
        profile
        if (profile.host, profile.device_type) == (socket.gethostname(), device_type)
        else None
    )
