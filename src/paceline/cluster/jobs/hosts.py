"""A config on the hosts of a cluster: what the writers of job files for Slurm and Kubernetes
share."""

from dataclasses import dataclass
from pathlib import Path

from paceline.config.load import Loaded, load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted


@dataclass(frozen=True)
class Hosts:
    """A config fitted to a number of hosts.

    Args:
        config_path: the user's config file.
        overrides: the user's, ``key=value``.
        derived_overrides: those that follow from the hosts, which come after the user's.
        loaded: the config with all overrides.
        gpus: per host; 0: its ranks run on the CPU.
    """

    config_path: Path | None
    overrides: tuple[str, ...]
    derived_overrides: tuple[str, ...]
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


def fit_to_hosts(path: Path | None, overrides: list[str], nodes: int, gpus: int) -> Hosts:
    """Load the config and fit it to the hosts.

    Raises:
        ConfigError: it does not load, or it names other hosts, devices or axes.
    """
    derived = _derived_overrides(load_config(path, overrides).config, nodes, gpus)
    loaded = load_config(path, [*overrides, *derived])
    hosts = Hosts(path, tuple(overrides), tuple(derived), loaded, nodes, gpus)
    _check_axes(hosts)
    return hosts


def _derived_overrides(config: Config, nodes: int, gpus: int) -> list[str]:
    parallel, overrides = config.parallel, []
    low, high = parallel.hosts
    if high > 1 and not low <= nodes <= high:
        raise ConfigError(
            f"`--nodes {nodes}` was given, and `parallel.nnodes` is {parallel.nnodes}",
            fix=f"give `--nodes {high}`, or leave `parallel.nnodes` out",
        )
    if high == 1 < nodes:
        overrides.append(f"parallel.nnodes={nodes}")
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
        overrides.append(f"parallel.num_gpus={gpus}")
    if not gpus and parallel.device == "auto":
        overrides.append("parallel.device=cpu")
    return overrides


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
