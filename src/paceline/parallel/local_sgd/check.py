"""Whether the numbers of local training go together."""

from paceline.config.schema import Config
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.local_sgd.schedule import check_rhythm, num_workers


def check_sizes(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for workers that do not divide the ranks, or a synchronization that would
    not be made."""
    settings = config.local_sgd
    if settings.workers is not None:
        num_workers(settings, RankEnv(world_size=dims.data, local_world_size=dims.data))
    check_rhythm(settings, config.train_args.max_steps)


def check_steps(config: Config, steps: int) -> None:
    """Raise ConfigError where the workers would not be brought together within ``steps``."""
    check_rhythm(config.local_sgd, steps)
