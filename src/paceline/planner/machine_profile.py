"""Measurements of this machine by `paceline doctor`, saved for the planner."""

import json
import socket
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from paceline.core.files import cache_dir, write_json_atomic

_VERSION = 1
_FILE = "machine.json"


@dataclass(frozen=True)
class Profile:
    """A measured link between ranks.

    Args:
        host: name of the measured machine; other machines ignore the profile.
        device_type: type of the ranks' devices.
        latency_s, bandwidth_bytes_s: of an all-reduce, by the α–β model
            (:class:`~paceline.distributed.link.Link`).
        day: date of the measurement, as 2026-01-31.
    """

    host: str
    device_type: str
    num_ranks: int
    num_hosts: int
    latency_s: float
    bandwidth_bytes_s: float | None
    day: str


def save(
    device_type: str,
    num_ranks: int,
    num_hosts: int,
    latency_s: float,
    bandwidth_bytes_s: float | None,
) -> Path:
    """Write the profile of this machine, replacing an earlier one. Return its path."""
    profile = Profile(
        socket.gethostname(),
        device_type,
        num_ranks,
        num_hosts,
        latency_s,
        bandwidth_bytes_s,
        date.today().isoformat(),
    )
    path = cache_dir() / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"version": _VERSION, **asdict(profile)})
    return path


def read(device_type: str) -> Profile | None:
    """Return the profile of this machine for this device type; None if there is no readable one."""
    try:
        content = json.loads((cache_dir() / _FILE).read_text())
        if content.pop("version") != _VERSION:
            return None
        profile = Profile(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_this_machine = profile.host == socket.gethostname()
    return profile if is_this_machine and profile.device_type == device_type else None
