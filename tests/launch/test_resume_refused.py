"""A run that cannot go on exactly is refused: exit code 2, one paragraph that says what differs,
nothing written."""

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
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}</{{ one.role }}>\n{% endfor %}"
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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and what it was made from."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(resolve_model("builtin:qwen2-micro"), folder / "model")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    run(*make_args()[1:], cwd=folder)
    return folder


@pytest.fixture
def workdir(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def refused(workdir: Path, capsys: pytest.CaptureFixture[str], **changed: str) -> str:
    before = contents(workdir / "run")
    code = main(make_args(**changed))
    _, err = capsys.readouterr()
    assert code == 2, err
    assert "Traceback" not in err
    assert contents(workdir / "run") == before
    paragraph = err[err.rindex("error: ") :].rstrip("\n")
    assert "\n" not in paragraph, paragraph
    assert "To fix: " in paragraph
    return paragraph


@pytest.mark.soak
def test_it_is_that_run(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_another_config(
    workdir: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], parts: list[str]
) -> None:
    shutil.copy("template.jinja", "other.jinja")
    shutil.copy("chats.jsonl", "other.jsonl")
    error = refused(workdir, capsys, **changed)
    for part in ["contains a run with another config", *parts, "--allow-config-change"]:
        assert part in error, error


def more_data(workdir: Path) -> None:
    with open(workdir / "chats.jsonl", "a") as handle:
        handle.write(json.dumps(CHATS[0]) + "\n")


def another_answer(workdir: Path) -> None:
    (workdir / "chats.jsonl").write_text(
        (workdir / "chats.jsonl").read_text().replace("It is 4.", "It is 5.")
    )


def another_template(workdir: Path) -> None:
    (workdir / "template.jinja").write_text(TEMPLATE.replace("<{{", "[{{"))


def another_tokenizer(workdir: Path) -> None:
    file = workdir / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_prefix_space": True}))


@pytest.mark.parametrize("change", [more_data, another_answer, another_template, another_tokenizer])
def test_the_same_config_over_other_files(
    workdir: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    change(workdir)
    assert "the training data has changed" in refused(workdir, capsys)


@pytest.mark.soak
def test_other_weights_below_the_adapters(workdir: Path) -> None:
    """A checkpoint holds the adapters alone."""
    file = workdir / "model" / "model.safetensors"
    weights = load_file(file)
    save_file(
        {name: weight + 0.01 for name, weight in weights.items()}, file, metadata={"format": "pt"}
    )
    before = contents(workdir / "run")
    error = run(*make_args(resume="run/checkpoints/step-00000001")[1:], expect=2).stderr
    assert "was trained with other frozen weights" in error
    assert contents(workdir / "run") == before


# -- `resume` names a checkpoint that is not valid
FIRST = "run/checkpoints/step-00000001"


def no_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "manifest.json is missing or damaged"


def truncated(path: Path) -> str:
    (state,) = path.glob("state-*")
    state.write_bytes(state.read_bytes()[:-1])
    return "with SHA-256 "


def a_pickle(path: Path) -> str:
    (path / "optimizer.pt").write_bytes(pickle.dumps({}))
    return "optimizer.pt is a pickle"


def a_link_out(path: Path) -> str:
    (state,) = path.glob("state-*")
    state.rename(path.parent.parent / "elsewhere")
    state.symlink_to(path.parent.parent / "elsewhere")
    return "is a symbolic link to "


@pytest.mark.parametrize("harm", [no_manifest, truncated, a_pickle, a_link_out])
def test_a_checkpoint_that_is_not_whole(
    workdir: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], str]
) -> None:
    message = harm(workdir / FIRST)
    error = refused(workdir, capsys, resume=FIRST)
    assert f"`resume: {FIRST}` is not a valid checkpoint" in error
    assert message in error


def test_another_precision(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(workdir, capsys, bf16="true")
    assert "contains a run with another precision" in text
    assert "train_args.precision: '32' → 'bf16-mixed'" in text
    assert "set `train_args.precision=32` to resume" in text


def test_a_checkpoint_with_the_keys_of_an_older_version(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bf16: false` and `fp16: false` in its stored config are float32, which `precision: auto` is
    on a CPU."""
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
