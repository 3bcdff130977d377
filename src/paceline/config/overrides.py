"""Parse the command line after the command name: a config file, then overrides."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import UnsupportedValue
from paceline.config.compat.keys import Alias, alias_of, ignored_of
from paceline.config.fields import KEYS, takes
from paceline.config.yaml_read import missing_file, parse_value
from paceline.core.errors import ConfigError

_PAIR = re.compile(r"^(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)$", re.DOTALL)
_FLAG_VALUES = {"true", "false", "yes", "no", "on", "off", "auto", "0", "1"}
_FLAGS = {
    "use_dora",
    "push_to_hub",
    "do_train",
    "do_eval",
    "plot_loss",
    "overwrite_output_dir",
    "overwrite_cache",
    "load_in_4bit",
    "bf16",
    "fp16",
    "bfloat16",
    "float16",
    "pure_bf16",
}


def split_cli(tokens: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split the arguments after a command into the config file (or None) and the overrides.

    Accepts ``config.yaml key=value``, ``--config config.yaml --key value``, ``--key=value``,
    ``--flag``; the file is optional. The overrides are returned as ``key=value``, for
    :func:`paceline.config.load.load_config`.

    Raises:
        ConfigError: an argument is neither, the file does not exist, or there are two files.
    """
    files: list[str] = []
    overrides: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token.startswith("--"):
            key, values = _option(token, rest)
            if key == "config":
                files.extend(values)
            else:
                overrides.append(f"{key}={_joined(values)}")
        elif _PAIR.match(token):
            overrides.append(token)
        else:
            files.append(_as_file(token))
    if len(files) > 1:
        raise ConfigError(
            f"expected one config file, got {files[0]} and {files[1]}",
            fix="pass one of them, and change its keys with key=value",
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
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token.startswith("--"):
            key, values = _option(token, rest)
            joined = _joined(values)
            out.append((key, parse_value(joined, f"--{key}"), f"{token.split('=')[0]} {joined}"))
            continue
        match = _PAIR.match(token)
        if match is None:
            raise ConfigError(
                f"`{token}` is not an override",
                allowed="key=value, --key value and --key=value, dotted for nested keys",
                fix=(
                    f"write for example lora.rank={token}"
                    if re.fullmatch(r"-?[\d.]+", token)
                    else "write key=value"
                ),
            )
        out.append((match["key"], parse_value(match["value"], f"{match['key']}="), token))
    return out


def _option(token: str, rest: list[str]) -> tuple[str, list[str]]:
    """Return the key and the values of an option, and remove these from ``rest``."""
    name, equals, inline = token[2:].partition("=")
    key = name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise ConfigError(
            f"`{token}` is not an option",
            allowed="--key value or --key=value",
            fix="write --key value",
        )
    if equals:
        return key, [inline]
    if not rest or _is_next(rest[0]) or (_is_flag(key) and _is_config_file(rest[0])):
        if not _is_flag(key) and key != "config" and _target(key) is not None:
            raise ConfigError(f"`{token}` has no value", fix=f"write {token} VALUE")
        if key == "config":
            raise ConfigError("`--config` has no value", fix="write --config FILE.yaml")
        return _flag(key)
    values = [rest.pop(0)]
    while (
        _takes_several(key)
        and rest
        and not _is_next(rest[0])
        and not rest[0].endswith((".yaml", ".yml"))
    ):
        values.append(rest.pop(0))
    return key, values


def _flag(key: str) -> tuple[str, list[str]]:
    """Return an option without a value: true, or false for the form `--no_KEY` of transformers."""
    negated = _negated(key)
    return (key, ["true"]) if negated is None else (negated, ["false"])


def _negated(key: str) -> str | None:
    """Return KEY of an option `--no_KEY`; None for another option."""
    positive = key.removeprefix("no_")
    is_negation = positive != key and not _is_known(key) and _is_known(positive)
    return positive if is_negation else None


def _is_known(key: str) -> bool:
    return _target(key) is not None or ignored_of(key) is not None


def _is_config_file(token: str) -> bool:
    """Return whether what follows a flag is the config file, not the value of the flag."""
    if token.lower() in _FLAG_VALUES:
        return False
    return token.endswith((".yaml", ".yml")) or Path(token).is_file()


def _joined(values: list[str]) -> str:
    return values[0] if len(values) == 1 else json.dumps(values, ensure_ascii=False)


def _is_next(token: str) -> bool:
    return token.startswith("--") or bool(_PAIR.match(token))


def _target(key: str) -> str | None:
    """Return the native key that a key of the command line sets, or None."""
    for name in (key, f"train_args.{key}"):
        if name in KEYS:
            return name
    section, _, last = key.rpartition(".")
    alias = alias_of(section, last)
    return alias.target if alias else None


def _is_flag(key: str) -> bool:
    """Return whether an option may have no value, which means true."""
    target = _target(key)
    name = key.removeprefix("train_args.")
    if name in _FLAGS or _negated(key) is not None:
        return True
    if not target:
        return key.startswith(("use_", "do_", "load_in_", "save_only_", "disable_"))
    section, _, last = key.rpartition(".")
    alias = None if key in KEYS or f"train_args.{key}" in KEYS else alias_of(section, last)
    return takes(KEYS[target], bool) if alias is None else _has_meaning_for_true(alias)


def _has_meaning_for_true(alias: Alias) -> bool:
    """Return whether a key of another tool sets something if its value is true."""
    try:
        result = alias.convert(True)
    except UnsupportedValue:
        return False
    sets = result.sets | result.weak
    return bool(sets) and all(_is_setting(key, setting) for key, setting in sets.items())


def _is_setting(target: str, value: Any) -> bool:
    """Return whether a value is more than the word that stands for an option without a value."""
    if target not in KEYS:
        return target == "_activation_offload" or target.startswith("_use_")
    return "true" not in str(value).lower() or (value is True and takes(KEYS[target], bool))


def _takes_several(key: str) -> bool:
    """Return whether an option may have several values: lists, and keys of other tools
    (`--loss_scale a b`)."""
    info = KEYS.get(key) or KEYS.get(f"train_args.{key}")
    return info is None or takes(info, list)


def _as_file(token: str) -> str:
    if Path(token).exists() or re.search(r"[/\\]|\.\w+$", token):
        return token
    raise ConfigError(
        f"`{token}` is neither a config file nor an override",
        allowed="one config file, then key=value or --key value",
        fix=(
            "write the key too, as key=value"
            if not token.startswith("-")
            else f"options start with two dashes: -{token}"
        ),
    )
