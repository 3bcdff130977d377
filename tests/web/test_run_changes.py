"""Rename, archive and delete runs in the panel."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from event_logs import begin, emit_steps, finished
from panels import Served

from paceline.core.run_dir import LaunchLock, RunDir, lock_run


def change(served: Served, method: str, path: str, status: int = 200, **body: object) -> Any:
    """Send a request with the token, check the status, and return the response."""
    options = {"json": body} if method == "PUT" else {}
    response = served.client.request(method, path, headers=served.with_token, **options)
    assert response.status_code == status, response.text
    return response.json()


def test_new_name_is_shown_and_leaves_the_folder(serve, tmp_path):
    finished(tmp_path / "first")
    served = serve(tmp_path)
    id = served.find_run_id()
    change(served, "PUT", f"/api/runs/{id}/note", note="kept", tags=["a"])
    change(served, "PUT", f"/api/runs/{id}/name", name="  Größer\n\x1b[1m & <b>  ")
    (run,) = served.get("/api/runs")["runs"]
    assert run["name"] == "Größer \ufffd[1m & <b>"
    assert (run["folder_name"], run["path"], run["note"], run["tags"]) == (
        "first", "first", "kept", ["a"],
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [".paceline-ui.json", "first"]
    change(served, "PUT", f"/api/runs/{id}/note", note="")
    assert served.get("/api/runs")["runs"][0]["name"].startswith("Größer")
    change(served, "PUT", f"/api/runs/{id}/name", name="")
    assert served.get("/api/runs")["runs"][0]["name"] == "first"
    assert json.loads((tmp_path / ".paceline-ui.json").read_text()) == {"runs": {}}
    change(served, "PUT", f"/api/runs/{id}/name", 422, name="x" * 101)


def test_archived_run_stays_where_it_is(serve, tmp_path):
    finished(tmp_path / "first")
    served = serve(tmp_path)
    id = served.find_run_id()
    assert served.get("/api/runs")["runs"][0]["archived"] is False
    assert change(served, "PUT", f"/api/runs/{id}/archived", archived=True)["archived"] is True
    assert served.get("/api/runs")["runs"][0]["archived"] is True
    assert (tmp_path / "first/events.jsonl").is_file()
    change(served, "PUT", f"/api/runs/{id}/archived", archived=False)
    assert served.get("/api/runs")["runs"][0]["archived"] is False


def test_deleted_run_is_gone_with_its_note(serve, tmp_path):
    for name in ("first", "group/second"):
        finished(tmp_path / name)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (tmp_path / "group/second/link").symlink_to(outside)
    served = serve(tmp_path)
    id = served.find_run_id("second")
    change(served, "PUT", f"/api/runs/{id}/note", note="gone")
    assert change(served, "DELETE", f"/api/runs/{id}") == {"id": id}
    assert [run["name"] for run in served.get("/api/runs")["runs"]] == ["first"]
    assert list((tmp_path / "group").iterdir()) == []
    assert (outside / "file").read_text() == "kept"
    assert "second" not in (tmp_path / ".paceline-ui.json").read_text()
    change(served, "DELETE", f"/api/runs/{id}", 404)
    change(served, "DELETE", "/api/runs/first", 422)


@pytest.mark.parametrize("path", ["name", "archived", ""])
def test_changes_need_the_token(serve, tmp_path, path):
    finished(tmp_path / "first")
    served = serve(tmp_path)
    url = f"/api/runs/{served.find_run_id()}/{path}".rstrip("/")
    method = "PUT" if path else "DELETE"
    assert served.client.request(method, url).status_code == 401
    assert (tmp_path / "first/report.json").is_file()


def test_run_in_progress_is_not_deleted(serve, tmp_path):
    emit_steps(begin(tmp_path / "live"), 1, 3)
    for name in ("launching", "locked"):
        finished(tmp_path / name)
    served = serve(tmp_path)
    with LaunchLock(RunDir(tmp_path / "launching")), lock_run(RunDir(tmp_path / "locked"), 0.0):
        for name in ("live", "launching", "locked"):
            error = change(served, "DELETE", f"/api/runs/{served.find_run_id(name)}", 409)["error"]
            assert "is running" in error["what"]
            assert (tmp_path / name / "events.jsonl").is_file()


def test_nothing_is_deleted_through_a_link(serve, tmp_path):
    """A run whose folder became a link, and one whose lock is a link."""
    served_folder = tmp_path / "served"
    finished(served_folder / "group" / "first")
    finished(served_folder / "locked")
    target = tmp_path / "precious"
    target.write_text("kept")
    (served_folder / "locked/.launch.lock").symlink_to(target)
    served = serve(served_folder)
    id, locked_id = served.find_run_id("first"), served.find_run_id("locked")
    os.rename(served_folder / "group", tmp_path / "elsewhere")
    (served_folder / "group").symlink_to(tmp_path / "elsewhere")
    change(served, "DELETE", f"/api/runs/{id}", 404)
    assert (tmp_path / "elsewhere/first/events.jsonl").is_file()
    change(served, "DELETE", f"/api/runs/{locked_id}", 400)
    assert target.read_text() == "kept"


def test_served_folder_itself_is_not_deleted(serve, tmp_path):
    finished(tmp_path)
    served = serve(tmp_path)
    error = change(served, "DELETE", f"/api/runs/{served.find_run_id()}", 400)["error"]
    assert "served folder itself" in error["what"]
    assert (tmp_path / "events.jsonl").is_file()


def test_folder_that_cannot_be_opened_is_reported(serve, tmp_path):
    """The folder above a run is replaced by a link after the run was found."""
    from paceline.web.runs import deletion

    finished(tmp_path / "served/group/first")
    served = serve(tmp_path / "served")
    run = served.panel.runs.get(served.find_run_id())
    os.rename(tmp_path / "served/group", tmp_path / "elsewhere")
    (tmp_path / "served/group").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="cannot delete"):
        deletion.delete_run(run, Path(served.panel.folder))
    assert (tmp_path / "elsewhere/first/events.jsonl").is_file()


def test_continuation_says_what_the_learning_rate_does(serve, tmp_path):
    config = {"train_args": {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}}
    finished(tmp_path / "one", config=config, derived={"learning_rate": 2e-3, "steps": 20})
    served = serve(tmp_path)
    answer = served.get(f"/api/runs/{served.find_run_id()}/longer?steps=40")
    assert (answer["step"], answer["steps"], answer["schedule"]) == (20, 40, "cosine")
    assert answer["before"] == 1e-3
    assert 1e-3 < answer["after"] < 2e-3
    assert 0 < answer["end"] < 1e-5
