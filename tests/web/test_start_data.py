"""Test the list of datasets, the limits of uploads, and the preview of rows."""

import json

import pytest
from raised import raises_error
from starts import post_json

from paceline.core.errors import ConfigError
from paceline.data.sources.builtin import BUILTIN_DATASETS
from paceline.data.sources.readers import TABLE_SUFFIXES, TEXT_SUFFIXES
from paceline.models.hub_configs import known_ids
from paceline.web.api import datasets
from paceline.web.api.datasets import SUFFIXES, safe_name, take_upload
from paceline.web.presets import BUILT_IN_DATASETS, HUB_MODELS

ROW = json.dumps({"prompt": "What is a pace line?", "completion": "Riders in a row."}) + "\n"


def upload(served, name: str, content: bytes, status: int = 200) -> dict:
    response = served.client.post(
        "/api/upload", files={"file": (name, content)}, headers=served.with_token
    )
    assert response.status_code == status, response.text
    return response.json()


def test_upload_accepts_all_readable_formats():
    assert set(SUFFIXES) == {*TABLE_SUFFIXES, *TEXT_SUFFIXES}
    assert {f"builtin:{name}" for name in BUILTIN_DATASETS} <= set(BUILT_IN_DATASETS)


def test_models_of_the_hub_are_in_the_table_of_known_models():
    assert set(HUB_MODELS) <= set(known_ids())


def test_upload_never_overwrites_a_file(serve, tmp_path):
    served = serve(tmp_path)
    assert upload(served, "mine.jsonl", ROW.encode()) == {
        "path": "./datasets/mine.jsonl",
        "size_bytes": len(ROW),
    }
    assert upload(served, "mine.jsonl", b"{}\n")["path"] == "./datasets/mine-2.jsonl"
    assert (tmp_path / "datasets" / "mine.jsonl").read_text() == ROW
    assert sorted(path.name for path in (tmp_path / "datasets").iterdir()) == [
        "mine-2.jsonl",
        "mine.jsonl",
    ]
    entries = post_json(served, "/api/datasets")["datasets"]
    assert {dataset["path"] for dataset in entries} == {
        "./datasets/mine.jsonl",
        "./datasets/mine-2.jsonl",
    }


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("../../etc/x.csv", "x.csv"),
        ("C:\\Users\\x y.CSV", "x_y.csv"),
        ("..%2Fx.json", "2Fx.json"),
        ("a\x00b.txt", "a_b.txt"),
        ("数据.jsonl", "数据.jsonl"),
        ("-rf.md", "rf.md"),
        ("a" * 300 + ".csv", "a" * 100 + ".csv"),
    ],
)
def test_safe_name_removes_unsafe_characters(file_name, name):
    assert safe_name(file_name) == name


@pytest.mark.parametrize(
    "file_name", ["x.py", "x.pkl", "x.pt", ".jsonl", "", "..", "x.jsonl/", "x.safetensors", "x"]
)
def test_rejects_unsupported_file_names(serve, tmp_path, file_name):
    with raises_error(ConfigError, code="unknown-file-type"):
        safe_name(file_name)


def test_rejected_upload_leaves_no_file(serve, tmp_path):
    served = serve(tmp_path)
    assert ".jsonl" in upload(served, "x.py", b"print()", 400)["error"]["allowed"]
    assert list((tmp_path / "datasets").iterdir()) == []


def test_size_limit_applies_while_receiving(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(
        datasets,
        "take_upload",
        lambda request, folder: take_upload(request, folder, 100_000),
    )
    served = serve(tmp_path)
    assert upload(served, "small.csv", b"x" * 90_000)["size_bytes"] == 90_000
    assert "larger than" in upload(served, "large.csv", b"x" * 200_000, 413)["error"]["what"]

    def endless():  # without a Content-Length header
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="endless.csv"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 10_000

    headers = {**served.with_token, "Content-Type": "multipart/form-data; boundary=b"}
    assert served.client.post("/api/upload", content=endless(), headers=headers).status_code == 413
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["small.csv"]


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=other"]
)
def test_rejects_a_body_that_is_not_a_form(serve, tmp_path, kind):
    served = serve(tmp_path)
    response = served.client.post(
        "/api/upload", content=b"--b\r\n\r\n", headers={**served.with_token, "Content-Type": kind}
    )
    assert response.status_code == 400
    assert response.json()["error"]["fix"]


def test_upload_does_not_follow_links_out_of_the_folder(serve, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs" / "datasets").symlink_to(tmp_path / "outside")
    assert "link" in upload(serve(tmp_path / "runs"), "x.csv", b"a", 400)["error"]["what"]
    assert list((tmp_path / "outside").iterdir()) == []


def test_list_excludes_runs_and_links(serve, tmp_path):
    (tmp_path / "secret.csv").write_text("a\n")
    runs = tmp_path / "runs"
    for name in (
        "run/events.jsonl",
        "run/rows.jsonl",
        "data/deep/rows.csv",
        ".hidden/rows.csv",
        "note.py",
    ):
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).write_text("")
    (runs / "link.csv").symlink_to(tmp_path / "secret.csv")
    listed = post_json(serve(runs), "/api/datasets")
    assert [dataset["path"] for dataset in listed["datasets"]] == ["./data/deep/rows.csv"]


def test_preview_shows_rows_as_the_model_receives_them(serve, tmp_path):
    served = serve(tmp_path)
    path = upload(served, "mine.jsonl", ROW.encode() * 7)["path"]
    preview = post_json(
        served, "/api/preview", yaml=f"model: builtin:qwen2-micro\ndataset: {path}\n", rows=3
    )
    assert len(preview["rows"]) == 3
    assert [segment["text"] for segment in preview["rows"][0]["segments"] if segment["label"]] == [
        "Riders in a row.<|im_end|>"
    ]
    error = post_json(
        served, "/api/preview", 400, yaml="model: builtin:qwen2-micro\ndataset: ./nothing.csv\n"
    )["error"]
    assert "nothing.csv" in error["what"]
    assert "/tmp/paceline-panel" not in error["what"]
