"""A local server with the S3 API (moto)."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ranks import free_port


@contextmanager
def s3_server() -> Iterator[str]:
    """Run the server within the block; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def use_server(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set and return the environment of a client, and create a bucket."""
    names = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    import s3fs

    deadline = time.monotonic() + 60
    while True:
        try:
            s3fs.S3FileSystem(skip_instance_cache=True).makedirs("bucket", exist_ok=True)
            return names
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.2)
