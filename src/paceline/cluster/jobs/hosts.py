"""A config on the hosts of a cluster: what the writers of job files for Slurm and Kubernetes share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.load import Loaded, load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError, nearest
from paceline.core.files import write_atomic
from paceline.core.formatting import counted

MOST_NODES = 10_000
MOST_GPUS = 64

#: Options that both have: how each is read.
COMMON: dict[str, Callable[[str], Any]] = {"nodes": int, "gpus-per-node": int, "output": str}


@dataclass(frozen=True)
class Hosts:
    """A config fitted to a number of hosts.

    Args:
        given: the user's config file.
        words: the user's overrides, ``key=value``.
        own: the overrides that follow from the hosts, which come after the user's.
        loaded: the config with all overrides.
        gpus: per host; 0: its ranks run on the CPU.
    """

    given: Path | None
    words: tuple[str, ...]
    own: tuple[str, ...]
    loaded: Loaded
    nodes: int
    gpus: int

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def ranks_per_node(self) -> int | None:
        """None where each host decides by what it has."""
        count = self.config.parallel.num_gpus
        return None if count == "auto" else int(count)

    @property
    def min_cpus(self) -> int:
        """The cores that a host needs: one for each rank and each of its loader processes."""
        return (self.ranks_per_node or 2) * (1 + self.config.train_args.dataloader_num_workers)


def check_options(tokens: list[str], verb: str, names: Collection[str]) -> None:
    """Raise ConfigError for an option that is neither the verb's own nor a key of the config."""
    from paceline.config.compat.keys import alias_of
    from paceline.config.fields import KEYS

    for token in tokens:
        name = token[2:].partition("=")[0]
        key = name.replace("-", "_")
        known = (
            key == "config"
            or key in KEYS
            or f"train_args.{key}" in KEYS
            or alias_of("", key) is not None
        )
        if not token.startswith("--") or "." in key or known:
            continue
        near = nearest(name.replace("_", "-"), names)
        raise ConfigError(
            f"`--{name}` is neither an option of `paceline {verb}` nor a key of the config",
            allowed=", ".join(f"--{one}" for one in sorted(names)),
            fix=(
                f"did you mean `--{near}`?"
                if near
                else "leave it out, or add it to the file that is written"
            ),
        )


def needed(values: Mapping[str, Any], verb: str, *names: str) -> None:
    """Raise ConfigError where an option that must be given is not."""
    missing = [f"`--{name}`" for name in names if values.get(name) in (None, "")]
    if missing:
        raise ConfigError(
            f"`paceline {verb}` needs {', '.join(missing)}",
            fix=(
                f"write e.g. `paceline {verb} CONFIG.yaml"
                f" {' '.join(_EXAMPLES[name] for name in names)}`"
            ),
        )


_EXAMPLES = {
    "nodes": "--nodes 2",
    "gpus-per-node": "--gpus-per-node 8",
    "time": "--time 4:00:00",
    "image": "--image registry.example.org/paceline:1.0",
}


def plain(name: str, text: str, pattern: str, allowed: str) -> str:
    """``text``, or a ConfigError where the whole of it does not match the pattern."""
    if not text or text.startswith("--"):
        raise ConfigError(
            f"`--{name}` has no value", allowed=allowed, fix=f"write `--{name} VALUE`"
        )
    if re.fullmatch(pattern, text) is None:
        raise ConfigError(
            f"`--{name}` is not of the form that is needed: {text!r}", allowed=allowed
        )
    return text


