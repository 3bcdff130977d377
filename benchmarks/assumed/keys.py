"""The keys of assumptions: describe a set-up that differs from the config's, even one that Paceline
does not train."""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from paceline.core.errors import ConfigError, nearest
from paceline.planner.setup import TrainingSetup

Value = int | float | str | bool | tuple[str, ...]

#: Ranks of each axis.
AXES = ("data", "shard", "tensor", "pipeline", "context", "expert")
#: Fields of the set-up that assumptions do not set: the config and its data do.
_FIXED = ("dims", "label_share", "bucket_bytes", "sync_bytes")
_GIGABYTE_KEYS = {
    "link_gb_s": "link_bytes_s",
    "host_network_gb_s": "host_network_bytes_s",
}
OFFLOADED = ("optimizer", "weights", "activations")


@dataclass(frozen=True)
class _Key:
    """A key of an assumption: its type, and the values that are allowed, if they are few."""

    kind: type
    allowed: tuple[str, ...] = ()

    def text(self) -> str:
        if self.allowed:
            return ", ".join(self.allowed)
        return {int: "an integer of at least 0", float: "a number", bool: "true or false"}.get(
            self.kind, "text"
        )


def _keys() -> dict[str, _Key]:
    hints = typing.get_type_hints(TrainingSetup)
    keys = {}
    for field in fields(TrainingSetup):
        hint = hints[field.name]
        if field.name in (*_FIXED, *_GIGABYTE_KEYS.values()):
            continue
        if typing.get_origin(hint) is typing.Literal:
            keys[field.name] = _Key(str, typing.get_args(hint))
        elif field.name == "offload":
            keys[field.name] = _Key(tuple, OFFLOADED)
        else:
            keys[field.name] = _Key(hint)
    return keys | dict.fromkeys(_GIGABYTE_KEYS, _Key(float))


KEYS = _keys()


def parse_assumptions(texts: Iterable[str]) -> dict[str, Value]:
    """Parse assumptions: ``tensor=8`` → {"tensor": 8}.

    Raises:
        ConfigError: a text has no ``=``, its key is unknown, or its value is not allowed.
    """
    values: dict[str, Value] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(
                f"`{text}` has no value",
                code="missing-value",
                fix="write e.g. `tensor=8`",
            )
        key = KEYS.get(name)
        if key is None:
            close = nearest(name, KEYS)
            raise ConfigError(
                f"unknown key `{name}` in `{text}`",
                code="unknown-key",
                allowed=", ".join(sorted(KEYS)),
                fix=None if close is None else f"did you mean `{close}`?",
            )
        values[name] = _parse(text, key, value)
    return values


def _parse(text: str, key: _Key, value: str) -> Value:
    error = ConfigError(f"`{text}` is not possible", code="wrong-type", allowed=key.text())
    if key.kind is tuple:
        parts = tuple(part for part in value.split(",") if part and part != "none")
        if not set(parts) <= set(key.allowed):
            raise error
        return parts
    if key.allowed:
        if value not in key.allowed:
            raise error
        return value
    if key.kind is bool:
        if value.lower() not in ("true", "false"):
            raise error
        return value.lower() == "true"
    try:
        number = int(value) if key.kind is int else float(value)
    except ValueError:
        raise error from None
    if number < 0:
        raise error
    return number


def assume(setup: TrainingSetup, values: Mapping[str, Value]) -> TrainingSetup:
    """Return the set-up with other values.

    If an axis of the mesh is among them, all that are not have size 1: an assumed layout replaces
    the config's.

    Raises:
        ConfigError: the sizes of the axes do not fit the model or each other.
    """
    changed: dict[str, Value] = dict(values)
    for key, field in _GIGABYTE_KEYS.items():
        if key in changed:
            changed[field] = float(changed.pop(key)) * 1e9  # type: ignore[arg-type]
    if any(axis in values for axis in AXES):
        changed = dict.fromkeys(AXES, 1) | changed
    assumed = replace(setup, **changed)  # type: ignore[arg-type]
    _check(assumed)
    return assumed


def check_experts(setup: TrainingSetup) -> None:
    """Check that the ranks of ``expert`` divide the experts, and are a part of the replicas.

    Raises:
        ConfigError: they do not.
    """
    if setup.dims.experts % setup.expert:
        raise ConfigError(
            f"`expert={setup.expert}` does not divide the {setup.dims.experts} experts of the model"
        )
    if (setup.replicas * setup.context) % setup.expert:
        raise ConfigError(
            f"`expert={setup.expert}` does not divide the"
            f" {setup.replicas * setup.context} ranks of data, shard and context, which it is a"
            " part of"
        )


def _check(setup: TrainingSetup) -> None:
    for name in (*AXES, "samples", "length", "micro_batches", "chunks", "devices_per_host"):
        if getattr(setup, name) <= 0:
            raise ConfigError(
                f"`{name}={getattr(setup, name):g}` must be positive", code="out-of-range"
            )
    if setup.dims.layers < setup.pipeline * setup.chunks:
        raise ConfigError(
            f"{setup.pipeline * setup.chunks} pipeline stages are not possible: the model has"
            f" {setup.dims.layers} layers",
            code="too-many-stages",
        )
    if setup.zero_stage > 3:
        raise ConfigError(
            f"`zero_stage={setup.zero_stage}`",
            code="unknown-value",
            allowed="0, 1, 2 or 3",
        )
