"""Test that a run that cannot resume exactly is rejected: exit code 2, one paragraph that states
what differs, and no file written."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run
from safetensors.torch import load_file, save_file

from paceline.cli import main
from paceline.core.files import sha256_file
from paceline.models.builtin import resolve_model

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>\n"
    "{% endfor %}"
)
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"How much is {n} + {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}."},
        ]
    }
    for n in range(8)
]
SETTINGS = {
    "model": "model",
    "dataset": "chats.jsonl",
    "chat_template": "template.jinja",
    "parallel.device": "cpu",
    "parallel.num_gpus": "1",
    "lora.enable": "true",
    "lora.rank": "4",
    "max_steps": "2",
    "save_steps": "1",
    "per_device_train_batch_size": "2",
    "output_dir": "run",
}


def make_args(**changed: str) -> list[str]:
    settings = {**SETTINGS, **{key.replace("__", "."): value for key, value in changed.items()}}
    return ["sft", *(f"{key}={value}" for key, value in settings.items())]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run of two steps, with its model, data and chat template."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(resolve_model("builtin:qwen2-micro"), folder / "model")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    run(*make_args()[1:], cwd=folder)
    return folder


@pytest.fixture
def workdir(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    shutil.copytree(finished_run, folder)
    monkeypatch.chdir(folder)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def expect_error(workdir: Path, capsys: pytest.CaptureFixture[str], **changed: str) -> str:
    """Run the command with changed settings, check that it is rejected, and return the error."""
    before = read_files(workdir / "run")
    code = main(make_args(**changed))
    _, err = capsys.readouterr()
    assert code == 2, err
    assert "Traceback" not in err
    assert read_files(workdir / "run") == before
    paragraph = err[err.rindex("error: ") :].rstrip("\n")
    assert "\n" not in paragraph, paragraph
    assert "To fix: " in paragraph
    return paragraph


@pytest.mark.soak
def test_same_config_is_accepted(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(make_args()) == 0
    assert "already finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"model": "builtin:qwen2-tiny"}, ["model: 'model' → 'builtin:qwen2-tiny'"]),
        ({"lora__rank": "8"}, ["lora.rank: 4 → 8"]),
        ({"lora__enable": "false"}, ["lora.enable: True → False"]),
        ({"train_args__seed": "7"}, ["train_args.seed: 42 → 7"]),
        ({"train_args__shuffle": "false"}, ["train_args.shuffle: True → False"]),
        ({"task": "pretrain"}, ["task: 'sft' → 'pretrain'"]),
        ({"chat_template": "other.jinja"}, ["chat_template: 'template.jinja' → 'other.jinja'"]),
        ({"tokenizer": "builtin:qwen2-tiny"}, ["tokenizer: None → 'builtin:qwen2-tiny'"]),
        ({"dataset": "other.jsonl"}, ["dataset"]),
        (
            {"train_args__learning_rate": "0.5", "lora__alpha": "3"},
            ["train_args.learning_rate", "lora.alpha"],
        ),
    ],
)
def test_rejects_changed_config(
    workdir: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], parts: list[str]
) -> None:
    shutil.copy("template.jinja", "other.jinja")
    shutil.copy("chats.jsonl", "other.jsonl")
    error = expect_error(workdir, capsys, **changed)
    for part in ["contains a run with another config", *parts, "--allow-config-change"]:
        assert part in error, error


def test_changed_config_is_refused_before_the_data_are_read(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "run-2").mkdir()
    assert main(make_args(tokenizer="builtin:qwen2-tiny")) == 2
    printed = capsys.readouterr().err
    assert "contains a run with another config" in printed
    assert "`output_dir=run-3`" in printed
    assert "data: " not in printed


def append_row(workdir: Path) -> None:
    with open(workdir / "chats.jsonl", "a") as handle:
        handle.write(json.dumps(CHATS[0]) + "\n")


def change_answer(workdir: Path) -> None:
    (workdir / "chats.jsonl").write_text(
        (workdir / "chats.jsonl").read_text().replace("It is 4.", "It is 5.")
    )


def change_template(workdir: Path) -> None:
    (workdir / "template.jinja").write_text(TEMPLATE.replace("<{{", "[{{"))


def change_tokenizer(workdir: Path) -> None:
    file = workdir / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_prefix_space": True}))


@pytest.mark.parametrize("change", [append_row, change_answer, change_template, change_tokenizer])
def test_rejects_changed_data_files(
    workdir: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    change(workdir)
    assert "the training data has changed" in expect_error(workdir, capsys)


@pytest.mark.soak
def test_rejects_changed_frozen_weights(workdir: Path) -> None:
    """A checkpoint contains only the adapters."""
    file = workdir / "model" / "model.safetensors"
    weights = load_file(file)
    save_file(
        {name: weight + 0.01 for name, weight in weights.items()}, file, metadata={"format": "pt"}
    )
    before = read_files(workdir / "run")
    error = run(*make_args(resume="run/checkpoints/step-00000001")[1:], expect=2).stderr
    assert "was trained with other frozen weights" in error
    assert read_files(workdir / "run") == before


# -- `resume` is an invalid checkpoint
FIRST = "run/checkpoints/step-00000001"


def remove_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "manifest.json is missing or damaged"


def truncate_shard(path: Path) -> str:
    (state,) = path.glob("state-*")
    state.write_bytes(state.read_bytes()[:-1])
    return "with SHA-256 "


def add_pickle(path: Path) -> str:
    (path / "optimizer.pt").write_bytes(pickle.dumps({}))
    return "optimizer.pt is a pickle"


def link_shard_outside(path: Path) -> str:
    (state,) = path.glob("state-*")
    state.rename(path.parent.parent / "outside")
    state.symlink_to(path.parent.parent / "outside")
    return "is a symbolic link to "


@pytest.mark.parametrize(
    "damage", [remove_manifest, truncate_shard, add_pickle, link_shard_outside]
)
def test_rejects_incomplete_checkpoint(
    workdir: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], str]
) -> None:
    message = damage(workdir / FIRST)
    error = expect_error(workdir, capsys, resume=FIRST)
    assert f"`resume: {FIRST}` is not a valid checkpoint" in error
    assert message in error


def test_rejects_changed_precision(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = expect_error(workdir, capsys, bf16="true")
    assert "contains a run with another precision" in text
    assert "train_args.precision: '32' → 'bf16-mixed'" in text
    assert "set `train_args.precision=32` to resume" in text


def test_resumes_checkpoint_with_legacy_precision_keys(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bf16: false` and `fp16: false` in its stored config mean float32, to which `precision: auto`
    resolves on a CPU."""
    for meta_file in (workdir / "run" / "checkpoints").glob("*/meta.json"):
        meta = json.loads(meta_file.read_text())
        args = meta["config"]["train_args"]
        assert args.pop("precision") == "32"
        args |= {"bf16": False, "fp16": False}
        meta_file.write_text(json.dumps(meta))
        manifest_file = meta_file.with_name("manifest.json")
        manifest = json.loads(manifest_file.read_text())
        manifest["files"]["meta.json"] = {
            "size_bytes": meta_file.stat().st_size,
            "sha256": sha256_file(meta_file),
        }
        manifest_file.write_text(json.dumps(manifest))
    assert main(make_args()) == 0
    assert "nothing to do" in capsys.readouterr().err
