"""Chat with the model of a real run, tuned and base; the worker stops when told and ends when
nobody asks."""

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
from starts import ask

from paceline.models.builtin import resolve_model
from paceline.web.jobs import chat as chatting

QUESTION = [{"role": "user", "content": "What is the Python module os for?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with two models: one with adapters that were trained, and a whole one, which is as
    it began."""
    place = tmp_path_factory.mktemp("runs")
    args = [
        "model=builtin:qwen2-micro",
        "dataset=builtin:python-docs#120",
        "parallel.device=cpu",
        "parallel.num_gpus=1",
        "max_steps=4",
        "max_length=64",
        "lora.enable=true",
        "learning_rate=1e-2",
        f"output_dir={place}/adapted",
    ]
    run(*args)
    finished(place / "whole", steps=4)
    (place / "whole" / "config.yaml").write_text(
        "model: builtin:qwen2-micro\ndataset: builtin:python-docs\n"
    )
    shutil.copytree(resolve_model("builtin:qwen2-micro"), place / "whole" / "model")
    return place


def events_of(answer: httpx.Response) -> Iterator[tuple[str, dict]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def chat(served, run: str, **options: object) -> list[tuple[str, dict]]:
    body = {"messages": QUESTION, "max_new_tokens": 12, **options}
    path = f"/api/runs/{served.the_run(run)}/chat"
    with served.client.stream("POST", path, json=body, headers=served.with_token) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events_of(answer))


def text(events: list[tuple[str, dict]]) -> str:
    return "".join(data["text"] for name, data in events if name == "token")


def workers() -> list[psutil.Process]:
    workers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is just ending
            if "--serve" in process.cmdline():
                workers.append(process)
    return workers


@pytest.mark.soak
@pytest.mark.parametrize("run", ["adapted", "whole"])
def test_the_tuned_model_answers_beside_its_base(serve, folder, run):
    served = serve(folder)
    tuned = chat(served, run)
    assert tuned[0] == ("state", {"state": "loading", "beside_run": False})
    assert tuned[1][1]["state"] == "ready"
    assert tuned[1][1]["base"]
    assert tuned[-1][0] == "end"
    assert 1 <= tuned[-1][1]["num_tokens"] <= 12
    base = chat(served, run, model="base", temperature=1.5, seed=3)
    assert base[0][1]["state"] == "ready"  # the same worker
    again = chat(served, run, temperature=1.5, seed=3)
    # another model's words, unless the model is untrained
    assert (text(again) != text(base)) == (run == "adapted")
    assert len(workers()) == 1


@pytest.mark.soak
def test_an_answer_that_nobody_reads_any_more_is_stopped(serve, folder):
    served = serve(folder)
    body = {"messages": QUESTION, "max_new_tokens": 4000, "temperature": 2.0}
    path = f"/api/runs/{served.the_run('whole')}/chat"
    with served.client.stream("POST", path, json=body, headers=served.with_token) as answer:
        events = events_of(answer)  # kept: a generator that goes closes the connection
        assert next(name for name, _ in events if name == "token")
        busy = served.client.post(
            path, json={**body, "max_new_tokens": 2}, headers=served.with_token
        )
        assert (busy.status_code, "already" in busy.json()["error"]["what"]) == (400, True)
    deadline = time.monotonic() + 20
    while (
        served.client.post(
            path, json={**body, "max_new_tokens": 2}, headers=served.with_token
        ).status_code
        != 200
    ):
        assert time.monotonic() < deadline, "the answer goes on"
        time.sleep(0.05)


@pytest.mark.soak
def test_the_worker_ends_when_nobody_asks(serve, folder, monkeypatch):
    assert chatting.IDLE_S == 300
    monkeypatch.setattr(chatting, "IDLE_S", 0.5)
    served = serve(folder)
    assert chat(served, "whole", max_new_tokens=1)[-1][0] == "end"
    deadline = time.monotonic() + 20
    while workers():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)
    # and is there again for the next question
    assert chat(served, "whole", max_new_tokens=1)[0][1]["state"] == "loading"


def test_a_run_without_a_model_says_what_to_do(serve, tmp_path):
    begin(tmp_path / "one", steps=10)
    served = serve(tmp_path)
    events = chat(served, "one")
    assert events[-1][0] == "error"
    assert "contains no model" in events[-1][1]["what"]
    assert "finish" in events[-1][1]["fix"]


@pytest.mark.soak
def test_a_chat_that_is_too_long_is_refused_and_the_next_is_answered(serve, folder):
    served = serve(folder)
    events = chat(served, "whole", messages=[{"role": "user", "content": "word " * 50_000}])
    assert events[-1][0] == "error"
    assert "at most" in events[-1][1]["what"]
    assert chat(served, "whole")[-1][0] == "end"


@pytest.mark.soak
def test_the_merged_model_is_written_once(serve, folder):
    served = serve(folder)
    path = f"/api/runs/{served.the_run('adapted')}/export"
    export = ask(served, path)
    assert export == {"path": str(folder / "adapted" / "exported"), "merged": True}
    assert (folder / "adapted" / "exported" / "config.json").is_file()
    assert ask(served, path) == export
