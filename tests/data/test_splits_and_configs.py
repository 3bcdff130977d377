"""Folders of files with the names of splits, and configurations that a dataset card declares."""

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.image_shards import open_image_shards
from paceline.data.sources.kinds import classifies_images
from paceline.data.sources.resolve import open_source
from paceline.data.streaming.sources import find_sources
from paceline.models.builtin import resolve_model


def rows_of(name: str) -> list[dict[str, str]]:
    return [{"prompt": name, "completion": str(number)} for number in range(2)]


def write(path: Path) -> Path:
    """Write rows whose prompts are the stem of the file, in the format that the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = rows_of(path.name.partition(".")[0])
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix in (".csv", ".tsv"):
        comma = "," if path.suffix == ".csv" else "\t"
        lines = [comma.join(rows[0]), *(comma.join(row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".txt":
        path.write_text(rows[0]["prompt"])
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(path: Path | str, **settings: Any) -> list[str]:
    source = open_source(DatasetSource(path=str(path), **settings))
    return list(dict.fromkeys(row["prompt"] for _, row in source.rows(0)))


def notices(path: Path | str, **settings: Any) -> str:
    source = open_source(DatasetSource(path=str(path), **settings))
    return "\n".join(f"{level}: {text}" for level, text in source.notices)


def error(path: Path | str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_source(DatasetSource(path=str(path), **settings))
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow"])
@pytest.mark.parametrize(
    "held_out",
    ["test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation", "my_test",
     "test-2", "TEST", "test/part-0", "sub/val/a"],
)  # fmt: skip
def test_held_out_file_is_not_trained(tmp_path: Path, held_out: str, suffix: str) -> None:
    write(tmp_path / f"data{suffix}")
    file = write(tmp_path / f"{held_out}{suffix}")
    assert prompts(tmp_path) == ["data"]
    assert f"held out by name and not trained on: {file.name}" in notices(tmp_path)
    # The files are used if the config names them.
    assert prompts(file) == [file.stem]
    pattern = f"{tmp_path}/**/*{suffix}"
    assert set(prompts(pattern)) == {"data", file.stem}
    assert f"also matches held-out files by their names: {file.name}" in notices(pattern)


@pytest.mark.parametrize("name", ["contest", "latest", "developer", "evaluated", "valued"])
def test_names_that_contain_a_split_are_training_data(tmp_path: Path, name: str) -> None:
    write(tmp_path / "data.jsonl")
    write(tmp_path / f"{name}.jsonl")
    assert sorted(prompts(tmp_path)) == sorted(["data", name])


def test_held_out_files_alone_are_used(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl")
    assert prompts(tmp_path) == ["test"]
    assert "warning" in notices(tmp_path)
    assert "test.jsonl" in notices(tmp_path)
    write(tmp_path / "dev.jsonl")
    assert prompts(tmp_path) == ["dev", "test"]
    assert "has no split `train`" in error(tmp_path, split="train")


def test_split_selects_files_and_unknown_split_is_an_error(tmp_path: Path) -> None:
    for name in ("train", "extra", "dev", "test", "deep/custom/data"):
        write(tmp_path / f"{name}.jsonl")
    assert prompts(tmp_path) == ["data", "extra", "train"]
    assert prompts(tmp_path, split="validation") == ["dev"]
    assert prompts(tmp_path, split="test") == ["test"]
    assert prompts(tmp_path, split="custom") == ["data"]
    assert prompts(tmp_path, split="extra") == ["extra"]
    text = error(tmp_path, split="tests")
    assert "has no split `tests`" in text
    assert "test, train, validation" in text


def test_splits_of_the_hub_layout(tmp_path: Path) -> None:
    for name in ("train_sft", "test_sft", "train_gen"):
        write(tmp_path / f"data/{name}-00000-of-00001.parquet")
    text = error(tmp_path)
    assert "train_gen" in text
    assert "train_sft" in text
    assert prompts(tmp_path, split="train_sft") == ["train_sft-00000-of-00001"]
    assert prompts(tmp_path, split="test_sft") == ["test_sft-00000-of-00001"]


def test_part_of_a_split_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl")
    assert f"`{file}#10%`" in error(file, split="train[:10%]")
    assert "once for each split" in error(tmp_path, split="train+test")


def test_split_and_name_of_a_file_are_reported(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl")
    assert "`split: test` has no effect" in notices(file, split="test")
    assert "`name: main` has no effect" in notices(file, name="main")
    assert notices(write(tmp_path / "test.jsonl"), split="test") == ""
    assert "`name: main` has no effect" in notices("builtin:python-docs", name="main")
    source = open_source(DatasetSource(path=str(write(tmp_path / "rows.json")), split="test"))
    assert len(list(source.rows(0))) == 2
    assert "the file has no splits" in source.notices[0][1]
    config = Config(
        model="builtin:qwen2-micro",
        dataset={"path": f"file://{file}", "name": "main"},
        streaming=True,
    )
    assert "`name: main` has no effect" in find_sources(config)[0].resolved.notices[0][1]


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/held*, more/test.jsonl]
- config_name: socratic
  data_dir: socratic
- config_name: all
  data_files: "**/*.jsonl"
---
# A dataset
"""


def make_card(folder: Path, text: str = CARD) -> Path:
    for name in ("main/train-0", "main/held-out", "more/test", "socratic/a", "socratic/test"):
        write(folder / f"{name}.jsonl")
    (folder / "README.md").write_text(text)
    return folder


