"""Memory settings with which earlier runs on this machine succeeded after they had run out of
memory. Imports no torch."""

import hashlib
import json
import socket
from dataclasses import asdict
from pathlib import Path

from paceline.config.chosen import MEMORY_SETTINGS
from paceline.config.schema import Config
from paceline.core.files import cache_dir, write_json_atomic
from paceline.parallel.registry import ParallelLayout
from paceline.planner.search.trials import Setting, Settings

_FILE = "memory-settings.json"
#: The file keeps this many entries, the latest ones.
_MAX_ENTRIES = 200


def memory_key(config: Config, layout: ParallelLayout, device: str) -> str:
    """Return the key of what decides whether a run fits: model, adapter, lengths, precision,
    optimizer, layout, global batch and device.

    Args:
        config: the config with a resolved precision.
        device: name of the device.
    """
    args = config.train_args
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    values = [
        [socket.gethostname(), device, config.model, config.task],
        config.lora.model_dump(mode="json"),
        [args.max_length, str(args.packing), args.packing_strategy, args.precision, args.optim],
        [layout.strategy, asdict(layout.axes)],
        args.global_batch_size or samples * layout.axes.replicas,
    ]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def recall(key: str) -> dict[str, Setting]:
    """Return the settings that worked; empty if no such run is known."""
    settings = _read().get(key, {})
    return {name: value for name, value in settings.items() if name in MEMORY_SETTINGS}


def remember(key: str, settings: Settings) -> None:
    """Store the settings with which a run was completed."""
    entries = _read()
    entries.pop(key, None)
    entries[key] = dict(settings)
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, dict(list(entries.items())[-_MAX_ENTRIES:]))


def _read() -> dict[str, dict[str, Setting]]:
    try:
        entries = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_valid = isinstance(entries, dict) and all(
        isinstance(each, dict) for each in entries.values()
    )
    return entries if is_valid else {}


def _path() -> Path:
    return cache_dir() / _FILE
