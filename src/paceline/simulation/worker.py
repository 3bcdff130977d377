"""The process that simulates ranks: reads one job per line from standard input, and writes one
result per line to standard output, both as JSON.

It needs the CPU build of torch, which :mod:`paceline.simulation.cuda` changes for the whole
process.
"""

import json
import logging
import os
import sys
import warnings

from paceline.config.packages import unused_packages
from paceline.config.schema import Config
from paceline.core.errors import PacelineError, first_line
from paceline.core.user_code import hide_packages
from paceline.planner.devices import find_device
from paceline.simulation.records import DEVICES_PER_HOST, RankJob, SimulatedRankResult

logger = logging.getLogger(__name__)


def main() -> None:
    """Simulate the ranks of the jobs. A rank that cannot be simulated has a result with
    ``error``."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        results.write(f"{json.dumps(_result(RankJob(**json.loads(line))))}\n")
        results.flush()


def _result(job: RankJob) -> SimulatedRankResult:
    hide_packages(unused_packages(Config.model_validate(job.config)))
    try:
        from paceline.simulation.native import check_release

        check_release()
        from paceline.simulation.cuda import simulate_cuda

        # Before any other module of torch asks for the accelerator.
        simulate_cuda(find_device(job.device)[0], DEVICES_PER_HOST)
        from paceline.simulation.rank import simulate_rank

        return {"report": simulate_rank(job)}
    except PacelineError as error:
        return {"error": str(error)}
    except Exception as error:
        logger.debug("rank %d cannot be simulated", job.rank, exc_info=True)
        text = f"{type(error).__name__}: {first_line(error)}"
        if not isinstance(error, ImportError) and isinstance(error, _errors_of_values()):
            text = f"a step reads values of tensors, which the simulation does not have ({text})"
        return {"error": text}


def _errors_of_values() -> tuple[type[Exception], ...]:
    from paceline.simulation.torch_internals import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    return DataDependentOutputException, DynamicOutputShapeException


if __name__ == "__main__":
    main()
