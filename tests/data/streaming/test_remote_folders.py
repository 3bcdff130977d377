"""Folders at a URL: the configurations of their dataset card, splits, and shards."""

import functools
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.data.image_shards import open_image_shards
from paceline.data.images import open_images
from paceline.data.sources.kinds import classifies_images
from paceline.data.sources.resolve import open_source
from paceline.data.streaming.order import StreamShuffle
from paceline.data.streaming.remote import fetch
from paceline.data.streaming.sources import StreamSource, find_sources, open_rows
from paceline.tasks.preview import preview

CARD = """---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: data/part-*.jsonl
  - split: test
    path: [data/held.jsonl, more/*.jsonl]
- config_name: other
  data_dir: other
---
"""
FILES = {
    "README.md": CARD,
    "data/part-0.jsonl": '{"text": "a"}\n',
    "data/part-1.jsonl": '{"text": "b"}\n',
    "data/held.jsonl": '{"text": "c"}\n',
    "more/x.jsonl": '{"text": "d"}\n',
    "other/rows.jsonl": '{"text": "e"}\n',
    "other/test.jsonl": '{"text": "f"}\n',
    "other/.hidden.jsonl": "{}\n",
    "other/dataset_info.json": "{}",
}


@pytest.fixture(params=["memory", "file", "http"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a folder with :data:`FILES`."""
    if request.param == "memory":
        url = f"memory://{tmp_path.name}"
        for name, text in FILES.items():
            with fsspec.open(f"{url}/{name}", "w") as file:
                file.write(text)
        yield url
        return
    for name, text in FILES.items():
        path = tmp_path / "rows" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if request.param == "file":
        yield f"file://{tmp_path}/rows"
        return

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/rows"
        server.shutdown()


def find(url: str, **settings: Any) -> StreamSource:
    dataset = {"path": url, **settings}
    (source,) = find_sources(Config(model="builtin:qwen2-micro", dataset=dataset, streaming=True))
    return source


def names(url: str, **settings: Any) -> list[str]:
    return [location.rpartition("/")[2] for location in find(url, **settings).locations]


def test_configurations_of_a_remote_card(folder: str) -> None:
    assert names(folder) == names(f"{folder}/") == ["part-0.jsonl", "part-1.jsonl"]
    text = "\n".join(notice[1] for notice in find(folder).resolved.notices)
    assert "configuration `main`, the default; not used: other" in text
    assert "using split `train`; not used: test" in text
    assert names(folder, split="test") == ["held.jsonl", "x.jsonl"]
    assert names(folder, name="other") == ["rows.jsonl"]
    assert names(folder, name="other", split="test") == ["test.jsonl"]
    with raises_error(ConfigError, code="unknown-configuration", naming="absent"):
        find(folder, name="absent")
    with raises_error(ConfigError, code="unknown-split", naming="dev"):
        find(folder, split="dev")


def test_urls_of_data_that_are_not_streamed(folder: str) -> None:
    for name in (f"{folder}/data/part-0.jsonl", f"{folder}/*.jsonl", folder):
        with raises_error(ConfigError, code="url-without-streaming") as caught:
            open_source(DatasetSource(path=name))
        caught.match("copy the files to this host")
    for name, has_images in ((f"{folder}/data/part-0.jsonl", False), (f"{folder}/shards", True)):
        config = Config(model="builtin:qwen2-micro", dataset=name, task="classify")
        assert classifies_images(config) == has_images


def test_preview_of_rows_at_a_url(folder: str) -> None:
    config = Config(model="builtin:qwen2-micro", dataset=folder, task="pretrain")
    shown = preview(config, 5)
    assert ["".join(part["text"] for part in row["segments"])[:1] for row in shown["rows"]] == ["a"]
    assert f"{folder}: rows of the first of 2 files" in [text for _, text in shown["notices"]]


def test_plain_text_at_a_url(folder: str) -> None:
    source = find(f"{folder}/README.md")
    with raises_error(ConfigError, code="text-at-url"):
        open_rows(
            [source],
            Config(model="builtin:qwen2-micro", dataset=folder),
            StreamShuffle(0, False, 1),
        )


def test_subfolder_is_a_configuration_without_a_card(folder: str) -> None:
    parent = folder.rpartition("/")[0]
    if parent.count("/") > 2 or parent.startswith("http"):
        assert names(parent, name="rows")
    assert names(f"{folder}/other") == ["rows.jsonl"]
    with raises_error(ConfigError, code="unknown-configuration", naming="main"):
        find(f"{folder}/other", name="main")


def test_files_and_patterns_at_a_url(folder: str) -> None:
    assert names(f"{folder}/data/part-{{0..1}}.jsonl") == ["part-0.jsonl", "part-1.jsonl"]
    assert names(f"{folder}/data/*.jsonl") == ["held.jsonl", "part-0.jsonl", "part-1.jsonl"]
    source = find(f"{folder}/data/part-0.jsonl", split="test", name="main")
    text = "\n".join(notice[1] for notice in source.resolved.notices)
    assert "`split: test` has no effect" in text
    assert "`name: main` has no effect" in text
    with raises_error(ConfigError, code="no-data-files"):
        find(f"{folder}/absent")
    if folder.startswith("http"):
        (location,) = find(f"{folder}/data/part-0.jsonl?download=true").locations
        assert fetch(location).name == "part-0.jsonl"


def test_held_out_shards_of_a_remote_folder(tmp_path: Path) -> None:
    from PIL import Image

    png = io.BytesIO()
    Image.new("L", (2, 2)).save(png, "PNG")
    url = f"memory://{tmp_path.name}/shards"
    for shard in ("train-0.tar", "val-0.tar"):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            for number, kind in enumerate("ab"):
                for suffix, data in (("png", png.getvalue()), ("cls", kind.encode())):
                    info = tarfile.TarInfo(f"{number}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        with fsspec.open(f"{url}/{shard}", "wb") as file:
            file.write(content.getvalue())
    for validation, expected in ((False, "train-0.tar"), (True, "val-0.tar")):
        shards = open_image_shards(url, validation)
        assert all(expected in f"{shards.source}/{name}" for name in shards.names or [])
        assert len(open_images(url, 0, validation=validation)) == 2
    assert "train-0.tar" in open_image_shards(url, validation=True).notices[0][1]
