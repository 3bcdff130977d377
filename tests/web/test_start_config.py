"""Test that the form matches the schema, that checks report line and key, and that edits change the
text."""

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from panels import wait_until

import paceline.web
from paceline import tasks
from paceline.config.fields import KEYS, SECTIONS
from paceline.config.load import load_text
from paceline.web.api.config_paths import missing_paths
from paceline.web.api.form import COMMON, ESSENTIAL, SUGGESTED
from paceline.web.presets import PRESETS

STATIC = Path(paceline.web.__file__).parent / "static"


@pytest.fixture
def panel(serve, tmp_path):
    served = serve(tmp_path / "runs")

    def ask(path: str, status: int = 200, **body: object) -> dict:
        response = served.client.post(path, json=body, headers=served.with_token)
        assert response.status_code == status, response.text
        return response.json()

    served.ask = ask
    return served


def test_every_key_has_exactly_one_field(panel):
    schema = panel.get("/api/schema")
    keys = [key for group in schema["groups"] for key in group["keys"]]
    assert len(keys) == len(set(keys))
    assert set(KEYS) - set(keys) == {"output_dir", "resume"}  # the panel's to set
    assert set(schema["fields"]) == set(KEYS)
    explained = [*schema["fields"].values(), *schema["groups"]]
    assert all(bool(entry["help"]) == bool(entry["help_zh"]) for entry in explained)
    assert all(field["help"] for field in schema["fields"].values())
    rate = schema["fields"]["train_args.warmup_ratio"]
    assert (rate["kind"], rate["minimum"], rate["maximum"]) == ("number", 0, 1)
    assert schema["fields"]["train_args.packing"]["choices"] == ["auto", "true", "false"]


def test_suggested_values_are_valid():
    assert set(SUGGESTED["task"]) == set(tasks.BUILT_IN)
    assert len(ESSENTIAL) <= 10


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_run_as_they_are_or_name_the_file_to_provide(preset, tmp_path):
    loaded = load_text(PRESETS[preset], "config")
    assert [text for level, text in loaded.notices if level == "warning"] == []
    missing = missing_paths(loaded.config, tmp_path, {})
    if loaded.config.sources()[0].path.startswith("builtin:"):
        assert missing == []
    else:
        assert len(missing) == 1


def test_check_of_a_valid_config_returns_its_settings(panel):
    check = panel.ask(
        "/api/check", yaml="model: m\ndataset: d\nlr: 1e-4\ntrain_args:\n  max_steps: 3\n"
    )
    assert (check["ok"], check["error"]) == (True, None)
    assert check["values"]["train_args.learning_rate"] == {"value": 1e-4, "line": 3}
    assert check["values"]["train_args.max_steps"] == {"value": 3, "line": 5}
    assert any("lr" in notice["text"] for notice in check["notices"])


def test_an_unknown_built_in_name_is_reported_at_its_key(panel):
    """Also of one dataset in a list, and before a run is started."""
    yaml = "model: builtin:qwen2-mikro\ndataset: ['builtin:python-docs#4', 'builtin:digit#5%']\n"
    errors = panel.ask("/api/check", yaml=yaml)["errors"]
    assert [(error["key"], error["line"]) for error in errors] == [("dataset", 2), ("model", 1)]
    assert "builtin:digits" in errors[0]["fix"]
    assert "unknown built-in model `builtin:qwen2-mikro`" in errors[1]["what"]
    assert "builtin:qwen2-micro" in errors[1]["fix"]
    started = panel.ask("/api/start", 400, yaml=yaml, name="new")
    assert started["error"]["code"] == "unknown-name"


def test_every_error_has_its_line_and_key(panel):
    check = panel.ask(
        "/api/check",
        yaml="model: m\ntrain_args:\n  max_stepz: 3\n  precision: 7\n  max_length: 1\n",
    )
    assert not check["ok"]
    assert [(mistake["line"], mistake["key"]) for mistake in check["errors"]] == [
        (3, None), (4, "train_args.precision"), (5, "train_args.max_length"), (None, None),
    ]  # fmt: skip
    assert "max_steps" in check["errors"][0]["fix"]
    assert "dataset" in check["errors"][3]["what"]
    assert check["error"] == check["errors"][0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: [a\n", 1),
        ("model: a\n\tdataset: b\n", 2),
        ("model: a\nmodel: b\n", 2),
        ("", None),
        ("- a\n", None),
        ("model: !!python/object:os.system x\n", 1),
    ],
)
def test_text_that_is_not_a_config_is_reported(panel, text, line):
    check = panel.ask("/api/check", yaml=text)
    assert not check["ok"]
    assert check["error"]["line"] == line
    assert check["error"]["what"]


def test_edit_keeps_comments(panel):
    text = "model: m # a comment\ndataset: d\n"
    edited = panel.ask(
        "/api/yaml", yaml=text, values={"lora.rank": "16", "train_args.learning_rate": "1e-4"}
    )
    assert edited == {
        "yaml": f"{text}lora:\n  rank: 16\ntrain_args:\n  learning_rate: 1e-4\n",
        "kept": True,
    }
    edited = panel.ask(
        "/api/yaml", yaml=edited["yaml"], remove=["lora.rank", "train_args.learning_rate"]
    )
    assert edited["yaml"] == text
    response = panel.ask("/api/yaml", 400, yaml=text, values={"nothing": 1})
    assert response["error"]["code"] == "unknown-config-key"


