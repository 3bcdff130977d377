"""Test `paceline plan --serve`: it answers as the command does, and a newer request ends an older
one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from commands import run

CONFIG = "model: Qwen/Qwen2.5-0.5B-Instruct\ndataset: none.jsonl\ntrain_args: {max_steps: 7}\n"


class Planner:
    """A process that plans."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, **request: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def planner(tmp_path) -> Iterator[Planner]:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "plan", "--serve"], cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with process:
        yield Planner(process)
        process.kill()


@pytest.mark.soak
def test_answers_are_those_of_the_command(planner, tmp_path):
    """Also after errors, and after a request that was replaced."""
    assert planner.receive() == {"ready": True}
    planner.send(id=1, yaml=CONFIG, world_size=8192, device="H100-SXM")
    planner.send(id=2, yaml=CONFIG, world_size=4, device="H100-SXM")
    answer = planner.receive()
    assert answer["id"] == 2
    (tmp_path / "config.yaml").write_text(CONFIG)
    command = run(
        "config.yaml", "--world-size=4", "--device=H100-SXM", "--json", verb="plan", cwd=tmp_path
    )
    assert answer["plan"] == json.loads(command.stdout)
    assert answer["max_steps"] == 7

    (tmp_path / "below" / "empty").mkdir(parents=True)
    wrong = CONFIG.replace("Qwen/Qwen2.5-0.5B-Instruct", "./empty")
    planner.send(id=3, yaml=wrong, cwd=str(tmp_path / "below"))
    answer = planner.receive()
    assert (answer["id"], answer["exit_code"], answer["error"]["code"]) == (
        3,
        2,
        "model-without-config",
    )
    assert "empty` is not a model: it has no config.json" in answer["error"]["what"]
    planner.send(id=4, yaml="model: [\n")
    assert planner.receive()["error"]["what"].startswith("is not valid YAML")
    planner.send(id=5, yaml=CONFIG, device="no such device")
    assert "no such device" in planner.receive()["error"]["what"]
    planner.process.stdin.close()
    assert planner.process.wait(30) == 0
