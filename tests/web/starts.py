"""Helpers that start small runs through the panel."""

import json
import time
from pathlib import Path
from typing import Any

MICRO = """model: builtin:qwen2-micro  # the smallest model
dataset: builtin:python-docs#120
parallel: {device: cpu, num_gpus: 2}
train_args:
  max_length: 64
  max_steps: %d
"""


def post_json(served: Any, path: str, status: int = 200, **body: object) -> dict[str, Any]:
    """Send a POST request with the token, check the status, and return the response."""
    response = served.client.post(path, json=body, headers=served.with_token)
    assert response.status_code == status, response.text
    return response.json()


def post_failing_start(served: Any, path: str, **body: object) -> dict[str, Any]:
    """Start or resume a run whose command fails, and return the error: of the request, or of the
    start if the command takes longer than the request waits."""
    response = served.client.post(path, json=body, headers=served.with_token)
    launch = f"/api/launches/{response.json().get('id')}"
    deadline = time.monotonic() + 120.0
    while response.status_code == 200:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.1)
        response = served.client.get(launch, headers=served.with_token)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def wait_for_status(
    served: Any, id: str, *statuses: str, timeout_s: float = 120.0
) -> dict[str, Any]:
    """Wait until the status of a run is one of ``statuses``, and return its summary."""
    deadline = time.monotonic() + timeout_s
    while True:
        run = next((run for run in served.get("/api/runs")["runs"] if run["id"] == id), None)
        if run is not None and run["status"] in statuses:
            return run
        assert time.monotonic() < deadline, f"status {run and run['status']}, not {statuses}"
        time.sleep(0.05)


def wait_for_step(served: Any, id: str, step: int) -> None:
    deadline = time.monotonic() + 120.0
    while not any(
        run["id"] == id and (run["step"] or 0) >= step for run in served.get("/api/runs")["runs"]
    ):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if event["type"] == kind
    ]
