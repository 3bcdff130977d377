"""A Ray Train worker. It takes the same path as a rank under torchrun, with the driver's config."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cluster.failures import AgentFolder, failure_of
from paceline.cluster.member import PreviousRound, run_under_agent
from paceline.cluster.ray.record import (
    AttemptStart,
    OutOfMemoryFailure,
    WorkerPlace,
)
from paceline.cluster.rounds import settings_after
from paceline.config.load import Loaded
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.event_log import tail_events
from paceline.core.failures import ExitRecord, FailureKind, ReportedError, classify
from paceline.core.files import Scratch
from paceline.core.log import CONSOLE_ONLY, configure_logging
from paceline.core.processes import host_name
from paceline.core.run_dir import RunDir
from paceline.launch.passes.draft import Draft
from paceline.train.run_spec import TrainResult

logger = logging.getLogger(__name__)

_POLL_S = 1.0
#: How long a worker with a final failure waits for the others to report the same one, before Ray
#: ends them.
_AGREE_S = 5.0


@dataclass(frozen=True)
class RayWorkerTask:
    """What the driver sends to every worker.

    Args:
        loaded: the config, with an absolute ``output_dir``.
        directory: the driver's working directory, for relative paths in the config; None if Ray
            copies a working directory to the nodes.
        version: version of Paceline on the driver.
        record: handle of the actor :class:`~paceline.cluster.ray.record.RayRunRecord`.
    """

    loaded: Loaded
    directory: str | None
    version: str
    allow_config_change: bool
    started_at: float
    record: Any


def train_worker(task: RayWorkerTask) -> ExitRecord:
    """Train on this worker, and return how this rank ended.

    An exception makes Ray restart all workers. A failure that would repeat is therefore returned if
    all workers report one; otherwise the record stores it, so that the workers of the next attempt
    end immediately. After a lack of memory, the next attempt has smaller memory settings.
    """
    import ray
    import ray.train

    configure_logging()
    final: ExitRecord | None = ray.get(task.record.final_failure.remote())
    if final is not None:
        return final
    ray_rank = ray.train.get_context().get_world_rank()
    try:
        attempt = _begin_attempt(task)
        result = _run(task, attempt)
    except Exception as error:
        failed = _failed(error)
        if isinstance(error, ConfigError | ReportedError) and failed.cause.is_permanent:
            return _fail_finally(task, ray_rank, failed, error)
        ray.get(task.record.fail.remote(ray_rank, failed))
        raise
    ray.get(task.record.finish.remote(attempt.order.index(ray_rank), result))
    return result


def _failed(error: Exception) -> ExitRecord:
    """Return the record of a failure. A rank has already described its own in one paragraph."""
    if isinstance(error, PacelineError):
        message = error.paragraph()
    else:
        message = f"{type(error).__name__}: {error}"
    return ExitRecord.failed(classify(error), message)


def _run(task: RayWorkerTask, attempt: AttemptStart) -> ExitRecord:
    import ray

    run_dir = RunDir(Path(task.loaded.config.output_dir))
    is_first = os.environ["RANK"] == "0"
    if is_first and attempt.lost_folder_of is not None and not run_dir.is_run():
        raise ConfigError(
            "cannot resume the run: its folder {root} is on {lost_folder_of}, which no longer runs"
            " a worker, and {host_name} does not see that folder",
            code="folder-on-lost-host",
            fix="set `output_dir` to a folder on storage that all nodes share",
            root=run_dir.root,
            lost_folder_of=attempt.lost_folder_of,
            host_name=host_name(),
        )
    fault, started_at = attempt.fault, task.started_at
    if fault is not None:
        fault, started_at = {**fault, "step": _last_step(run_dir)}, float(fault["seen_at"])
        if is_first:
            logger.warning(
                "%s. Ray has restarted the workers (restart %d)",
                fault["reason"],
                fault["restart"],
                extra=CONSOLE_ONLY,
            )
    if is_first:
        nodes = _nodes(ray.get(task.record.places.remote()))
        logger.info("Ray nodes: %s", nodes, extra=CONSOLE_ONLY)
    with _reporting(task, run_dir) if is_first else contextlib.nullcontext():
        loaded = task.loaded if is_first else replace(task.loaded, notices=[])
        draft = Draft(
            loaded, started_at, allow_config_change=task.allow_config_change, failure=fault
        )
        result = _train(task, attempt, draft)
    status = "stopped" if result.report is None else result.report.get("status", "stopped")
    return ExitRecord(status, result.exit_code, result.report)


def _train(task: RayWorkerTask, attempt: AttemptStart, draft: Draft) -> TrainResult:
    """Train. If this worker runs out of memory and the next attempt can have smaller memory
    settings, the error makes Ray start that attempt."""
    import ray

    before = attempt.out_of_memory
    with Scratch() as scratch:
        folder = AgentFolder(scratch)
        if before is not None:
            folder.write_state(before.state)
        previous = PreviousRound(folder, None if before is None else before.failure)
        try:
            return run_under_agent(draft, previous=previous)
        except PacelineError as error:
            failure = _memory_failure(folder, draft.loaded)
            if failure is None or not ray.get(task.record.run_out_of_memory.remote(failure)):
                raise
            raise ReportedError(error.paragraph(), error.exit_code) from error


def _memory_failure(folder: AgentFolder, loaded: Loaded) -> OutOfMemoryFailure | None:
    """Return the failure of this worker if smaller memory settings may solve it, else None."""
    record, state = folder.take(int(os.environ["LOCAL_RANK"])), folder.read_state()
    memory = state.get("memory")
    failed = failure_of(record) if "start" in record else None
    if memory is None or failed is None or failed.cause.kind is not FailureKind.MEMORY:
        return None  # the worker may have failed before it joined the others
    if settings_after(loaded.config, memory, failed) is None:
        return None
    return OutOfMemoryFailure(failed, state)


def _begin_attempt(task: RayWorkerTask) -> AttemptStart:
    """Enter the working directory, and number the ranks so that rank 0 stays on its node. A
    collective of all workers."""
    import ray
    import ray.util

    from paceline.version import __version__

    context = ray.get_runtime_context()
    place = WorkerPlace(
        context.get_node_id(), ray.util.get_node_ip_address(), host_name(), os.getpid()
    )
    gathered = _gather((place, __version__))
    places = [place for place, _ in gathered]
    # only one worker calls it, because the record counts attempts
    attempt: AttemptStart = _broadcast(
        ray.get(task.record.begin_attempt.remote(places)) if _rank() == 0 else None
    )
    if attempt.order != list(range(len(places))):
        _renumber(attempt.order)
    else:
        # torchrun's variable for the number of the node
        os.environ["GROUP_RANK"] = os.environ["NODE_RANK"]
    differing = sorted(
        {f"{place.host} has {version}" for place, version in gathered if version != task.version}
    )
    if differing:
        raise ConfigError(
            "the driver has Paceline {version}, but {differing}",
            code="different-versions",
            fix="install the same version on all nodes",
            version=task.version,
            differing=", ".join(differing),
        )
    if task.directory is not None:
        if not os.path.isdir(task.directory):
            raise ConfigError(
                "{host} does not have the working directory of the driver, {directory}",
                code="missing-working-directory",
                fix="run the command in a folder that all nodes share; or add `--working-dir .`,"
                " so that Ray copies the folder to the nodes",
                host=place.host,
                directory=task.directory,
            )
        os.chdir(task.directory)
    return attempt


def _rank() -> int:
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def _gather(value: Any) -> list[Any]:
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    return gathered


def _broadcast(value: Any) -> Any:
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def _renumber(order: list[int]) -> None:
    """Leave Ray's process group, and set the environment for the one with new ranks that Paceline
    forms.

    Args:
        order: Ray's rank of each worker, in the order of the new ranks.
    """
    import ray.util
    from torch import distributed

    ray_rank = _rank()
    rank = order.index(ray_rank)
    endpoints = _gather((ray.util.get_node_ip_address(), _free_port()) if rank == 0 else None)
    address, port = endpoints[order[0]]
    node_ranks = _gather((os.environ.get("NODE_RANK", "0"), os.environ["LOCAL_RANK"]))
    nodes = list(dict.fromkeys(node_ranks[member][0] for member in order))
    distributed.barrier()
    distributed.destroy_process_group()
    os.environ.update(
        RANK=str(rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        NODE_RANK=str(nodes.index(node_ranks[ray_rank][0])),
        GROUP_RANK=str(nodes.index(node_ranks[ray_rank][0])),
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _fail_finally(
    task: RayWorkerTask, ray_rank: int, failed: ExitRecord, error: PacelineError
) -> ExitRecord:
    """Return the failure if all workers have one; otherwise raise it, so that Ray ends the others,
    which wait for this worker."""
    import ray
    import ray.train

    deadline = time.monotonic() + _AGREE_S
    while (
        ray.get(task.record.fail_finally.remote(ray_rank, failed))
        < ray.train.get_context().get_world_size()
    ):
        if time.monotonic() > deadline:
            raise error
        time.sleep(0.1)
    return failed


def _last_step(run_dir: RunDir) -> int | None:
    steps = [event["step"] for event in tail_events(run_dir.events) if event["type"] == "step"]
    return steps[-1] if steps else None


@contextlib.contextmanager
def _reporting(task: RayWorkerTask, run_dir: RunDir) -> Iterator[None]:
    """Within the block, poll the record for a stop request of the driver."""
    import ray

    from paceline.core.stop import request_stop

    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(_POLL_S):
            number = ray.get(task.record.poll.remote(run_dir.is_run()))
            if number is not None:
                request_stop(number)

    thread = threading.Thread(target=poll, name="driver-poll", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * _POLL_S)


def _nodes(places: list[WorkerPlace]) -> str:
    """Describe the nodes with their ranks: ``gpu1 (10.0.0.1) with ranks 0 1 2 3; …``."""
    ranks: dict[str, list[str]] = {}
    names = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.node_id, []).append(str(rank))
        names[place.node_id] = f"{place.host} ({place.address})"
    return "; ".join(
        f"{names[node]} with rank{'s' if len(node_ranks) > 1 else ''} {' '.join(node_ranks)}"
        for node, node_ranks in ranks.items()
    )
