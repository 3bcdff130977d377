"""What happens with the model when a run is done: lm-evaluation-harness on a local task, and the
upload to a server that stands in for the hub."""

import json
import os
from pathlib import Path

import pytest
from commands import report, run, train
from hub_stand_in import OWNER, TOKEN, hub_stand_in

TASK = """
task: paceline_colors
dataset_path: json
dataset_kwargs:
  data_files: {test: FOLDER/colors.jsonl}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
ROWS = [
    {"question": "What color is snow?", "choices": ["white", "red"], "answer": 0},
    {"question": "What color is coal?", "choices": ["pink", "black"], "answer": 1},
    {"question": "What color is grass?", "choices": ["green", "blue"], "answer": 0},
]
STEPS = "train_args.max_steps=2"


def environment_of(url: str) -> dict[str, str]:
    """Return an environment in which the hub is at ``url``, and its files are sent with LFS."""
    online = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    return {**online, "HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}


@pytest.mark.soak
def test_run_is_evaluated_and_uploaded(tmp_path: Path) -> None:
    """The results are in the report and in the model card; a later evaluation gives the same."""
    tasks, folder = tmp_path / "tasks", tmp_path / "tuned"
    tasks.mkdir()
    (tasks / "colors.yaml").write_text(TASK.replace("FOLDER", str(tasks)))
    (tasks / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = [
        f"evaluation.lm_eval.{text}" for text in ("tasks=paceline_colors", f"include_path={tasks}")
    ]
    with hub_stand_in() as hub:
        train(
            folder, STEPS, *settings, "push_to_hub=true", env=environment_of(hub.url), timeout_s=900
        )
        files = hub.repositories[f"{OWNER}/tuned"].files
    results = report(folder)["lm_eval"]
    accuracy = results["results"]["paceline_colors"]["acc"]
    assert accuracy in [pytest.approx(number / 3) for number in range(4)]
    assert results["num_rows"] == {"paceline_colors": 3}
    assert f"| paceline_colors | acc | {accuracy:.4f} |" in files["README.md"].decode()
    page = (folder / "report.html").read_text()
    assert f"{accuracy:.4f}" in page
    assert f"{OWNER}/tuned" in page
    again = json.loads(run(str(folder), "--json", verb="eval").stdout)
    assert again["results"] == results["results"]
    unknown = run(str(folder), "--tasks", "no_such_task", verb="eval", expect=2)
    assert "no task `no_such_task`" in unknown.stderr


@pytest.mark.soak
def test_failed_upload_of_an_adapter_is_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    with hub_stand_in() as hub:
        environment = environment_of(hub.url)
        hub.fails_at = "/preupload/"
        result = train(folder, STEPS, "push_to_hub=true", "lora.enable=true", env=environment)
        assert "could not be uploaded" in result.stderr
        assert "refused by the stand-in" in report(folder)["hub"]["error"]
        assert report(folder)["status"] == "done"
        hub.fails_at = None
        run(str(folder), "--push", f"{OWNER}/again", verb="export", env=environment)
        files = hub.repositories[f"{OWNER}/again"].files
        assert (
            files["adapter_model.safetensors"]
            == (folder / "model" / "adapter_model.safetensors").read_bytes()
        )
        assert b"A LoRA adapter of `builtin:qwen2-micro`" in files["README.md"]
        merged = ("--merge", "--output", str(tmp_path / "merged"))
        run(str(folder), "--push", f"{OWNER}/merged", *merged, verb="export", env=environment)
        files = hub.repositories[f"{OWNER}/merged"].files
        assert "model.safetensors" in files
        assert b"with a merged LoRA adapter" in files["README.md"]
