"""Engine `ray` of `paceline data count`: the same job on Ray Data, which can use several machines.
Requires the optional extra `ray`."""

import json
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.processes import temporary_environment
from paceline.data.count.job import CountResult, CountSpec, tables, tally, write_table
from paceline.data.count.runs import Row, encode
from paceline.data.count.shards import ScanStats, TextShard, plan_shards

_SHARD_BYTES = 64 << 20
_STORE_BYTES = 128 << 20
_BATCH_ROWS = 1 << 16
#: Prefix of a key that is not a word but the report of a map task: [full tables, spilled bytes,
#: replaced sequences, error] as JSON.
_REPORT = b"\n"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_SCHEDULER_EVENTS": "0",
}


def check_ray() -> None:
    """Check that Ray is installed.

    Raises:
        ConfigError: Ray is not installed.
    """
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        raise ConfigError(
            "`--engine ray` requires Ray, which is not installed",
            code="missing-ray-for-count",
            allowed="local, or ray if it is installed",
            fix='install it with `pip install "paceline[ray]"`, or remove --engine',
        )


def count_on_ray(spec: CountSpec, num_cpus: int, output: Path | None) -> CountResult:
    """Count on Ray Data: on the cluster at RAY_ADDRESS, or else in ``num_cpus`` processes on this
    machine. Write the table to ``output`` unless it is None.

    Raises:
        ConfigError, RunError: see :func:`~paceline.data.count.job.count_locally`.
    """
    # Ray must not print its own messages.
    quiet = {name: value for name, value in _QUIET.items() if name not in os.environ}
    with temporary_environment(quiet), _cluster(num_cpus) as ray:
        started = time.perf_counter()
        result = CountResult()
        dataset = _dataset(ray, spec, num_cpus, is_sorted=output is not None)
        try:
            stream = tally(_rows(dataset, result), result, spec.top)
            if output is not None:
                write_table(output, stream)
            else:
                deque(stream, maxlen=0)
        except PacelineError:
            raise
        except Exception as error:  # Ray wraps the errors of its tasks in many types
            text = str(error).strip().splitlines()
            raise RunError(
                "Ray failed: {text}",
                code="ray-failed",
                text=text[-1] if text else type(error).__name__,
            ) from error
        result.seconds = {"all": time.perf_counter() - started}
    return result


def _dataset(ray: Any, spec: CountSpec, num_cpus: int, is_sorted: bool) -> Any:
    total = sum(size for _, size in spec.files)
    shares = plan_shards(list(spec.files), max(num_cpus, -(-total // _SHARD_BYTES)))
    items = [
        {**asdict(shard), "path": str(shard.path.absolute())} for share in shares for shard in share
    ]
    mapped = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        map_shards, fn_args=(spec,), batch_size=1, batch_format="numpy"
    )
    num_partitions = min(200, max(num_cpus, -(-total // _SHARD_BYTES)))
    counts = mapped.groupby("word", num_partitions=num_partitions).sum("count")
    return counts.sort("word") if is_sorted else counts


def map_shards(batch: dict[str, np.ndarray], spec: CountSpec) -> Iterator[dict[str, np.ndarray]]:
    """Run a map task: yield batches of ``word`` and ``count`` of the shards in ``batch``, and a
    report."""
    columns = (batch[name] for name in ("path", "start", "stop", "is_compressed"))
    shards = [
        TextShard(Path(path), int(start), int(stop), bool(is_compressed))
        for path, start, stop, is_compressed in zip(*columns, strict=True)
    ]
    stats = ScanStats()
    size = 0
    failure = None
    try:
        for table in tables(shards, spec, stats):
            keys = list(map(encode, table))
            size += sum(map(len, keys))
            yield _batch(keys, list(table.values()))
    except PacelineError as error:
        failure = [isinstance(error, ConfigError), error.record()]
    report = [stats.full_tables, size if stats.full_tables else 0, stats.replaced, failure]
    yield _batch([_REPORT + json.dumps(report).encode()], [1])


def _batch(keys: list[bytes], counts: list[int]) -> dict[str, np.ndarray]:
    return {"word": np.array(keys, dtype=object), "count": np.array(counts, dtype=np.int64)}


def _rows(dataset: Any, result: CountResult) -> Iterator[Row]:
    """Yield the keys with their counts, and add the reports of the map tasks to ``result``."""
    for batch in dataset.iter_batches(batch_size=_BATCH_ROWS, batch_format="pyarrow"):
        keys, counts = batch["word"].to_pylist(), batch["sum(count)"].to_pylist()
        for key, count in zip(keys, counts, strict=True):
            if key.startswith(_REPORT):
                _add_report(key, count, result)
            else:
                yield key, count


def _add_report(key: bytes, num_tasks: int, result: CountResult) -> None:
    full_tables, spilled_bytes, replaced, failure = json.loads(key)
    if failure is not None:
        is_config, record = failure
        raise (ConfigError if is_config else RunError).from_record(record)
    result.spills += num_tasks * full_tables
    result.spilled_bytes += num_tasks * spilled_bytes
    result.replaced += num_tasks * replaced


@contextmanager
def _cluster(num_cpus: int) -> Iterator[Any]:
    """Connect to Ray or start it. Shut it down and remove its folder at the end."""
    import ray
    import ray.data

    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    address = os.environ.get("RAY_ADDRESS")
    folder = None
    start = partial(ray.init, log_to_driver=False, logging_level=logging.ERROR)
    try:
        if address:
            start(address)
        else:
            # The folder has sockets, whose paths must be short.
            base = tempfile.gettempdir()
            folder = tempfile.mkdtemp(prefix="pl-ray-", dir=base if len(base) < 20 else "/tmp")
            start(
                "local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                _temp_dir=folder,
            )
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield ray
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
