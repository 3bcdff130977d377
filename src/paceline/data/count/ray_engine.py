"""`paceline data count --engine ray`: the same job on Ray Data, which also runs it beyond one
machine. An optional extra."""

import heapq
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.processes import temporary_environment
from paceline.data.count.job import CountResult, CountSpec, MapSeen, tables, write_table
from paceline.data.count.runs import Row, decoded, encoded
from paceline.data.count.shards import TextShard, plan_shards

_SHARD_BYTES = 64 << 20
_STORE_BYTES = 128 << 20
_BATCH_ROWS = 1 << 16
#: Keys that begin with a line end are no words: what a map task tells beside its counts.
_FULL, _SPILLED, _REPLACED, _ERROR = b"\nfull", b"\nspilled", b"\nreplaced", b"\nerror:"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_SCHEDULER_EVENTS": "0",
}


def check_ray() -> None:
    """Before anything is started.

    Raises:
        ConfigError: Ray is not installed.
    """
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        raise ConfigError(
            "`--engine ray` needs Ray, which is not installed",
            allowed="local, or ray where it is installed",
            fix='install it with `pip install "paceline[ray]"`, or leave --engine out',
        )


def count_on_ray(job: CountSpec, num_cpus: int, output: Path | None) -> CountResult:
    """Count on Ray Data: on the cluster that RAY_ADDRESS names, else on ``num_cpus`` processes of
    this machine. The table goes to ``output``, where one is given.

    Raises:
        ConfigError, RunError: as the local engine does.
    """
    # Ray writes to its log as it starts; what a person sees is ours to say.
    quiet = {name: value for name, value in _QUIET.items() if name not in os.environ}
    with temporary_environment(quiet), _cluster(num_cpus) as ray:
        started = time.perf_counter()
        found, words = CountResult(), _dataset(ray, job, num_cpus, output is not None)
        try:
            stream = _figures(words, found, job.top)
            if output is not None:
                write_table(output, stream)
            else:
                for _ in stream:
                    pass
        except PacelineError:
            raise
        except Exception as error:  # whatever Ray raises: its tasks' errors come in many wrappings
            text = str(error).strip().splitlines()
            raise RunError(f"Ray failed: {text[-1] if text else type(error).__name__}") from error
        found.seconds = {"all": time.perf_counter() - started}
    return found


def _dataset(ray: Any, job: CountSpec, num_cpus: int, is_sorted: bool) -> Any:
    total = sum(size for _, size in job.files)
    shares = plan_shards(list(job.files), max(num_cpus, -(-total // _SHARD_BYTES)))
    items = [
        {"path": str(one.path.absolute()), "start": one.start, "stop": one.stop, "whole": one.whole}
        for share in shares
        for one in share
    ]
    mapped = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        map_shards, fn_args=(replace(job, folder=Path()),), batch_size=1, batch_format="numpy"
    )
    words = mapped.groupby(
        "word", num_partitions=min(200, max(num_cpus, -(-total // _SHARD_BYTES)))
    ).sum("count")
    return words.sort("word") if is_sorted else words


def map_shards(batch: dict[str, Any], job: CountSpec) -> Iterator[dict[str, Any]]:
    """The map task: batches of ``word`` and ``count`` of the shards in ``batch``."""
    import numpy as np

    seen = MapSeen()
    shards = [
        TextShard(Path(path), int(start), int(stop), bool(whole))
        for path, start, stop, whole in zip(
            batch["path"], batch["start"], batch["stop"], batch["whole"], strict=True
        )
    ]
    size = 0
    notes: list[Row] = []
    try:
        for table in tables(shards, job, seen):
            words = [encoded(word) for word in table]
            size += sum(map(len, words))
            yield {
                "word": np.array(words, dtype=object),
                "count": np.array(list(table.values()), dtype=np.int64),
            }
    except PacelineError as error:
        told = json.dumps([isinstance(error, ConfigError), error.what, error.allowed, error.fix])
        notes.append((_ERROR + told.encode(), 1))
    notes += [(_FULL, seen.full), (_SPILLED, size if seen.full else 0), (_REPLACED, seen.replaced)]
    yield {
        "word": np.array([word for word, _ in notes], dtype=object),
        "count": np.array([count for _, count in notes], dtype=np.int64),
    }


def _figures(words: Any, found: CountResult, top: int) -> Iterator[Row]:
    """The rows of the result, in its order; ``found`` is filled on the way."""
    heap: list[tuple[int, _Later]] = []
    for batch in words.iter_batches(batch_size=_BATCH_ROWS, batch_format="pyarrow"):
        for word, count in zip(
            batch["word"].to_pylist(), batch["sum(count)"].to_pylist(), strict=True
        ):
            if word.startswith(b"\n"):
                _take_note(word, count, found)
                continue
            found.total += count
            found.distinct += 1
            if len(heap) < top:
                heapq.heappush(heap, (count, _Later(word)))
            elif heap and (count, _Later(word)) > heap[0]:
                heapq.heapreplace(heap, (count, _Later(word)))
            yield word, count
    found.top = [(decoded(word), count) for count, word in sorted(heap, reverse=True)]


class _Later(bytes):
    """A word that is the smaller the later it comes in the order of words: of equal counts the
    first word is the best."""

    def __lt__(self, other: bytes) -> bool:
        return bytes.__gt__(self, other)

    def __gt__(self, other: bytes) -> bool:
        return bytes.__lt__(self, other)


def _take_note(key: bytes, count: int, found: CountResult) -> None:
    if key.startswith(_ERROR):
        is_config, what, allowed, fix = json.loads(key.removeprefix(_ERROR))
        raise (ConfigError if is_config else RunError)(what, allowed=allowed, fix=fix)
    if key == _FULL:
        found.spills += count
    elif key == _SPILLED:
        found.spilled_bytes += count
    elif key == _REPLACED:
        found.replaced += count


@contextmanager
def _cluster(num_cpus: int) -> Iterator[Any]:
    """Ray, connected; shut down at the end, its processes ended and its folder removed."""
    import ray
    import ray.data

    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    address = os.environ.get("RAY_ADDRESS")
    folder = None
    settings: dict[str, Any] = {"address": address}
    if not address:
        # Sockets are made in it, and a socket's path is short.
        base = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="pl-ray-", dir=base if len(base) < 20 else "/tmp")
        settings = {
            "address": "local",
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "_temp_dir": folder,
        }
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield ray
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
