"""Test that every shell block of the README and of the first guide runs as printed.

A block that needs a network, a GPU or a cluster starts with a comment such as ``# Needs a network:
…``. The tests run it with a Hugging Face cache that contains a tiny model under the name of the
real one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.models.builtin import resolve_model

ROOT = Path(__file__).parents[2]
README, README_ZH, GUIDE = (
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "docs" / "how-to" / "fine-tune.md",
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"^# Needs a (network|GPU|cluster)\b.*:", re.MULTILINE)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
#: Commands that would run these tests recursively or take too long.
NOT_RUN = ("make demo", "make test")
#: Blocks with many steps or modes, which `make soak` runs.
LONG = ("paceline verify", "paceline sweep", "parallel.num_gpus=4")


@dataclass(frozen=True)
class ShellBlock:
    page: Path
    number: int
    text: str

    @property
    def lines(self) -> list[str]:
        lines = [line.strip() for line in self.text.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def is_run(self) -> bool:
        return not all(line.startswith(NOT_RUN) for line in self.lines)

    @property
    def needs(self) -> str | None:
        match = NEEDS.search(self.text)
        return match.group(1) if match else None


def shell_blocks(page: Path) -> list[ShellBlock]:
    texts = [
        text
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind in ("bash", "sh", "shell", "console")
    ]
    return [ShellBlock(page, number, text) for number, text in enumerate(texts, 1)]


# The two READMEs print the same blocks, so each of them runs once.
RUN = [block for page in (README, GUIDE) for block in shell_blocks(page) if block.is_run]


def _as_parameter(block: ShellBlock) -> object:
    is_long = any(command in block.text for command in LONG)
    name = f"{block.page.stem}-{block.number}"
    return pytest.param(
        block, id=name, marks=[pytest.mark.slow, *([pytest.mark.soak] if is_long else [])]
    )


@pytest.fixture(scope="module")
def workspaces(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Return a folder per page with the examples and the files that the page shows. The commands of
    a page share it."""
    folders = {page: tmp_path_factory.mktemp(page.stem) for page in (README, GUIDE)}
    hub = tmp_path_factory.mktemp("hub")
    _fill_cache(hub / "hub" / f"models--{MODEL.replace('/', '--')}")
    for page, folder in folders.items():
        shutil.copytree(ROOT / "examples", folder / "examples")
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "hf").symlink_to(hub)
        config = next(
            text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == "yaml"
        )
        (folder / "mine.yaml").write_text(config)
        rows = next(
            text
            for kind, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
            if kind == "json"
        )
        (folder / "questions.jsonl").write_text(rows)
    # The output of `make demo`, with fewer steps.
    _run(
        "paceline sft --config examples/demo.yaml max_steps=2 dataset=builtin:python-docs#64",
        folders[README],
    )
    return folders


def _fill_cache(model: Path) -> None:
    revision = "0" * 40
    shutil.copytree(resolve_model("builtin:qwen2-micro"), model / "snapshots" / revision)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)


def _environment(folder: Path) -> dict[str, str]:
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "BROWSER": "true",
    }


def _run(line: str, folder: Path) -> None:
    completed = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert completed.returncode == 0, (
        f"{line}\n{completed.stdout[-1500:]}\n{completed.stderr[-1500:]}"
    )


def _serve(line: str, folder: Path) -> None:
    """Run a server, and check that it responds and that SIGINT ends it."""
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=folder,
            env=_environment(folder),
            stdout=log,
            stderr=log,
        )
    try:
        assert b"<html" in _read_first_response(server, folder / "server.log")
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) in (0, 130)


def _read_first_response(server: subprocess.Popen[bytes], log: Path) -> bytes:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        address = re.search(r"http://\S+", log.read_text())
        if address is not None:
            with urllib.request.urlopen(address.group(0), timeout=30) as response:
                return bytes(response.read())
        time.sleep(0.1)
    raise AssertionError(f"the server did not start: {log.read_text()[-1500:]}")


@pytest.fixture(scope="module")
def finished_blocks() -> set[tuple[Path, int]]:
    return set()


@pytest.mark.soak
@pytest.mark.parametrize("block", [_as_parameter(block) for block in RUN])
def test_block_runs_as_printed(
    block: ShellBlock, workspaces: dict[Path, Path], finished_blocks: set[tuple[Path, int]]
) -> None:
    """The blocks of the guide use the files of those before them."""
    first = 1 if block.page == GUIDE else block.number
    for each in RUN:
        key = (each.page, each.number)
        if each.page != block.page or not first <= each.number <= block.number:
            continue
        if key not in finished_blocks:
            _run_block(each, workspaces[each.page])
            finished_blocks.add(key)


def _run_block(block: ShellBlock, folder: Path) -> None:
    for line in block.lines:
        if "paceline ui" in line:
            _serve(line, folder)
        else:
            _run(line, folder)


def test_finds_every_shell_block() -> None:
    counts = {page.name: len(shell_blocks(page)) for page in (README, README_ZH, GUIDE)}
    assert counts == {"README.md": 13, "README.zh-CN.md": 13, "fine-tune.md": 3}
    not_run = [
        block.lines for page in (README, GUIDE) for block in shell_blocks(page) if not block.is_run
    ]
    assert not_run == [["make demo", "make test"]]
    assert len(RUN) == counts["README.md"] + counts["fine-tune.md"] - len(not_run)


def test_blocks_that_need_a_network_are_marked() -> None:
    """Exactly the blocks that read a config with a hub ID have the marker."""
    marked = {(block.page.name, block.number) for block in RUN if block.needs == "network"}
    reads_hub_model = {
        (block.page.name, block.number) for block in RUN if "sft mine.yaml" in block.text
    }
    assert MODEL in json.dumps(
        [README.read_text(encoding="utf-8"), GUIDE.read_text(encoding="utf-8")]
    )
    assert marked == reads_hub_model
