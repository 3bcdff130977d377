"""Fit a config to the hosts of a cluster: shared by the job files for Slurm and Kubernetes."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

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
        derived_overrides: those that follow from the hosts, after the user's.
        loaded: the config with all overrides.
        gpus: per host; 0: the ranks run on the CPU.
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
        """The number of ranks per host; None if each host decides by its devices."""
        count = self.config.parallel.num_gpus
        return None if count == "auto" else int(count)

    @property
    def min_cpus(self) -> int:
        """The cores that a host needs: one for each rank and for each loader process."""
        device_type = "cuda" if self.gpus else "cpu"
        loaders = self.config.train_args.num_loader_processes(device_type)
        return (self.ranks_per_node or 2) * (1 + loaders)


def fit_to_hosts(path: Path | None, overrides: list[str], nodes: int, gpus: int) -> Hosts:
    """Load the config and fit it to the hosts.

    Raises:
        ConfigError: it cannot be loaded, or its hosts, devices or axes differ.
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
            "`--nodes {nodes}` conflicts with `parallel.nnodes: {nnodes}`",
            code="nodes-conflict",
            fix="set `--nodes {high}`, or remove `parallel.nnodes`",
            nodes=nodes,
            nnodes=parallel.nnodes,
            high=high,
        )
    if high == 1 < nodes:
        overrides.append(f"parallel.nnodes={nodes}")
    if gpus and parallel.device == "cpu":
        raise ConfigError(
            "`--gpus-per-node {gpus}` conflicts with `parallel.device: cpu`",
            code="gpus-with-cpu",
            fix="set `--gpus-per-node 0`, or remove `parallel.device`",
            gpus=gpus,
        )
    if gpus and parallel.num_gpus not in ("auto", gpus):
        raise ConfigError(
            "`--gpus-per-node {gpus}` conflicts with `parallel.num_gpus: {num_gpus}`",
            code="gpus-conflict",
            fix="set `--gpus-per-node {num_gpus}`, or remove `parallel.num_gpus`",
            gpus=gpus,
            num_gpus=parallel.num_gpus,
        )
    if not gpus and parallel.device not in ("auto", "cpu"):
        raise ConfigError(
            "`--gpus-per-node 0` conflicts with `parallel.device: {device}`",
            code="no-gpus-for-device",
            fix="set `--gpus-per-node` to the number of devices per host, or remove"
            " `parallel.device`",
            device=parallel.device,
        )
    if gpus and parallel.num_gpus == "auto":
        overrides.append(f"parallel.num_gpus={gpus}")
    if not gpus and parallel.device == "auto":
        overrides.append("parallel.device=cpu")
    return overrides


def _check_axes(hosts: Hosts) -> None:
    from paceline.parallel.registry import get_spec, layout, mode_of

    mode = mode_of(hosts.config.parallel)
    spec = None if mode == "auto" or ":" in mode else get_spec(mode)
    if hosts.nodes > 1 and spec is not None and not spec.spans_hosts:
        raise ConfigError(
            "`parallel.mode: {mode}` is not supported with `--nodes {nodes}`: it runs in one"
            " process",
            code="mode-on-several-hosts",
            fix="set `--nodes 1`, or `parallel.mode: ddp`",
            mode=mode,
            nodes=hosts.nodes,
        )
    has_extra_ranks = spec is not None and spec.extra_ranks(hosts.config) > 0
    if hosts.ranks_per_node is None or has_extra_ranks or ":" in mode:
        return  # the number or the roles of the ranks are not known here
    ranks = hosts.nodes * hosts.ranks_per_node
    try:
        layout(hosts.config.parallel, ranks)
    except ConfigError as error:
        size = f"{counted(hosts.nodes, 'host')} × {counted(hosts.ranks_per_node, 'rank')}"
        raise ConfigError(
            "{size}: {reason}",
            code="invalid-layout",
            allowed=error.allowed,
            fix="change `--nodes`, `--gpus-per-node`, or the sizes of the axes",
            size=size,
            reason=error.what,
        ) from error


@cache
def template(name: str) -> Template:
    """Load a template of a job file."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # keep the order of keys
    return environment.get_template(name)
