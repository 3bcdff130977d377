"""The token cache: hits, keys, and processes that build concurrently or are killed."""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from prepared_tokens import (
    CHATS,
    MODEL,
    PAIRS,
    expect_error,
    prepare,
    save,
    train_set,
)

from paceline.core.files import cache_dir
from paceline.data.cache import build_once


def test_malformed_row_leaves_no_cache_entry(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIRS[0]) + "\n{broken\n")
    for _ in range(2):  # an entry would be read the second time
        assert f"line 2 of `{path}`" in expect_error(str(path))
    assert not list((cache_dir() / "tokens").glob(f".*.{os.getpid()}.tmp"))


def test_cache_hit_returns_same_tokens_without_heavy_imports(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", [*CHATS, {"foo": 1}])
    first = prepare(data)
    second = prepare(data)
    assert first.train_folder == second.train_folder
    assert first.counts == second.counts
    assert "tokenized in" in first.notices[-1][1]
    assert "read from the token cache" in second.notices[-1][1]
    assert first.notices[:-1] == second.notices[:-1]
    code = (
        "import sys; from paceline.config.schema import Config; from paceline.data.encoding.prepare"
        f" import prepare_tokens; from paceline.models.builtin import resolve_model\n"
        f"t = prepare_tokens(Config(model={MODEL!r}, dataset={data!r}), 'sft', resolve_model)\n"
        "assert 'from the token cache' in t.notices[-1][1]; print({'torch', 'transformers',"
        " 'datasets', 'tokenizers', 'jinja2', 'pyarrow'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
        == "set()"
    )


def test_cache_key_depends_on_everything_that_changes_tokens(
    tmp_path: Path, bare_tokenizer: str
) -> None:
    data = save(tmp_path / "a.jsonl", PAIRS)
    swapped = {"completion": "prompt", "prompt": "completion"}
    folders = [
        prepare(data).train_folder, prepare(data, "pretrain").train_folder,
        prepare(data, system="Be.").train_folder,
        prepare(data, train_args={"max_length": 32}).train_folder,
        prepare(data, tokenizer=bare_tokenizer).train_folder,
        prepare(data, train_args={"truncation_strategy": "drop"}).train_folder,
        prepare(data, train_args={"train_on_inputs": True}).train_folder,
        prepare(data, format="prompt_completion").train_folder, prepare(f"{data}#5").train_folder,
        prepare({"path": data, "columns": swapped}).train_folder,
        prepare(save(tmp_path / "a.jsonl", PAIRS[::-1])).train_folder,
    ]  # fmt: skip
    assert len(set(folders)) == len(folders)
    assert prepare(save(tmp_path / "copy.jsonl", PAIRS)).train_folder == folders[0]


def test_first_entry_is_kept_if_hosts_do_not_see_each_others_locks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    final = cache_dir() / "tokens" / "unlocked"

    def build(staging: Path, content: str) -> None:
        if content == "slow":  # another host begins later and finishes first
            monkeypatch.setattr("socket.gethostname", lambda: "other")
            assert build_once(final, "mark", partial(build, content="fast"))
        (staging / "mark").write_text(content)

    assert not build_once(final, "mark", partial(build, content="slow"))
    assert (final / "mark").read_text() == "fast"
    assert [path.name for path in final.parent.glob(".unlocked*")] == []
    shutil.rmtree(final)


def test_another_host_provides_the_entry_at_the_same_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    final = cache_dir() / "tests" / "raced"

    def replace_later(staging: Path, final: Path) -> None:
        final.mkdir()
        (final / "mark").write_text("first")
        os.rename(staging, final)

    def build(staging: Path) -> None:
        (staging / "mark").write_text("second")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.data.cache.replace_dir", replace_later)
        assert not build_once(final, "mark", build)
    assert (final / "mark").read_text() == "first"
    assert [path.name for path in final.parent.glob(".raced*")] == []
    shutil.rmtree(final)


def test_concurrent_processes_build_one_cache_entry(tmp_path: Path) -> None:
    data = save(
        tmp_path / "a.jsonl",
        [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(300) for row in PAIRS],
    )
    code = (
        "from paceline.config.schema import Config; from paceline.data.encoding.prepare import"
        f" prepare_tokens; from paceline.models.builtin import resolve_model\n"
        f"t = prepare_tokens(Config(model={MODEL!r}, dataset={data!r}), 'sft', resolve_model)\n"
        "print(t.train_folder, t.notices[-1][1])"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    lines = [process.communicate(timeout=50)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({line.split()[0] for line in lines}) == 1
    assert sum("tokenized in" in line for line in lines) == 1


def test_killed_build_does_not_corrupt_cache(tmp_path: Path) -> None:
    data = save(
        tmp_path / "a.jsonl",
        [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(600) for row in PAIRS],
    )
    code = (
        "from paceline.config.schema import Config; from paceline.data.encoding.prepare import"
        f" prepare_tokens; from paceline.models.builtin import resolve_model\n"
        f"prepare_tokens(Config(model={MODEL!r}, dataset={data!r}), 'sft', resolve_model)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    tokens = cache_dir() / "tokens"
    deadline = time.monotonic() + 20
    while not any(file.stat().st_size for file in tokens.glob(f".*.{process.pid}.tmp/tokens.bin")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(tokens.glob(f".*.{process.pid}.tmp"))
    assert prepare(data).num_train == 7200
    assert not list(tokens.glob(f".*.{process.pid}.tmp"))


def test_dataset_pickles_as_path(tmp_path: Path) -> None:
    tokens = prepare(save(tmp_path / "a.jsonl", CHATS), split_dataset_ratio=0.25)
    data = train_set(tokens)
    raw = pickle.dumps(data)
    assert len(raw) < 2000
    unpickled = pickle.loads(raw)
    assert len(unpickled) == len(data) == 9
    assert unpickled[4]["input_ids"].tolist() == data[4]["input_ids"].tolist()
    assert data[0]["input_ids"].flags.writeable
    assert len(pickle.dumps(tokens)) < 5000
