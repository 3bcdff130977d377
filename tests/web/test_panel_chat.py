"""Test the chat with the tuned and the base model of a run, and the end of its worker process."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from commands import run
from event_logs import begin, finished
from starts import post_json

from paceline.models.builtin import resolve_model
from paceline.web.jobs import chat as chatting

QUESTION = [{"role": "user", "content": "What is the Python module os for?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with two runs: one with a trained adapter, and one with an untrained full
    model."""
    root = tmp_path_factory.mktemp("runs")
    args = [
        "model=builtin:qwen2-micro",
        "dataset=builtin:python-docs#120",
        "parallel.device=cpu",
        "parallel.num_gpus=1",
        "max_steps=4",
        "max_length=64",
        "lora.enable=true",
        "learning_rate=1e-2",
        f"output_dir={root}/adapted",
    ]
    run(*args)
    finished(root / "full", steps=4)
    (root / "full" / "config.yaml").write_text(
        "model: builtin:qwen2-micro\ndataset: builtin:python-docs\n"
    )
    shutil.copytree(resolve_model("builtin:qwen2-micro"), root / "full" / "model")
    return root


def events_of(answer: httpx.Response) -> Iterator[tuple[str, dict]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def chat(served, run: str, **options: object) -> list[tuple[str, dict]]:
    body = {"messages": QUESTION, "max_new_tokens": 12, **options}
    path = f"/api/runs/{served.find_run_id(run)}/chat"
    with served.client.stream("POST", path, json=body, headers=served.with_token) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events_of(answer))


def answer_text(events: list[tuple[str, dict]]) -> str:
    return "".join(data["text"] for name, data in events if name == "token")


def find_workers() -> list[psutil.Process]:
    workers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process is ending
            if {"generate", "--serve"} <= set(process.cmdline()):
                workers.append(process)
    return workers


@pytest.mark.soak
@pytest.mark.parametrize("run", ["adapted", "full"])
def test_tuned_and_base_model_answer(serve, folder, run):
    served = serve(folder)
    tuned = chat(served, run)
    assert tuned[0] == ("state", {"state": "loading", "beside_run": False})
    assert tuned[1][1]["state"] == "ready"
    assert tuned[1][1]["base"]
    assert tuned[-1][0] == "end"
    assert 1 <= tuned[-1][1]["num_tokens"] <= 12
    base = chat(served, run, model="base", temperature=1.5, seed=3)
    assert base[0][1]["state"] == "ready"  # the same worker
    tuned = chat(served, run, temperature=1.5, seed=3)
    # The models answer differently, unless the model is untrained.
    assert (answer_text(tuned) != answer_text(base)) == (run == "adapted")
    assert len(find_workers()) == 1


@pytest.mark.soak
def test_answer_stops_when_the_client_disconnects(serve, folder):
    served = serve(folder)
    body = {"messages": QUESTION, "max_new_tokens": 4000, "temperature": 2.0}
    path = f"/api/runs/{served.find_run_id('full')}/chat"
    with served.client.stream("POST", path, json=body, headers=served.with_token) as answer:
        events = events_of(answer)  # keeps the connection open
        assert next(name for name, _ in events if name == "token")
        busy = served.client.post(
            path, json={**body, "max_new_tokens": 2}, headers=served.with_token
        )
        assert busy.status_code == 400
        assert "answering another question" in busy.json()["error"]["what"]
    deadline = time.monotonic() + 20
    while (
        served.client.post(
            path, json={**body, "max_new_tokens": 2}, headers=served.with_token
        ).status_code
        != 200
    ):
        assert time.monotonic() < deadline, "the answer was not stopped"
        time.sleep(0.05)


@pytest.mark.soak
def test_idle_worker_ends(serve, folder, monkeypatch):
    assert chatting.IDLE_S == 300
    monkeypatch.setattr(chatting, "IDLE_S", 0.5)
    served = serve(folder)
    assert chat(served, "full", max_new_tokens=1)[-1][0] == "end"
    deadline = time.monotonic() + 20
    while find_workers():
        assert time.monotonic() < deadline, "the worker did not end"
        time.sleep(0.05)
    # The next question starts it again.
    assert chat(served, "full", max_new_tokens=1)[0][1]["state"] == "loading"


def test_run_without_a_model_is_an_error_with_a_fix(serve, tmp_path):
    begin(tmp_path / "one", steps=10)
    served = serve(tmp_path)
    events = chat(served, "one")
    assert events[-1][0] == "error"
    assert "contains no model" in events[-1][1]["what"]
    assert "finish" in events[-1][1]["fix"]


@pytest.mark.soak
def test_rejects_a_too_long_chat_and_answers_the_next(serve, folder):
    served = serve(folder)
    events = chat(served, "full", messages=[{"role": "user", "content": "word " * 50_000}])
    assert events[-1][0] == "error"
    assert "at most" in events[-1][1]["what"]
    assert chat(served, "full")[-1][0] == "end"


@pytest.mark.soak
def test_merged_model_is_written_once(serve, folder):
    served = serve(folder)
    path = f"/api/runs/{served.find_run_id('adapted')}/export"
    export = post_json(served, path)
    assert export == {"path": str(folder / "adapted" / "exported"), "merged": True}
    assert (folder / "adapted" / "exported" / "config.json").is_file()
    assert post_json(served, path) == export