def test_post_requests_need_the_token(panel):
    for path in (
        "check",
        "yaml",
        "plan",
        "steps",
        "start",
        "upload",
        "preview",
        "datasets",
        "models",
        "convert",
        "planner",
        "runs/0123456789ab/stop",
        "runs/0123456789ab/resume",
        "runs/0123456789ab/diff",
        "runs/0123456789ab/chat",
        "runs/0123456789ab/export",
    ):
        assert panel.client.post(f"/api/{path}", json={}).status_code == 401, path


@pytest.mark.soak
def test_plan_reports_what_fits(panel):
    plan = panel.ask(
        "/api/plan",
        yaml="model: builtin:qwen2-micro\ndataset: builtin:python-docs\nparallel: {device: cpu}\n",
    )
    assert plan["chosen"] in [mode["mode"] for mode in plan["modes"]]
    assert plan["max_steps"] is None
    error = panel.ask("/api/plan", 400, yaml="model: m\ndataset: d\ntask: nothing\n")["error"]
    assert "unknown `task: nothing`" in error["what"]
    assert error["fix"]


@pytest.mark.soak
def test_newer_plan_cancels_the_older(panel):
    body = {
        "yaml": (
            "model: builtin:qwen2-micro\ndataset: builtin:python-docs\nparallel: {device: cpu}\n"
        )
    }
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(
            httpx.post(
                f"{panel.client.base_url}/api/plan", json=body, headers=panel.with_token, timeout=60
            )
        )

    older = threading.Thread(target=ask)
    older.start()
    time.sleep(0.7)
    newer = panel.client.post("/api/plan", json=body, headers=panel.with_token)
    older.join()
    assert newer.status_code == 200
    assert answers[0].status_code == 400
    assert "newer request" in answers[0].json()["error"]["what"]


@pytest.mark.soak
def test_plans_of_two_pages_do_not_cancel_each_other(panel):
    """They are made one after the other, also while the process that plans starts."""
    yaml = "model: Qwen/Qwen2.5-0.5B\ndataset: d\n"

    def ask(number: int) -> int:
        body = {"yaml": yaml, "world_size": number + 1, "device": "T4", "page": f"page {number}"}
        return int(panel.ask("/api/plan", **body)["world_size"])

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(ask, range(4))) == [1, 2, 3, 4]


@pytest.mark.soak
def test_all_plans_come_from_one_process_that_ends_with_the_server(panel):
    """If it is killed, the request fails with an error, and the next one starts another."""
    body = {"yaml": "model: Qwen/Qwen2.5-0.5B\ndataset: d\n", "world_size": 2, "device": "T4"}
    processes = []
    for _ in range(3):
        assert panel.ask("/api/plan", **body)["world_size"] == 2
        processes.append(panel.panel.planner.process)
    assert len({process.pid for process in processes}) == 1
    assert psutil.Process(processes[0].pid).nice() > os.nice(0)
    processes[0].kill()
    wait_until(lambda: panel.panel.planner.process.returncode is not None)
    assert panel.ask("/api/plan", **body)["world_size"] == 2
    last = panel.panel.planner.process
    assert last.pid != processes[0].pid
    panel.panel.planner.close()
    wait_until(lambda: not psutil.pid_exists(last.pid))


def test_number_of_steps_depends_on_the_data(panel):
    text = (
        "model: builtin:qwen2-micro\ndataset: builtin:python-docs#40\nparallel: {device: cpu,"
        " num_gpus: 1}\n"
    )
    steps = panel.ask("/api/steps", yaml=f"{text}train_args: {{num_train_epochs: 2}}\n")
    assert (steps["derived"]["steps"], steps["derived"]["global_batch_size"]) == (20, 4)


def text_keys(text: str) -> dict[str, set[str]]:
    """Return the keys of a table of texts, by language."""
    parts = re.split(r"^const (en|zh) = \{", text, flags=re.MULTILINE)
    return {
        name: set(re.findall(r'"([\w.]+)":', body.split("\n};")[0]))
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_every_text_exists_in_both_languages():
    files = [STATIC / "i18n" / name for name in ("start.js", "form.js", "plan.js")]
    by_file = [text_keys(path.read_text(encoding="utf-8")) for path in files]
    keys = {name: set().union(*(each[name] for each in by_file)) for name in ("en", "zh")}
    # sections without a text are named by their key
    section_keys = {f"group.{name}" for name in SECTIONS if name != "lora"}
    assert keys["en"] - keys["zh"] == section_keys
    assert keys["zh"] <= keys["en"]
    pages = "".join(
        path.read_text(encoding="utf-8")
        for path in (STATIC / "pages").glob("*.js")
        if path.name != "run.js"
    )
    used = set(
        re.findall(
            r'\bt\("((?:start|plan|whatif|data|model|choose|paste|chat|changes)\.[\w.]+)"', pages
        )
    )
    assert used - keys["en"] == set()
    assert {f"preset.{preset}" for preset in PRESETS} <= keys["en"]
    labeled = (*ESSENTIAL, *(key for keys in COMMON.values() for key in keys))
    assert {f"label.{key}" for key in labeled} <= keys["en"]
