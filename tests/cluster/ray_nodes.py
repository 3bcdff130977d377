"""Start a real Ray cluster of two nodes on this machine, in a separate process."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

#: Requires tokens, as a real cluster should, and disables Ray's usage statistics.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def start_ray_cluster() -> Iterator[dict[str, str]]:
    """Start the cluster and yield the environment for commands that use it. Removes all of its
    processes and files at the end."""
    # A short path, because Ray creates sockets in this folder.
    folder = Path(tempfile.mkdtemp(prefix="pl-ray-", dir="/tmp"))
    token = folder / "token"
    token.write_text("a0" * 32)
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": str(folder),
    }
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        address = next(
            (line.split()[1] for line in process.stdout if line.startswith("address ")), None
        )
        assert address is not None, "the cluster did not start"
        yield {**environment, "RAY_ADDRESS": address, "CLUSTER_PID": str(process.pid)}
    finally:
        assert process.stdin is not None
        started = psutil.Process(process.pid).children(recursive=True)
        process.stdin.close()  # makes the process shut the cluster down
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        left = started
        _, left = psutil.wait_procs(left, timeout=10)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes of Ray outlived the cluster: {left}"


def find_workers(environment: dict[str, str]) -> list[psutil.Process]:
    """Return the Ray Train worker processes of the cluster."""
    cluster = psutil.Process(int(environment["CLUSTER_PID"]))
    return [
        process
        for process in cluster.children(recursive=True)
        if "RayTrainWorker" in _title(process)
    ]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def serve() -> None:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    print("address", cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    serve()
