"""Test the panel's two folders: paths of configs start where the panel was started, runs are in the
served folder, and nothing else is listed."""

import json

import pytest
from event_logs import begin
from starts import MICRO, events, post_json, wait_for_status

ROW = json.dumps({"prompt": "What is a pace line?", "completion": "Riders in a row."}) + "\n"


@pytest.fixture
def project(tmp_path):
    """A folder with data, a model, and a folder for runs; links lead out of it."""
    project, outside = tmp_path / "project", tmp_path / "outside"
    for path in (project / "data", project / "output", project / "models" / "mine", outside):
        path.mkdir(parents=True)
    (project / "data" / "mine.jsonl").write_text(ROW * 40)
    for name in ("config.json", "model.safetensors", "vocab.json"):
        (project / "models" / "mine" / name).write_text("{}")
        (outside / name).write_text("{}")
    (outside / "secret.csv").write_text("a\n")
    (project / "data" / "link.csv").symlink_to(outside / "secret.csv")
    (project / "link").symlink_to(outside)
    return project


@pytest.fixture
def panel(serve, project):
    return serve(project / "output", start_folder=project)


def paths(response, kind):
    return [(entry["path"], entry["folder"]) for entry in response[kind]]


def test_lists_what_is_in_the_two_folders_and_in_the_cache(panel, project, tmp_path, monkeypatch):
    cached = tmp_path / "hub" / "models--org--name" / "snapshots" / "1"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    uploaded = panel.client.post(
        "/api/upload", files={"file": ("up.jsonl", ROW.encode())}, headers=panel.with_token
    ).json()
    assert uploaded["path"] == "./output/datasets/up.jsonl"
    begin(project / "output" / "one")
    model = project / "output" / "one" / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    (project / "output" / "one" / "rows.jsonl").write_text(ROW)
    listed = post_json(panel, "/api/datasets")
    assert sorted(paths(listed, "datasets")) == [
        ("./data/mine.jsonl", "start"),
        ("./output/datasets/up.jsonl", "served"),
    ]
    assert listed["folders"] == {"start": str(project), "served": str(project / "output")}
    listed = post_json(panel, "/api/models")
    assert sorted(paths(listed, "models")) == [
        ("./models/mine", "start"),
        ("./output/one/model", "served"),
    ]
    assert [entry["path"] for entry in listed["cached"]] == ["org/name"]


def test_a_folder_outside_is_named_by_its_absolute_path(serve, project, tmp_path):
    panel = serve(tmp_path / "runs", start_folder=project)
    (tmp_path / "runs" / "rows.csv").write_text("a\n")
    listed = post_json(panel, "/api/datasets")
    assert (str(tmp_path / "runs" / "rows.csv"), "served") in paths(listed, "datasets")


@pytest.mark.parametrize("path", ["datasets", "models", "convert", "planner", "check", "plan"])
def test_lists_and_processes_need_the_token(panel, path):
    for headers in ({}, {"X-Paceline-Token": "wrong"}):
        response = panel.client.post(f"/api/{path}", json={"yaml": ""}, headers=headers)
        assert response.status_code == 401
    assert panel.client.get(f"/api/{path}").status_code in (404, 405)


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("dataset", "./data/mine.jsonl", None),
        ("dataset", "data/mine.jsonl#10", None),
        ("dataset", "data/*.jsonl", None),
        ("dataset", "tatsu-lab/alpaca", None),
        ("dataset", "s3://bucket/rows.jsonl", None),
        ("dataset", "builtin:python-docs#40", None),
        ("dataset", "./output/mine.jsonl", "./output/mine.jsonl"),
        ("dataset", "mine.jsonl#10%", "mine.jsonl"),
        ("dataset", "[./data/mine.jsonl, {path: ~/none.csv}]", "~/none.csv"),
        ("val_dataset", "/none/rows.parquet", "/none/rows.parquet"),
        ("model", "./models/mine", None),
        ("model", "Qwen/Qwen2.5-0.5B", None),
        ("model", "./models/none", "./models/none"),
        ("tokenizer", "models/a/none", "models/a/none"),
        ("task", "./none.py:Task", "./none.py"),
        ("callbacks", "[none.py:Callback, package.module:Callback]", "none.py"),
        ("chat_template", "chatml", None),
    ],
)
def test_path_that_does_not_exist_is_a_mistake_of_its_field(panel, project, key, value, path):
    config = {"model": "builtin:qwen2-micro", "dataset": "builtin:python-docs", key: value}
    yaml = "".join(f"{name}: {text}\n" for name, text in config.items())
    check = post_json(panel, "/api/check", yaml=yaml)
    assert check["is_config"]
    assert check["ok"] == (path is None)
    assert [
        (error["key"], error["code"], error["path"], error["folder"]) for error in check["errors"]
    ] == ([] if path is None else [(key, "path-does-not-exist", path, str(project))])
    if path is not None:
        assert check["errors"][0]["line"] == [*config].index(key) + 1
        error = post_json(panel, "/api/start", 400, yaml=yaml, name="one")["error"]
        assert path in error["what"]
        assert not (project / "output" / "one").exists()


@pytest.mark.soak
def test_run_reads_data_where_the_panel_was_started(panel, project):
    yaml = (MICRO % 2).replace("builtin:python-docs#120", "./data/mine.jsonl")
    started = post_json(panel, "/api/start", yaml=yaml, name="first")
    wait_for_status(panel, started["id"], "done")
    run = project / "output" / "first"
    assert len(events(run, "step")) == 2
    assert "output_dir: ./output/first\n" in (run / "panel.yaml").read_text()
    assert events(run, "run_start")[0]["cwd"] == str(project)


def test_duplicate_of_a_run_of_another_folder_has_absolute_paths(serve, project, tmp_path):
    """Without the folder of the run, and with the text as it was otherwise."""
    run = project / "output" / "one"
    begin(run)
    log = run / "events.jsonl"
    log.write_text(log.read_text().replace('"run_start"', f'"run_start", "cwd": "{project}"', 1))
    yaml = (
        "model: ./models/mine  # my own\ntokenizer: Qwen/Qwen2.5-0.5B\n"
        "dataset: [./data/mine.jsonl#10, {path: data, split: test}, builtin:python-docs]\n"
    )
    (run / "config.yaml").write_text(f"{yaml}output_dir: ./output/one\n")
    panel = serve(project / "output", start_folder=project)
    id = panel.find_run_id("one")
    assert panel.get(f"/api/runs/{id}/duplicate") == {"yaml": yaml}
    elsewhere = serve(project / "output", start_folder=tmp_path)
    assert elsewhere.get(f"/api/runs/{id}/duplicate")["yaml"] == (
        f"model: {project}/models/mine  # my own\ntokenizer: Qwen/Qwen2.5-0.5B\n"
        f"dataset: [{project}/data/mine.jsonl#10, {{path: {project}/data, split: test}},"
        " 'builtin:python-docs']\n"
    )


def test_converts_the_config_of_another_tool(panel):
    yaml = (
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: dpo\nfinetuning_type: lora\n"
        "dataset: pairs.jsonl\ncutoff_len: 512\n"
    )
    converted = post_json(panel, "/api/convert", yaml=yaml)
    assert "task: dpo\n" in converted["yaml"]
    assert "max_length: 512" in converted["yaml"]
    assert any("finetuning_type" in notice["text"] for notice in converted["notices"])
    error = post_json(panel, "/api/convert", 400, yaml="no_such_key: 1\n")["error"]
    assert "no_such_key" in error["what"]
