"""The route for the completions of a run: pages, search, order, and files of any content."""

import json
import os
from pathlib import Path
from typing import Any

from event_logs import begin, finished, step_fields


def rollout_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.jsonl"


def record(prompt: int, index: int, **values: Any) -> dict[str, Any]:
    number = 4 * prompt + index
    return {
        "prompt": prompt,
        "index": index,
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5],
        "logprobs": [-0.5, -0.5, -0.5],
        "rewards": {"exact": number % 7, "format": None},
        "reward": float(number % 7),
        "advantage": 0.5,
        "truncated": index == 3,
        "prompt_text": f"<|im_start|>user\nWhat is {prompt}?<|im_end|>\n",
        "completion": f"It is number {number}.",
        **values,
    }


def write(root: Path, step: int, lines: list[Any]) -> None:
    path = rollout_file(root / "rollouts", step)
    path.parent.mkdir(exist_ok=True)
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))


def test_the_latest_rollout_is_returned_page_by_page(serve, tmp_path):
    root = finished(tmp_path / "one")
    write(root, 1, [record(0, 0)])
    write(root, 5, [record(prompt, index) for prompt in range(8) for index in range(4)])
    (root / "rollouts/notes.txt").write_text("not a rollout")
    served = serve(tmp_path)
    address = f"/api/runs/{served.find_run_id()}"
    assert served.get(address)["has"]["completions"] is True
    first = served.get(f"{address}/completions")
    assert (first["steps"], first["step"]) == ([5, 1], 5)
    assert (first["num_completions"], first["num_matching"]) == (32, 32)
    assert len(first["completions"]) == 20
    second = served.get(f"{address}/completions?offset=20")
    assert [each["prompt"] for each in second["completions"]] == [5] * 4 + [6] * 4 + [7] * 4
    assert second["completions"][3]["truncated"] is True
    assert second["completions"][3]["tokens"] == 3
    assert served.get(f"{address}/completions?step=1")["num_completions"] == 1


def test_completions_are_searched_and_ordered(serve, tmp_path):
    root = finished(tmp_path / "one")
    lines = [record(prompt, index) for prompt in range(3) for index in range(4)]
    write(root, 1, [record(9, 0, reward=None), *lines])
    served = serve(tmp_path)
    address = f"/api/runs/{served.find_run_id()}/completions"
    best, worst = (
        [each["reward"] for each in served.get(f"{address}?order={order}")["completions"]]
        for order in ("best", "worst")
    )
    assert best[:-1] == sorted(best[:-1], reverse=True)
    assert worst[:-1] == sorted(worst[:-1])
    assert best[-1] is worst[-1] is None
    of_prompt = served.get(f"{address}?search=WHAT%20IS%202")
    assert [each["prompt"] for each in of_prompt["completions"]] == [2] * 4
    of_text = served.get(f"{address}?search=number%2011.")
    assert (of_text["num_matching"], of_text["num_completions"]) == (1, 13)


def test_lines_that_are_no_completions_are_counted(serve, tmp_path):
    root = finished(tmp_path / "one")
    odd = {"prompt": "x", "rewards": [1], "reward": "high", "completion": "text\x1b[31m"}
    write(root, 1, ["no JSON", "[1, 2]", '{"prompt": 1', odd, record(0, 0, reward=float("nan"))])
    served = serve(tmp_path)
    page = served.get(f"/api/runs/{served.find_run_id()}/completions")
    assert page["unreadable"] == 3
    assert [each["reward"] for each in page["completions"]] == [None, None]
    assert "\x1b" not in page["completions"][0]["completion"]


def test_only_files_of_the_run_are_read(serve, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    write(outside, 1, [record(0, 0, completion="secret")])
    root = finished(tmp_path / "runs/one")
    served = serve(tmp_path / "runs")
    address = f"/api/runs/{served.find_run_id()}"
    assert served.get(address)["has"]["completions"] is False
    assert served.client.get(f"{address}/completions").status_code == 404
    (root / "rollouts").symlink_to(outside / "rollouts")
    assert served.get(address)["has"]["completions"] is False
    assert served.client.get(f"{address}/completions?step=1").status_code == 404
    (root / "rollouts").unlink()
    (root / "rollouts").mkdir()
    rollout_file(root / "rollouts", 1).symlink_to(rollout_file(outside / "rollouts", 1))
    os.mkfifo(rollout_file(root / "rollouts", 2))
    for step in (1, 2, 3):
        assert served.client.get(f"{address}/completions?step={step}").status_code == 404
    for query in ("step=-1", "limit=0", "limit=101", "order=random", f"search={'x' * 201}"):
        assert served.client.get(f"{address}/completions?{query}").status_code in (400, 422)


def test_list_has_the_latest_rewards(serve, tmp_path):
    log = begin(tmp_path / "one")
    log.emit({"type": "step", **step_fields(3), "reward": 0.25})
    metrics = {"reward": 0.5}
    log.emit(
        {"type": "eval", "step": 3, "loss": -0.5, "metrics": metrics, "count": 8, "wall_s": 1.0}
    )
    (run,) = serve(tmp_path).get("/api/runs")["runs"]
    assert (run["reward"], run["eval_reward"]) == (0.25, 0.5)