def time_limit_s(text: str) -> int:
    """A time limit in Slurm's notation, in seconds.

    Raises:
        ConfigError: it is not one.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    numbers = [*([days] if dash else []), *parts]
    seconds = 0
    if len(parts) <= 3 and all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers):
        fields = [int(part) for part in parts]
        if dash:
            hours, minutes, rest_s = [*fields, 0, 0][:3]
        elif len(fields) == 3:
            hours, minutes, rest_s = fields
        else:
            hours, (minutes, rest_s) = 0, [*fields, 0][:2]
        # minutes, seconds that follow a larger unit
        leading = [len(fields) == 3 or bool(dash), len(fields) > 1]
        if not (leading[0] and minutes >= 60) and not (leading[1] and rest_s >= 60):
            seconds = ((int(days) if dash else 0) * 24 + hours) * 3600 + minutes * 60 + rest_s
    if not seconds:
        raise ConfigError(
            f"`--time {text}` is not a time limit",
            allowed=(
                "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,"
                " or with :seconds"
            ),
            fix="write e.g. `--time 4:00:00` for four hours",
        )
    return seconds


def for_hosts(path: Path | None, words: list[str], nodes: int, gpus: int) -> Hosts:
    """Load the config and fit it to the hosts.

    Raises:
        ConfigError: it does not load, or speaks of other hosts, devices or axes.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise ConfigError(f"`--nodes {nodes}` is out of range", allowed=f"1 to {MOST_NODES:,}")
    if not 0 <= gpus <= MOST_GPUS:
        raise ConfigError(
            f"`--gpus-per-node {gpus}` is out of range",
            allowed=f"0 (ranks on the CPU) to {MOST_GPUS}",
        )
    own = _own_words(load_config(path, words).config, nodes, gpus)
    loaded = load_config(path, [*words, *own])
    found = Hosts(path, tuple(words), tuple(own), loaded, nodes, gpus)
    _check_axes(found)
    return found


def _own_words(config: Config, nodes: int, gpus: int) -> list[str]:
    parallel, own = config.parallel, []
    low, high = parallel.hosts
    if high > 1 and not low <= nodes <= high:
        raise ConfigError(
            f"`--nodes {nodes}` was given, and `parallel.nnodes` is {parallel.nnodes}",
            fix=f"give `--nodes {high}`, or leave `parallel.nnodes` out",
        )
    if high == 1 < nodes:
        own.append(f"parallel.nnodes={nodes}")
    if gpus and parallel.device == "cpu":
        raise ConfigError(
            f"`--gpus-per-node {gpus}` was given, and `parallel.device` is cpu",
            fix="give `--gpus-per-node 0`, or leave `parallel.device` out",
        )
    if gpus and parallel.num_gpus not in ("auto", gpus):
        raise ConfigError(
            f"`--gpus-per-node {gpus}` was given, and `parallel.num_gpus` is {parallel.num_gpus}",
            fix=f"give `--gpus-per-node {parallel.num_gpus}`, or leave `parallel.num_gpus` out",
        )
    if not gpus and parallel.device not in ("auto", "cpu"):
        raise ConfigError(
            f"`--gpus-per-node 0` was given, and `parallel.device` is {parallel.device}",
            fix="give the number of devices a host, or leave `parallel.device` out",
        )
    if gpus and parallel.num_gpus == "auto":
        own.append(f"parallel.num_gpus={gpus}")
    if not gpus and parallel.device == "auto":
        own.append("parallel.device=cpu")
    return own


def _check_axes(hosts: Hosts) -> None:
    from paceline.parallel.registry import layout, mode_of

    mode = mode_of(hosts.config.parallel)
    if hosts.nodes > 1 and mode in ("single", "dp"):
        raise ConfigError(
            f"`parallel.mode: {mode}` runs in one process, and {counted(hosts.nodes, 'host')} were"
            " asked for",
            fix="give `--nodes 1`, or set `parallel.mode: ddp`",
        )
    if hosts.ranks_per_node is None or mode == "parameter_server" or ":" in mode:
        return  # how many ranks there will be, or what they do, is not known here
    ranks = hosts.nodes * hosts.ranks_per_node
    try:
        layout(hosts.config.parallel, ranks)
    except ConfigError as error:
        what = (
            f"{counted(hosts.nodes, 'host')} × {counted(hosts.ranks_per_node, 'rank')}:"
            f" {error.what}"
        )
        fix = "change `--nodes`, `--gpus-per-node`, or the sizes of the axes"
        raise ConfigError(what, allowed=error.allowed, fix=fix) from error


def check_output(text: str | None) -> Path | None:
    """Where the job file goes; None: to standard output."""
    if text is None:
        return None
    path = Path(text).expanduser()
    folder = path.absolute().parent
    if (
        not text
        or text.startswith("--")
        or path.is_dir()
        or not folder.is_dir()
        or not os.access(folder, os.W_OK)
    ):
        raise ConfigError(
            f"`--output {text}` cannot be written", allowed="a file in a folder that exists"
        )
    return path


def write(path: Path, text: str) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(
            f"`--output {path}` cannot be written: {error.strerror or error}"
        ) from error
