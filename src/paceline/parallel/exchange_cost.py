"""The traffic of context parallelism, with any strategy. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import replace

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.models.builtin import config_numbers
from paceline.models.context.choice import compute_dtype
from paceline.models.context.facts import attention_facts
from paceline.models.context.traffic import busiest_rank_bytes
from paceline.parallel.cost import Workload


def exchange_traffic(config: Config, dims: ParallelDims, work: Workload) -> Mapping[str, int]:
    """Return the bytes per step, by collective, that the rank of a context group sends that sends
    most."""
    assert work.context is not None, "the workload says how rows are divided"
    facts = attention_facts(config_numbers(config.model), dims.tensor)
    layers = math.ceil(len(facts.windows) / dims.pipeline)
    per_row = busiest_rank_bytes(
        replace(facts, windows=facts.windows[:layers]),
        work.context.method,
        work.context.rows,
        dims.context,
        4 if compute_dtype(config) == "float32" else 2,
        forwards=1 + config.extra_forwards + config.train_args.recomputed_share(len(facts.windows)),
    )
    return {kind: work.micro_batches * size_bytes for kind, size_bytes in per_row.items()}
