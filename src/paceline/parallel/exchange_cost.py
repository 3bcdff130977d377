"""The traffic of context parallelism, with any strategy. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import replace

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.models.builtin import config_numbers
from paceline.models.context.choice import element_bytes_of
from paceline.models.context.geometry import read_geometry
from paceline.models.context.traffic import busiest_rank_bytes
from paceline.parallel.cost import Workload


def exchange_traffic(config: Config, dims: ParallelDims, work: Workload) -> Mapping[str, int]:
    """Return the bytes per step, by collective, that the rank of a context group sends that sends
    most. They are 0 if the sizes of the model are not known."""
    geometry = read_geometry(config_numbers(config.model), dims.tensor)
    if geometry is None or work.context is None or not work.context.rows:
        return {}
    layers = math.ceil(geometry.num_layers / dims.pipeline)
    forwards = 1 + config.train_args.recomputed_share(geometry.num_layers)
    per_row = busiest_rank_bytes(
        replace(geometry, windows=geometry.windows[:layers]),
        work.context.method,
        work.context.rows,
        dims.context,
        element_bytes=element_bytes_of(config),
        forwards=forwards,
    )
    return {kind: work.micro_batches * size_bytes for kind, size_bytes in per_row.items()}
