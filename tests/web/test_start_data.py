"""Datasets of the folder, uploads that stay within their bounds, and a look at the rows."""

import json

import pytest
from starts import ask

from paceline.core.errors import ConfigError
from paceline.data.sources.builtin import BUILTIN_DATASETS
from paceline.data.sources.readers import TABLE_SUFFIXES, TEXT_SUFFIXES
from paceline.web.api import datasets
from paceline.web.api.datasets import SUFFIXES, safe_name, take_upload

ROW = json.dumps({"prompt": "What is a pace line?", "completion": "Riders in a row."}) + "\n"


def upload(served, name: str, content: bytes, status: int = 200) -> dict:
    answer = served.client.post(
        "/api/upload", files={"file": (name, content)}, headers=served.with_token
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def test_what_may_be_uploaded_is_what_is_read():
    assert set(SUFFIXES) == {*TABLE_SUFFIXES, *TEXT_SUFFIXES}
    assert {f"builtin:{name}" for name in BUILTIN_DATASETS} <= set(datasets.BUILT_IN)


def test_an_upload_lies_in_the_folder_and_never_over_another(serve, tmp_path):
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
    listed = served.get("/api/datasets")["datasets"]
    assert {dataset["path"] for dataset in listed} == {
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
def test_a_name_is_reduced_to_a_safe_one(file_name, name):
    assert safe_name(file_name) == name


@pytest.mark.parametrize(
    "file_name", ["x.py", "x.pkl", "x.pt", ".jsonl", "", "..", "x.jsonl/", "x.safetensors", "x"]
)
def test_what_is_no_data_is_refused(serve, tmp_path, file_name):
    with pytest.raises(ConfigError, match="not a supported data file"):
        safe_name(file_name)


def test_an_upload_that_is_no_data_leaves_nothing(serve, tmp_path):
    served = serve(tmp_path)
    assert ".jsonl" in upload(served, "x.py", b"print()", 400)["error"]["allowed"]
    assert list((tmp_path / "datasets").iterdir()) == []


def test_bytes_are_counted_as_they_come(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(
        datasets,
        "take_upload",
        lambda request, folder: take_upload(request, folder, 100_000),
    )
    served = serve(tmp_path)
    assert upload(served, "small.csv", b"x" * 90_000)["size_bytes"] == 90_000
    assert "larger than" in upload(served, "large.csv", b"x" * 200_000, 413)["error"]["what"]

    def endless():  # tells no length
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="endless.csv"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 10_000

    headers = {**served.with_token, "Content-Type": "multipart/form-data; boundary=b"}
    assert served.client.post("/api/upload", content=endless(), headers=headers).status_code == 413
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["small.csv"]


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=other"]
)
def test_a_body_that_is_no_form_is_refused(serve, tmp_path, kind):
    served = serve(tmp_path)
    answer = served.client.post(
        "/api/upload", content=b"--b\r\n\r\n", headers={**served.with_token, "Content-Type": kind}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["fix"]


def test_uploads_do_not_follow_a_link_out_of_the_folder(serve, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "datasets").symlink_to(tmp_path / "elsewhere")
    assert "link" in upload(serve(tmp_path / "runs"), "x.csv", b"a", 400)["error"]["what"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_runs_and_links_are_not_listed_as_data(serve, tmp_path):
    (tmp_path / "secret.csv").write_text("a\n")
    runs = tmp_path / "runs"
    for name in (
        "run/events.jsonl",
        "run/rows.jsonl",
        "more/deep/rows.csv",
        ".hidden/rows.csv",
        "note.py",
    ):
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).write_text("")
    (runs / "link.csv").symlink_to(tmp_path / "secret.csv")
    assert [dataset["path"] for dataset in serve(runs).get("/api/datasets")["datasets"]] == [
        "./more/deep/rows.csv"
    ]


def test_the_first_rows_are_shown_as_the_model_sees_them(serve, tmp_path):
    served = serve(tmp_path)
    path = upload(served, "mine.jsonl", ROW.encode() * 7)["path"]
    preview = ask(
        served, "/api/preview", yaml=f"model: builtin:qwen2-micro\ndataset: {path}\n", rows=3
    )
    assert len(preview["rows"]) == 3
    assert [segment["text"] for segment in preview["rows"][0]["segments"] if segment["label"]] == [
        "Riders in a row.<|im_end|>"
    ]
    error = ask(
        served, "/api/preview", 400, yaml="model: builtin:qwen2-micro\ndataset: ./nothing.csv\n"
    )["error"]
    assert "nothing.csv" in error["what"]
    assert "/tmp/paceline-panel" not in error["what"]
