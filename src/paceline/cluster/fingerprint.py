"""What must be the same on all hosts of a run."""

import hashlib
import platform
from pathlib import Path
from typing import Any

from paceline.config.schema import Config


def config_values(config: Config) -> dict[str, Any]:
    """What must be the same on every host: the config by dotted key, without what is a host's
    own."""
    values: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        values.update(
            {f"{name}.{key}": entry for key, entry in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    for name in ("node_rank", "interface", "num_gpus"):
        del values[f"parallel.{name}"]
    return values


def plan_values(spec: Any) -> dict[str, Any]:
    """What must come out the same on every host when it has read the data and the checkpoints."""
    step = None if spec.resume_from is None else Path(spec.resume_from).name
    return {
        "data": spec.data.fingerprint,
        "resumes from": step,
        "steps": spec.derived.steps,
        "global batch": spec.derived.global_batch_size,
        "strategy": spec.layout.strategy,
        "ranks": spec.layout.num_processes,
    }


def software() -> dict[str, str]:
    import torch

    from paceline.version import __version__

    return {
        "paceline": __version__,
        "code": _code_digest(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
    }


def _code_digest() -> str:
    """A digest of this package's source."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def difference(
    first: dict[str, Any], other: dict[str, Any], first_host: str, other_host: str
) -> str | None:
    """How the values of ``other_host`` differ from those of ``first_host``, for an error message;
    None where they are equal."""
    differing = [
        f"{name}: {other.get(name)!r} on {other_host}, {first.get(name)!r} on {first_host}"
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    if not differing:
        return None
    return (
        f"host {other_host} would not train the same run as host {first_host}."
        f" {'; '.join(differing)}. To fix: give every host the same code, config and data"
    )
