"""Test that a run with a million steps and eight ranks opens immediately and is read with bounded
memory."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from event_logs import write_long

_STEPS = 1_000_000
_MEMORY_BYTES = 300 << 20


@pytest.mark.soak
def test_opens_a_million_steps_immediately_and_reads_them_in_bounded_memory(tmp_path: Path) -> None:
    write_long(tmp_path / "one/events.jsonl", _STEPS, 8, resume_at=_STEPS // 2)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "ui",
        str(tmp_path),
        "--json",
        "--port",
        "0",
        "--no-browser",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            base = json.loads(process.stdout.readline())["url"].partition("?")[0]
            with httpx.Client(base_url=base, timeout=120) as client:
                started_at = time.perf_counter()
                id = client.get("api/runs").json()["runs"][0]["id"]
                client.get(f"api/runs/{id}")
                first = client.get(f"api/runs/{id}/series").json()
                print(f"opened in {time.perf_counter() - started_at:.2f} s")
                assert len(first["step"]) > 500
                assert not first["exact"]
                peak_bytes, slowest_response_s = 0, 0.0
                while True:
                    requested_at = time.perf_counter()
                    series = client.get(f"api/runs/{id}/series", params={"names": "loss"}).json()
                    slowest_response_s = max(slowest_response_s, time.perf_counter() - requested_at)
                    peak_bytes = max(peak_bytes, psutil.Process(process.pid).memory_info().rss)
                    if series["exact"]:
                        break
                    time.sleep(0.5)
                print(
                    f"read in {time.perf_counter() - started_at:.1f} s; slowest response"
                    f" {slowest_response_s:.2f} s"
                )
                assert series["num_steps"] == _STEPS
                zoom = client.get(
                    f"api/runs/{id}/series", params={"start": 400_000, "end": 400_500}
                ).json()
                assert zoom["step"] == list(range(400_000, 400_501))
                assert client.get(f"api/runs/{id}/series").json()["tokens"][-1] == _STEPS * 4096
                assert len(client.get(f"api/runs/{id}/ranks").json()["ranks"]) == 8
                lines = sum(1 for _ in client.get(f"api/runs/{id}/csv").iter_lines())
                assert lines == _STEPS + 1
                peak_bytes = max(peak_bytes, psutil.Process(process.pid).memory_info().rss)
                print(f"peak memory {peak_bytes / (1 << 20):.0f} MiB")
                assert peak_bytes < _MEMORY_BYTES
        finally:
            process.terminate()
            process.wait(20)
            (tmp_path / "one/events.jsonl").unlink()  # several GB, which pytest would not delete
