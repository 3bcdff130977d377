"""Which ranks serve and which train. Imports no torch."""

from paceline.config.schema import Config
from paceline.config.schema.parallel import ParameterServer
from paceline.distributed.mesh import ParallelDims

_PACKAGE = "paceline.parallel.parameter_server"


def implementation(config: Config) -> str:
    """The strategy for the section ``parameter_server``."""
    if config.parameter_server.consistency == "sync":
        return f"{_PACKAGE}.strategy:ParameterServerStrategy"
    return f"{_PACKAGE}.asynchronous:AsyncServerStrategy"


def extra_ranks(config: Config) -> int:
    """The servers: the last ranks of the world."""
    return config.parameter_server.num_servers


def rank_role(config: Config, dims: ParallelDims, rank: int) -> str | None:
    """What a rank is, for messages about its end."""
    return "a worker" if rank < dims.replicas else "a server of the tables"


def expendable_ranks(config: Config, dims: ParallelDims) -> frozenset[int]:
    """The workers, where the others continue without one."""
    continues = config.parameter_server.on_worker_failure == "continue"
    return frozenset(range(dims.replicas)) if continues else frozenset()


def who_does_what(options: ParameterServer, num_workers: int, num_ranks: int) -> str:
    """One line: which ranks serve what, which train, and what a loss among them means."""
    what = "the tables and all other parameters" if options.dense_on_servers else "the tables"
    text = f"parameter server: {what} lie on {_ranks(range(num_workers, num_ranks))}; "
    if num_workers == 1:
        return text + "rank 0 trains"
    then = "the others go on" if options.on_worker_failure == "continue" else "the run ends"
    return text + f"{_ranks(range(num_workers))} train; where one of these dies, {then}"


def _ranks(ranks: range) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]} {'and' if len(ranks) == 2 else 'to'} {ranks[-1]}"
