"""What differs between configs."""

from typing import Any

_ABSENT = object()
_NOT_TOLD = {"output_dir"}  # differs always


def differences(configs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """``{key, values: {id: value}}`` for each dotted key whose value is not the same in all; None
    where one has no such key."""
    flat = {id: dict(_flat(config)) for id, config in configs.items()}
    keys = list(dict.fromkeys(key for one in flat.values() for key in one))
    found = []
    for key in keys:
        values = {id: one.get(key, _ABSENT) for id, one in flat.items()}
        first = next(iter(values.values()))
        if key not in _NOT_TOLD and any(
            value is _ABSENT or value != first for value in values.values()
        ):
            found.append(
                {
                    "key": key,
                    "values": {
                        id: None if value is _ABSENT else value for id, value in values.items()
                    },
                }
            )
    return found


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
