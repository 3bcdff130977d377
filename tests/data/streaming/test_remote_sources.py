"""Rows of files in an object store (the S3 API of a moto server)."""

import gzip
import json
from pathlib import Path

import pytest
from commands import MICRO, digest, report, run
from s3_server import s3_server, use_server

pytestmark = [pytest.mark.slow, pytest.mark.soak]


def upload_rows(folder: str) -> None:
    import s3fs

    store = s3fs.S3FileSystem(skip_instance_cache=True)
    for number in range(3):
        rows = [{"prompt": f"{number}", "completion": f"row {row} of it"} for row in range(20)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        name = f"{folder}/rows-{number}.jsonl"
        if number == 2:
            store.pipe(f"{name}.gz", gzip.compress(text.encode()))
        else:
            store.pipe(name, text.encode())


def test_run_on_object_store_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [setting for setting in MICRO if not setting.startswith("dataset=")]
    with s3_server() as url:
        use_server(url, monkeypatch)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        upload_rows("bucket/rows")
        # `streaming: auto`, the default, streams rows at a URL.
        data = ("dataset=s3://bucket/rows/*", "train_args.lr_scheduler_type=constant")
        train = (*settings, *data, "parallel.mode=single")
        steps = ("train_args.max_steps=24", f"output_dir={tmp_path / 'full'}")
        run(*train, *steps)
        assert report(tmp_path / "full")["data"]["read"] >= 48
        resumed = f"output_dir={tmp_path / 'resumed'}"
        run(*train, "train_args.max_steps=12", resumed)
        # Another machine has none of the files.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
        run(*train, "train_args.max_steps=24", resumed, "--allow-config-change")
        assert digest(tmp_path / "resumed") == digest(tmp_path / "full")
        error = run(*train, f"output_dir={tmp_path / 'none'}", expect=2).stderr
        assert "`max_steps` is required" in error
