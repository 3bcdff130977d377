"""Test that invalid input is rejected with exit code 2 and one paragraph, before a process starts
or a file is written."""

import json
import multiprocessing.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run as run_command
from disks import mount_tmpfs

from paceline.cli import main
from paceline.models.builtin import resolve_model

PAIRS = [{"prompt": f"How much is {n} + {n}?", "completion": f"It is {2 * n}."} for n in range(8)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": pair["prompt"]},
            {"role": "assistant", "content": pair["completion"]},
        ]
    }
    for pair in PAIRS
]

ExpectError = Callable[..., str]


def save(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the current folder of the command, with valid data."""
    multiprocessing.util.get_temp_dir()  # created once per process, outside of this folder
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(folder)
    save(folder / "pairs.jsonl", PAIRS)
    save(folder / "chats.jsonl", CHATS)
    return folder


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def expect_error(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> ExpectError:
    """Return a function that runs a command line that must be rejected and returns the error."""

    def check(
        *args: str, verb: str = "sft", output_dir: str | None = "out/run", defaults: bool = True
    ) -> str:
        settings = (
            [
                "model=builtin:qwen2-micro",
                "dataset=pairs.jsonl",
                "parallel.device=cpu",
                "max_steps=2",
            ]
            if defaults
            else []
        )
        settings = [
            setting
            for setting in settings
            if not any(arg.startswith(setting.partition("=")[0] + "=") for arg in args)
        ]
        settings += [f"output_dir={output_dir}"] if output_dir else []
        before = listing(workdir)
        code = main([verb, *args, *settings])
        out, err = capsys.readouterr()
        assert code == 2, err
        assert out == ""
        assert listing(workdir) == before, "a file was written"
        assert listing(tmp_path / "tmp") == [], "a temporary file was left behind"
        paragraph = err[err.index("error: ") :].rstrip("\n")
        assert "Traceback" not in err
        assert re.search(r"[.?`] \[[a-z0-9-]+\]$", paragraph), paragraph
        return paragraph.removeprefix("error: ")

    return check


def assert_paragraph(text: str, *parts: str) -> None:
    """Check that the text is one paragraph that contains each of ``parts``."""
    assert "\n" not in text, text
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


# -- the command
@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["sfft"], ["`paceline sfft`", "Allowed: init, sft, train", "`paceline sft`"]),
        (["sft", "model=m", "dataset=d", "--dry-rnu"], ["--dry-rnu", "--dry-run"]),
        (["sft", "no-such.yaml"], ["no-such.yaml", "there is no config file"]),
        (["sft"], ["`model` is missing"]),
        (["sft", "--config"], ["--config"]),
        (["inspect"], ["`paceline inspect` has missing or unexpected arguments", "CHECKPOINT"]),
        (["inspect", "nowhere"], ["nowhere does not exist"]),
        (["watch", "nowhere", "--once"], ["nowhere"]),
        (["generate", "nowhere", "Why?"], ["nowhere"]),
        (["export", "nowhere", "--merge"], ["nowhere"]),
    ],
)
def test_rejects_invalid_command_line(
    workdir: Path, capsys: pytest.CaptureFixture[str], args: list[str], parts: list[str]
) -> None:
    before = listing(workdir)
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    for part in parts:
        assert part in err
    assert listing(workdir) == before


# -- the config
def test_reports_all_errors_of_config_file_at_once(
    workdir: Path, expect_error: ExpectError
) -> None:
    (workdir / "c.yaml").write_text(
        "modle: m\ntrain_args:\n  learning_rate: fast\n  per_device_train_batch_size: 0\nlora: 3\n"
    )
    text = expect_error("c.yaml", defaults=False)
    for part in (
        "c.yaml line 1:", "`modle`", "did you mean `model`", "c.yaml line 3:",
        "learning_rate: fast", "c.yaml line 4:", "a whole number of at least 1", "c.yaml line 5:",
    ):  # fmt: skip
        assert part in text, text


@pytest.mark.parametrize(
    ("arg", "parts"),
    [
        ("max_stps=3", ["`max_stps`", "did you mean `max_steps`"]),
        ("max_steps=-3", ["max_steps", "-3", "of at least 1"]),
        ("learning_rate=fast", ["learning_rate", "fast", "a number"]),
        ("lora.dropout=1.5", ["lora.dropout", "1.5", "less than 1"]),
        ("parallel.mode=zero9", ["zero9", "ddp"]),
        ("task=stf", ["`task: stf`", "did you mean `task: sft`"]),
        ("task=./mine.py:Mine", ["mine.py"]),
        ("optim=adamx", ["adamx", "`adamw`"]),
    ],
)
def test_rejects_invalid_value(expect_error: ExpectError, arg: str, parts: list[str]) -> None:
    assert_paragraph(expect_error(arg), *parts)


def test_rejects_two_precisions(expect_error: ExpectError) -> None:
    assert_paragraph(expect_error("bf16=true", "fp16=true"), "bf16", "fp16", "choose one")


def test_rejects_conflicting_aliases(expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error("lora_r=8", "lora.rank=16", "lora.enable=true"),
        "lora_r",
        "lora.rank",
        "8",
        "16",
    )


def test_rejects_yaml_object_tag(workdir: Path, expect_error: ExpectError) -> None:
    (workdir / "c.yaml").write_text("model: m\ndataset: !!python/object/apply:os.mkdir [made]\n")
    assert_paragraph(
        expect_error("c.yaml", defaults=False), "c.yaml line 2", "!!python/object/apply:os.mkdir"
    )


def test_rejects_missing_gpus(workdir: Path, expect_error: ExpectError) -> None:
    import torch

    if torch.accelerator.is_available():
        count = torch.accelerator.device_count() + 1
        assert_paragraph(
            expect_error("parallel.device=auto", f"parallel.num_gpus={count}"),
            f"{count}",
            "visible",
            "parallel.device=cpu",
        )
    else:
        assert_paragraph(
            expect_error("parallel.device=auto", "parallel.num_gpus=4"),
            "`parallel.num_gpus: 4`",
            "no GPU",
            "parallel.device=cpu",
        )
        assert_paragraph(
            expect_error("parallel.device=cuda"),
            "`parallel.device: cuda`",
            "no accelerator",
            "parallel.device=cpu",
        )


# -- the model
def test_rejects_folder_without_model(workdir: Path, expect_error: ExpectError) -> None:
    (workdir / "notes").mkdir()
    (workdir / "notes" / "todo.txt").write_text("x")
    assert_paragraph(
        expect_error("model=./notes"), "notes", "is not a model", "config.json", "todo.txt"
    )
    assert_paragraph(expect_error("model=./nots"), "nots", "does not exist")
    assert_paragraph(expect_error("model=./pairs.jsonl"), "is a file")
    assert_paragraph(expect_error("model=builtin:qwen3-micro"), "builtin:qwen2-micro")


def test_rejects_adapter_as_model(workdir: Path, expect_error: ExpectError) -> None:
    (workdir / "adapter").mkdir()
    (workdir / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"})
    )
    assert_paragraph(
        expect_error("model=./adapter"),
        "it is a LoRA adapter",
        "`model: Qwen/Qwen2.5-0.5B`",
        "adapter: ",
    )
    (workdir / "adapter" / "adapter_config.json").write_text("{")
    assert_paragraph(expect_error("model=./adapter"), "adapter")


def test_rejects_missing_weights_and_invalid_model_config(
    workdir: Path, expect_error: ExpectError
) -> None:
    source = Path(resolve_model("builtin:qwen2-micro"))
    shutil.copytree(source, workdir / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert_paragraph(expect_error("model=./bare"), "bare", "no weights", "model.safetensors")
    shutil.copytree(source, workdir / "broken")
    (workdir / "broken" / "config.json").write_text('{"model_type": ')
    assert_paragraph(expect_error("model=./broken"), "broken", "config.json")


def test_rejects_incomplete_weight_files(workdir: Path, expect_error: ExpectError) -> None:
    model = workdir / "model"
    shutil.copytree(resolve_model("builtin:qwen2-micro"), model)
    file = model / "model.safetensors"
    content = file.read_bytes()
    for damaged, part in (
        (content[:-100], f"{len(content) - 100:,} bytes instead of {len(content):,}"),
        (content[:1000], "truncated"),
        (content[:8] + b"x" + content[9:], "unreadable header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ):
        file.write_bytes(damaged)
        assert_paragraph(expect_error("model=./model"), "model.safetensors", part, "again")
    file.rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "x.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_paragraph(
        expect_error("model=./model"), "1 of its 2 weight files are missing: x.safetensors"
    )


def test_rejects_missing_adapter(workdir: Path, expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error("lora.enable=true", "lora.adapter=./nowhere"),
        "lora.adapter",
        "nowhere",
        "does not exist",
    )
    (workdir / "empty").mkdir()
    assert_paragraph(
        expect_error("lora.enable=true", "lora.adapter=./empty"), "adapter_config.json"
    )
    assert_paragraph(
        expect_error("lora.adapter=./empty"), "lora.adapter", "set `lora.enable: true`"
    )


def test_rejects_missing_chat_template(workdir: Path, expect_error: ExpectError) -> None:
    folder = workdir / "plain"
    shutil.copytree(resolve_model("builtin:qwen2-micro"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_paragraph(
        expect_error("model=./plain", "dataset=chats.jsonl"), "chat template", "chat_template"
    )


def test_hub_model_without_network_is_an_error(expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error("model=some-one/some-model"),
        "some-one/some-model",
        "cannot be downloaded",
        "give its folder",
    )


# -- the data
def test_rejects_missing_file(expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error("dataset=pears.jsonl"), "pears.jsonl", "did you mean `pairs.jsonl`"
    )


def test_hub_dataset_without_network_is_an_error(expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error("dataset=some-one/some-data"),
        "some-one/some-data",
        "cannot be downloaded",
        "dataset=/path/to/data",
    )
    assert_paragraph(expect_error("dataset=alpaca-en"), "tatsu-lab/alpaca", "cannot be downloaded")


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_rejects_empty_file(workdir: Path, expect_error: ExpectError, content: str) -> None:
    (workdir / "empty.jsonl").write_text(content)
    assert_paragraph(expect_error("dataset=empty.jsonl"), "empty.jsonl", "no rows")


def test_rejects_invalid_json_line(workdir: Path, expect_error: ExpectError) -> None:
    lines = [json.dumps(row) for row in PAIRS]
    lines[4] = lines[4][:-9]
    (workdir / "broken.jsonl").write_text("\n".join(lines))
    error = expect_error("dataset=broken.jsonl")
    assert_paragraph(error, "line 5 of", "not valid JSON", "delete line 5")


def test_rejects_columns_of_unknown_format(workdir: Path, expect_error: ExpectError) -> None:
    (workdir / "d.csv").write_text("city,people\nBern,134794\nBasel,173552\n")
    assert_paragraph(
        expect_error("dataset=d.csv"), "city, people", "alpaca", "messages", "columns: {prompt: "
    )
    assert_paragraph(expect_error("dataset=chats.jsonl", "format=alpaca"), "messages", "alpaca")


def test_rejects_dataset_of_too_long_samples(workdir: Path, expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error("max_length=8", "truncation_strategy=drop"),
        "every sample",
        "too long",
        "max_length",
        "truncate",
    )


def test_rejects_local_sgd_workers_without_samples(
    workdir: Path, expect_error: ExpectError
) -> None:
    save(workdir / "one.jsonl", PAIRS[:1])
    args = (
        "dataset=one.jsonl",
        "parallel.mode=local_sgd",
        "local_sgd.sync_every=1",
        "local_sgd.warmup_steps=0",
        "max_steps=4",
    )
    assert_paragraph(
        expect_error(*args, "parallel.num_gpus=2"),
        "local_sgd",
        "2 workers",
        "1 training sample",
        "ddp",
    )


# -- the output folder
def test_rejects_file_as_output_dir(expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error(output_dir="pairs.jsonl"), "`output_dir: pairs.jsonl`", "is a file"
    )
    assert_paragraph(
        expect_error(output_dir="pairs.jsonl/deep/run"), "below", "pairs.jsonl", "file"
    )


def test_rejects_unwritable_output_dir(expect_error: ExpectError) -> None:
    # A folder in which even root may not write.
    assert_paragraph(
        expect_error(output_dir="/proc/1/run"), "`output_dir: /proc/1/run`", "is not writable"
    )


def test_rejects_output_dir_on_read_only_disk(workdir: Path, expect_error: ExpectError) -> None:
    with mount_tmpfs(workdir / "disk", "size=64k,ro") as mounted:
        if mounted:
            assert_paragraph(
                expect_error(output_dir="disk/run"),
                "disk/run",
                "is not writable",
                "Read-only file system",
            )


@pytest.fixture
def killed_run(workdir: Path) -> Path:
    """Create the output folder of a run that was killed early: it contains only its config."""
    folder = workdir / "old"
    folder.mkdir()
    model = (
        "model: builtin:qwen2-micro\ndataset: pairs.jsonl\nparallel: {device: cpu}\noutput_dir:"
        " old\n"
    )
    (folder / "config.yaml").write_text(model + "train_args: {max_steps: 2, learning_rate: 0.5}\n")
    return folder


def test_rejects_output_dir_of_another_run(killed_run: Path, expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error(output_dir="old"),
        "contains a run with another config",
        "train_args.learning_rate: 0.5 → None",
        "--allow-config-change",
    )
    assert_paragraph(
        expect_error("resume=never", output_dir="old"),
        "`output_dir: old` already contains a run",
        "`resume: never`",
    )
    (killed_run / "config.yaml").write_text("model: [")
    assert_paragraph(
        expect_error(output_dir="old"), "contains another run", "config.yaml cannot be loaded"
    )


def test_rejects_output_dir_with_other_files(workdir: Path, expect_error: ExpectError) -> None:
    (workdir / "photos").mkdir()
    (workdir / "photos" / "config.yaml").write_text("colour: red\n")
    assert_paragraph(expect_error(output_dir="photos"), "photos", "set another `output_dir`")
    (workdir / "photos" / "config.yaml").unlink()
    shutil.copytree(resolve_model("builtin:qwen2-micro"), workdir / "photos" / "model")
    assert_paragraph(
        expect_error("model=photos/model", output_dir="photos"),
        "would overwrite files in it",
        "model",
        "set another `output_dir`",
    )


def test_rejects_output_dir_that_contains_the_config_file(
    workdir: Path, expect_error: ExpectError
) -> None:
    (workdir / "config.yaml").write_text(
        "model: builtin:qwen2-micro\ndataset: pairs.jsonl\nparallel: {device: cpu}\n"
    )
    assert_paragraph(
        expect_error("config.yaml", output_dir=".", defaults=False),
        "would overwrite your config file",
        "set another `output_dir`",
    )


def test_rejects_resume_from_invalid_checkpoint(workdir: Path, expect_error: ExpectError) -> None:
    assert_paragraph(
        expect_error("resume=./nowhere"),
        "`resume: ./nowhere` does not exist",
        "auto, never, or a checkpoint",
    )
    (workdir / "hollow").mkdir()
    assert_paragraph(expect_error("resume=./hollow"), "hollow", "no valid checkpoint")
    (workdir / "hollow" / "meta.json").write_text("{}")
    error = expect_error("resume=./hollow")
    assert_paragraph(error, "hollow", "not a valid checkpoint", "manifest.json")


# -- errors that only the ranks detect
@pytest.mark.slow
def test_rejects_unknown_lora_target_modules(workdir: Path) -> None:
    done = run_command(
        "model=builtin:qwen2-micro", "dataset=pairs.jsonl", "parallel.device=cpu", "max_steps=2",
        "output_dir=out/run", "per_device_train_batch_size=2", "lora.enable=true",
        "lora.target_modules=[q_prj]", expect=2, cwd=workdir,
    )  # fmt: skip
    error = done.stderr[done.stderr.index("error: ") :]
    assert_paragraph(error.rstrip(), "lora.target_modules", "q_prj", "q_proj")
    assert not (workdir / "out").exists()


@pytest.mark.slow
def test_rejected_command_leaves_no_files(workdir: Path) -> None:
    folder = workdir.parent / "empty"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    args = ("model=builtin:qwen2-micro", "dataset=none.jsonl", "output_dir=out/run")
    done = run_command(*args, expect=2, cwd=workdir, env=environment)
    assert done.stderr.count("error: ") == 1
    assert not (workdir / "out").exists()
    assert listing(folder) == []


_WITHOUT_TORCH = """
import sys
from paceline.cli import main
code = main(["sft", *sys.argv[1:]])
print(code, "torch" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dataset"),
    [
        ("./nothing", "pairs.jsonl"),
        ("builtin:qwen2-micro", "./nothing.jsonl"),
        ("builtin:qwen2-micro", "nothing/*.jsonl"),
        ("builtin:qwen2-micro", "builtin:nothing"),
    ],
)
def test_missing_files_are_reported_before_torch_is_imported(
    model: str, dataset: str, workdir: Path
) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, f"model={model}", f"dataset={dataset}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "2 False\n"
    assert "nothing" in done.stderr
    assert listing(workdir) == ["chats.jsonl", "pairs.jsonl"]
