"""Which ranks are servers and which are workers. Imports no torch."""

from paceline.config.schema import Config
from paceline.config.schema.parallel import ParameterServer
from paceline.distributed.mesh import ParallelDims

_PACKAGE = "paceline.strategies.parameter_server"


def implementation(config: Config) -> str:
    """Return the strategy for the section ``parameter_server``."""
    if config.parameter_server.consistency == "sync":
        return f"{_PACKAGE}.strategy:ParameterServerStrategy"
    return f"{_PACKAGE}.asynchronous:AsyncServerStrategy"


def extra_ranks(config: Config) -> int:
    """Return the number of servers, which are the last ranks of the world."""
    return config.parameter_server.num_servers


def rank_role(config: Config, dims: ParallelDims, rank: int) -> str | None:
    """Return the role of a rank, for messages about its exit."""
    return "a worker" if rank < dims.replicas else "a server of the tables"


def expendable_ranks(config: Config, dims: ParallelDims) -> frozenset[int]:
    """Return the workers if the others continue without one."""
    continues = config.parameter_server.on_worker_failure == "continue"
    return frozenset(range(dims.replicas)) if continues else frozenset()


def describe_roles(
    options: ParameterServer, num_workers: int, num_ranks: int, worker_device: str = "cpu"
) -> str:
    """Return one line: which ranks store what, which train, and what happens if one of these
    dies. ``worker_device``: type of the workers' devices."""
    stored = "the tables and all other parameters" if options.dense_on_servers else "the tables"
    servers = _ranks(range(num_workers, num_ranks))
    if worker_device != "cpu":
        servers += f", in host memory, for workers on {worker_device}"
    if num_workers == 1:
        return f"parameter server: {stored} are on {servers}; rank 0 trains"
    continues = options.on_worker_failure == "continue"
    then = "the others continue" if continues else "all ranks restart from the latest checkpoint"
    return (
        f"parameter server: {stored} are on {servers}; {_ranks(range(num_workers))} train; if a"
        f" worker fails, {then}"
    )


def _ranks(ranks: range) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]} {'and' if len(ranks) == 2 else 'to'} {ranks[-1]}"
