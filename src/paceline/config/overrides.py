"""Parse the command line after the command name: a config file, then overrides."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from paceline.config.fields import KEYS, takes
from paceline.config.yaml_read import missing_file, parse_value
from paceline.core.errors import ConfigError

_PAIR = re.compile(r"^(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)$", re.DOTALL)


def split_cli(tokens: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split the arguments after a command into the config file (or None) and the overrides.

    Accepts ``config.yaml key=value``, ``--config config.yaml --key value``, ``--key=value``,
    ``--flag``; the file is optional. An option without a value is true: if the next argument is an
    option, a ``key=value`` or the config file, or if there is none. The overrides are returned as
    ``key=value``, for :func:`paceline.config.load.load_config`.

    Raises:
        ConfigError: an argument is neither, the file does not exist, or there are two files.
    """
    files: list[str] = []
    overrides: list[str] = []
    for key, values, token in _split(tokens):
        if not key:
            files.append(_as_file(token))
        elif key == "config" and token.startswith("--"):
            files.extend(values)
        else:
            overrides.append(f"{key}={_joined(values)}")
    if len(files) > 1:
        raise ConfigError(
            "expected one config file, got {first} and {second}",
            code="several-config-files",
            fix="pass one of them, and change its keys with key=value",
            first=files[0],
            second=files[1],
        )
    path = Path(files[0]) if files else None
    if path is not None and not path.exists():
        raise missing_file(path)
    return path, overrides


def parse_tokens(tokens: Iterable[str]) -> list[tuple[str, Any, str]]:
    """Parse overrides into (dotted key, value, the argument as written).

    Raises:
        ConfigError: an argument is not an override.
    """
    out: list[tuple[str, Any, str]] = []
    for key, values, token in _split(tokens):
        if not key:
            raise ConfigError(
                "`{token}` is not an override",
                code="incomplete-override",
                allowed="key=value, --key value and --key=value, dotted for nested keys",
                fix="write for example lora.rank={token}"
                if re.fullmatch("-?[\\d.]+", token)
                else "write key=value",
                token=token,
            )
        text, is_option = _joined(values), token.startswith("--")
        value = parse_value(text, f"--{key}" if is_option else f"{key}=")
        out.append((key, value, f"{token.split('=')[0]} {text}" if is_option else token))
    return out


def _split(tokens: Iterable[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield the key, the values and the first argument of each override, and arguments that are not
    an override, with an empty key."""
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        match = _PAIR.match(token)
        if token.startswith("--"):
            yield (*_option(token, rest), token)
        elif match is not None:
            yield match["key"], [match["value"]], token
        else:
            yield "", [], token


def _option(token: str, rest: list[str]) -> tuple[str, list[str]]:
    """Return the key and the values of an option, and remove these from ``rest``."""
    name, equals, inline = token[2:].partition("=")
    key = name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise ConfigError(
            "`{token}` is not an option",
            code="invalid-option-name",
            allowed="--key value or --key=value",
            fix="write --key value",
            token=token,
        )
    if equals:
        return key, [inline]
    info = _native(key)
    if not rest or _is_next(rest[0]) or _is_config_file(key, info, rest[0]):
        if key == "config":
            raise ConfigError(
                "`--config` has no value",
                code="config-without-value",
                fix="write --config FILE.yaml",
            )
        if info is not None and not takes(info, bool):
            raise ConfigError(
                "`{token}` has no value",
                code="option-without-value",
                fix="write {token} VALUE",
                token=token,
            )
        return _flag(key)
    values = [rest.pop(0)]
    while (
        (info is None or takes(info, list))  # as `--loss_scale a b` of other tools
        and rest
        and not _is_next(rest[0])
        and not rest[0].endswith((".yaml", ".yml"))
    ):
        values.append(rest.pop(0))
    return key, values


def _flag(key: str) -> tuple[str, list[str]]:
    """Return an option without a value: true, or false for the form `--no_KEY` of transformers."""
    positive = key.removeprefix("no_")
    is_negation = positive != key and not _is_known(key) and _is_known(positive)
    return (positive, ["false"]) if is_negation else (key, ["true"])


def _native(key: str) -> FieldInfo | None:
    """Return the field of a native key, which may leave out `train_args`."""
    return KEYS.get(key) or KEYS.get(f"train_args.{key}")


def _is_known(key: str) -> bool:
    if _native(key) is not None:
        return True
    from paceline.config.compat.keys import alias_of, ignored_of

    return alias_of("", key) is not None or ignored_of(key) is not None


def _is_config_file(key: str, info: FieldInfo | None, token: str) -> bool:
    """Return whether the argument after an option is the config file instead of its value. Other
    tools' options for data may have a YAML file as their value."""
    if key == "config":
        return False
    may_be_flag = "dataset" not in key if info is None else takes(info, bool)
    return may_be_flag and token.endswith((".yaml", ".yml")) and Path(token).is_file()


def _joined(values: list[str]) -> str:
    return values[0] if len(values) == 1 else json.dumps(values, ensure_ascii=False)


def _is_next(token: str) -> bool:
    return token.startswith("--") or bool(_PAIR.match(token))


def _as_file(token: str) -> str:
    if Path(token).exists() or re.search(r"[/\\]|\.\w+$", token):
        return token
    raise ConfigError(
        "`{token}` is neither a config file nor an override",
        code="not-an-override",
        allowed="one config file, then key=value or --key value",
        fix="write the key too, as key=value"
        if not token.startswith("-")
        else "options start with two dashes: -{token}",
        token=token,
    )