def test_name_selects_configuration_of_card(tmp_path: Path) -> None:
    folder = make_card(tmp_path)
    assert prompts(folder, name="main") == ["train-0"]
    assert "using split `train`; not used: test" in notices(folder, name="main")
    assert prompts(folder, name="main", split="test") == ["held-out", "test"]
    assert prompts(folder, name="socratic") == ["a"]
    assert len(prompts(folder, name="all")) == 4
    text = error(folder, name="mian")
    assert "no configuration `mian`" in text
    assert "main, socratic, all" in text
    assert "did you mean `main`?" in text
    text = error(folder)
    assert "several configurations" in text
    assert "main, socratic, all" in text
    assert "no split `validation`" in error(folder, name="main", split="validation")


@pytest.mark.parametrize("change", [("- config_name: all", "- default: true\n  config_name: all"),
                                    ("config_name: all", "config_name: default")])  # fmt: skip
def test_default_configuration(tmp_path: Path, change: tuple[str, str]) -> None:
    folder = make_card(tmp_path, CARD.replace(*change))
    assert len(prompts(folder)) == 4
    assert "not used: main, socratic" in notices(folder)


def test_card_with_one_configuration_and_other_settings(tmp_path: Path) -> None:
    card = "---\nconfigs:\n- config_name: x\n  sep: ';'\n  data_files: main/*.jsonl\n---\n"
    folder = make_card(tmp_path, card)
    assert prompts(folder) == ["held-out", "train-0"]
    assert "settings of the dataset card that are not used: sep" in notices(folder)
    (folder / "README.md").write_text(card.replace("main/*", "absent/*"))
    text = error(folder)
    assert "no data files of the split `train` of the configuration `x`" in text
    assert "absent/*.jsonl" in text
    (folder / "README.md").write_text("---\nconfigs: 3\n---\n")
    assert "`configs` cannot be read" in notices(folder)


def test_name_without_card_is_a_subfolder(tmp_path: Path) -> None:
    for name in ("main/train", "main/test", "socratic/train"):
        write(tmp_path / f"{name}.jsonl")
    assert prompts(tmp_path, name="main") == ["train"]
    assert "main, socratic" in error(tmp_path, name="other")
    write(tmp_path / "flat" / "data.jsonl")
    assert "no configuration `main`" in error(tmp_path / "flat", name="main")
    assert prompts(tmp_path / "flat", name="default") == ["data"]


def test_validation_reads_a_held_out_split(tmp_path: Path) -> None:
    def names(folder: Path, **settings: Any) -> list[str]:
        source = open_source(DatasetSource(path=str(folder), **settings), validation=True)
        return [path.name for path in source.files]

    for name in ("train", "test"):
        write(tmp_path / "a" / f"{name}.jsonl")
    assert names(tmp_path / "a") == ["test.jsonl"]
    assert names(tmp_path / "a", split="train") == ["train.jsonl"]
    write(tmp_path / "a" / "dev.jsonl")
    assert names(tmp_path / "a") == ["dev.jsonl"]
    write(tmp_path / "b" / "data.jsonl")
    assert names(tmp_path / "b") == ["data.jsonl"]
    folder = make_card(tmp_path / "c")
    assert names(folder, name="main") == ["held-out.jsonl", "test.jsonl"]
    config = Config(
        model="builtin:qwen2-micro", dataset=str(tmp_path / "a"), val_dataset=str(tmp_path / "a")
    )
    prepared = prepare_tokens(config, "sft", resolve_model)
    assert prepared.eval_folder != prepared.train_folder


def test_streams_of_a_folder_leave_out_held_out_files(tmp_path: Path) -> None:
    for name in ("data", "test"):
        write(tmp_path / f"{name}.jsonl")
    for path in (str(tmp_path), f"file://{tmp_path}"):
        config = Config(model="builtin:qwen2-micro", dataset=path, streaming=True)
        (source,) = find_sources(config)
        assert [Path(location).name for location in source.locations] == ["data.jsonl"]
        assert "test.jsonl" in source.resolved.notices[0][1]


def test_image_shards_of_a_test_split_are_left_out(tmp_path: Path) -> None:
    from PIL import Image

    png = BytesIO()
    Image.new("L", (2, 2)).save(png, "PNG")
    for shard in ("train-0.tar", "test-0.tar"):
        with tarfile.open(tmp_path / shard, "w") as archive:
            for number, kind in enumerate("ab"):
                for suffix, content in (("png", png.getvalue()), ("cls", kind.encode())):
                    info = tarfile.TarInfo(f"{number}.{suffix}")
                    info.size = len(content)
                    archive.addfile(info, BytesIO(content))
    shards = open_image_shards(str(tmp_path))
    assert {name.partition("/")[0] for name in shards.names or []} == {"train-0.tar"}
    assert "test-0.tar" in shards.notices[0][1]
    shards = open_image_shards(str(tmp_path), validation=True)
    assert {name.partition("/")[0] for name in shards.names or []} == {"test-0.tar"}


def test_classify_reads_texts_of_the_hub_layout(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text("texts")
    config = Config(model="builtin:qwen2-micro", dataset=str(tmp_path), task="classify")
    assert not classifies_images(config)
    (tmp_path / "data" / "a.png").write_bytes(b"x")
    assert classifies_images(config)
