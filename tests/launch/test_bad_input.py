"""Everything that can be wrong with what a person gives: exit code 2, one clear paragraph, nothing
started, nothing written."""

import json
import multiprocessing.util
import os
import shutil
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

Refused = Callable[..., str]


def save(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the person stands: good data and a model."""
    multiprocessing.util.get_temp_dir()  # made once a process, elsewhere
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
def refused(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run words of a command line that must be refused; gives the paragraph."""

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
        assert listing(workdir) == before, "something was written"
        assert listing(tmp_path / "tmp") == [], "a temporary folder was left"
        paragraph = err[err.index("error: ") :].rstrip("\n")
        assert "Traceback" not in err
        assert paragraph.endswith((".", "?", "`")), paragraph
        return paragraph.removeprefix("error: ")

    return check


def assert_paragraph(text: str, *parts: str) -> None:
    """One paragraph that holds each of ``parts``."""
    assert "\n" not in text, text
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


# -- the command
@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["sfft"], ["`paceline sfft`", "Allowed: sft, train", "`paceline sft`"]),
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
def test_the_command(
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
def test_wrong_keys_types_and_ranges_of_a_file_all_at_once(workdir: Path, refused: Refused) -> None:
    (workdir / "c.yaml").write_text(
        "modle: m\ntrain_args:\n  learning_rate: fast\n  per_device_train_batch_size: 0\nlora: 3\n"
    )
    text = refused("c.yaml", defaults=False)
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
def test_a_wrong_word(refused: Refused, arg: str, parts: list[str]) -> None:
    assert_paragraph(refused(arg), *parts)


def test_two_precisions(refused: Refused) -> None:
    assert_paragraph(refused("bf16=true", "fp16=true"), "bf16", "fp16", "choose one")


def test_two_spellings_that_disagree(refused: Refused) -> None:
    assert_paragraph(
        refused("lora_r=8", "lora.rank=16", "lora.enable=true"), "lora_r", "lora.rank", "8", "16"
    )


def test_a_yaml_tag_that_builds_an_object(workdir: Path, refused: Refused) -> None:
    (workdir / "c.yaml").write_text("model: m\ndataset: !!python/object/apply:os.mkdir [made]\n")
    assert_paragraph(
        refused("c.yaml", defaults=False), "c.yaml line 2", "!!python/object/apply:os.mkdir"
    )


def test_gpus_that_are_not_there(workdir: Path, refused: Refused) -> None:
    import torch

    if torch.accelerator.is_available():
        count = torch.accelerator.device_count() + 1
        assert_paragraph(
            refused("parallel.device=auto", f"parallel.num_gpus={count}"),
            f"{count}",
            "visible",
            "parallel.device=cpu",
        )
    else:
        assert_paragraph(
            refused("parallel.device=auto", "parallel.num_gpus=4"),
            "`parallel.num_gpus: 4`",
            "no GPU",
            "parallel.device=cpu",
        )
        assert_paragraph(
            refused("parallel.device=cuda"),
            "`parallel.device: cuda`",
            "no accelerator",
            "parallel.device=cpu",
        )


# -- the model
def test_a_folder_that_is_no_model(workdir: Path, refused: Refused) -> None:
    (workdir / "notes").mkdir()
    (workdir / "notes" / "todo.txt").write_text("x")
    assert_paragraph(refused("model=./notes"), "notes", "is not a model", "config.json", "todo.txt")
    assert_paragraph(refused("model=./nots"), "nots", "does not exist")
    assert_paragraph(refused("model=./pairs.jsonl"), "is a file")
    assert_paragraph(refused("model=builtin:qwen3-micro"), "builtin:qwen2-micro")


def test_an_adapter_is_not_a_model(workdir: Path, refused: Refused) -> None:
    (workdir / "adapter").mkdir()
    (workdir / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"})
    )
    assert_paragraph(
        refused("model=./adapter"),
        "it is a LoRA adapter",
        "`model: Qwen/Qwen2.5-0.5B`",
        "adapter: ",
    )
    (workdir / "adapter" / "adapter_config.json").write_text("{")
    assert_paragraph(refused("model=./adapter"), "adapter")


def test_a_config_without_weights_and_a_broken_config(workdir: Path, refused: Refused) -> None:
    source = Path(resolve_model("builtin:qwen2-micro"))
    shutil.copytree(source, workdir / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert_paragraph(refused("model=./bare"), "bare", "no weights", "model.safetensors")
    shutil.copytree(source, workdir / "broken")
    (workdir / "broken" / "config.json").write_text('{"model_type": ')
    assert_paragraph(refused("model=./broken"), "broken", "config.json")


def test_no_adapter_there(workdir: Path, refused: Refused) -> None:
    assert_paragraph(
        refused("lora.enable=true", "lora.adapter=./nowhere"),
        "lora.adapter",
        "nowhere",
        "does not exist",
    )
    (workdir / "empty").mkdir()
    assert_paragraph(refused("lora.enable=true", "lora.adapter=./empty"), "adapter_config.json")
    assert_paragraph(refused("lora.adapter=./empty"), "lora.adapter", "set `lora.enable: true`")


def test_no_chat_template(workdir: Path, refused: Refused) -> None:
    folder = workdir / "plain"
    shutil.copytree(resolve_model("builtin:qwen2-micro"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_paragraph(
        refused("model=./plain", "dataset=chats.jsonl"), "chat template", "chat_template"
    )


def test_a_model_of_the_hub_without_a_network(refused: Refused) -> None:
    assert_paragraph(
        refused("model=some-one/some-model"),
        "some-one/some-model",
        "cannot be downloaded",
        "give its folder",
    )


# -- the data
def test_no_such_file(refused: Refused) -> None:
    assert_paragraph(refused("dataset=pears.jsonl"), "pears.jsonl", "did you mean `pairs.jsonl`")


def test_a_dataset_of_the_hub_without_a_network(refused: Refused) -> None:
    assert_paragraph(
        refused("dataset=some-one/some-data"),
        "some-one/some-data",
        "cannot be downloaded",
        "dataset=/path/to/data",
    )
    assert_paragraph(refused("dataset=alpaca-en"), "tatsu-lab/alpaca", "cannot be downloaded")


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_an_empty_file(workdir: Path, refused: Refused, content: str) -> None:
    (workdir / "empty.jsonl").write_text(content)
    assert_paragraph(refused("dataset=empty.jsonl"), "empty.jsonl", "no rows")


def test_a_broken_line(workdir: Path, refused: Refused) -> None:
    lines = [json.dumps(row) for row in PAIRS]
    lines[4] = lines[4][:-9]
    (workdir / "broken.jsonl").write_text("\n".join(lines))
    error = refused("dataset=broken.jsonl")
    assert_paragraph(error, "line 5 of", "not valid JSON", "delete line 5")


def test_columns_that_fit_no_format(workdir: Path, refused: Refused) -> None:
    (workdir / "d.csv").write_text("city,people\nBern,134794\nBasel,173552\n")
    assert_paragraph(
        refused("dataset=d.csv"), "city, people", "alpaca", "messages", "columns: {prompt: "
    )
    assert_paragraph(refused("dataset=chats.jsonl", "format=alpaca"), "messages", "alpaca")


def test_every_sample_too_long(workdir: Path, refused: Refused) -> None:
    assert_paragraph(
        refused("max_length=8", "truncation_strategy=drop"),
        "every sample",
        "too long",
        "max_length",
        "truncate",
    )


def test_workers_that_train_separately_and_have_no_sample(workdir: Path, refused: Refused) -> None:
    save(workdir / "one.jsonl", PAIRS[:1])
    args = (
        "dataset=one.jsonl",
        "parallel.mode=local_sgd",
        "local_sgd.sync_every=1",
        "local_sgd.warmup_steps=0",
        "max_steps=4",
    )
    assert_paragraph(
        refused(*args, "parallel.num_gpus=2"), "local_sgd", "2 workers", "1 training sample", "ddp"
    )


# -- the output folder
def test_output_dir_is_a_file_or_below_one(refused: Refused) -> None:
    assert_paragraph(refused(output_dir="pairs.jsonl"), "`output_dir: pairs.jsonl`", "is a file")
    assert_paragraph(refused(output_dir="pairs.jsonl/deep/run"), "below", "pairs.jsonl", "file")


def test_output_dir_that_cannot_be_written(refused: Refused) -> None:
    # A place where no one may write, not even root.
    assert_paragraph(
        refused(output_dir="/proc/1/run"), "`output_dir: /proc/1/run`", "is not writable"
    )


def test_output_dir_on_a_read_only_disk(workdir: Path, refused: Refused) -> None:
    with mount_tmpfs(workdir / "disk", "size=64k,ro") as mounted:
        if mounted:
            assert_paragraph(
                refused(output_dir="disk/run"),
                "disk/run",
                "is not writable",
                "Read-only file system",
            )


@pytest.fixture
def finished(workdir: Path) -> Path:
    """A folder with the config of a run, as one killed early leaves it."""
    folder = workdir / "old"
    folder.mkdir()
    model = (
        "model: builtin:qwen2-micro\ndataset: pairs.jsonl\nparallel: {device: cpu}\noutput_dir:"
        " old\n"
    )
    (folder / "config.yaml").write_text(model + "train_args: {max_steps: 2, learning_rate: 0.5}\n")
    return folder


def test_output_dir_holds_another_run(finished: Path, refused: Refused) -> None:
    assert_paragraph(
        refused(output_dir="old"),
        "contains a run with another config",
        "train_args.learning_rate: 0.5 → None",
        "--allow-config-change",
    )
    assert_paragraph(
        refused("resume=never", output_dir="old"),
        "`output_dir: old` already contains a run",
        "`resume: never`",
    )
    (finished / "config.yaml").write_text("model: [")
    assert_paragraph(
        refused(output_dir="old"), "contains another run", "config.yaml cannot be loaded"
    )


def test_output_dir_holds_something_else(workdir: Path, refused: Refused) -> None:
    (workdir / "photos").mkdir()
    (workdir / "photos" / "config.yaml").write_text("colour: red\n")
    assert_paragraph(refused(output_dir="photos"), "photos", "set another `output_dir`")
    (workdir / "photos" / "config.yaml").unlink()
    shutil.copytree(resolve_model("builtin:qwen2-micro"), workdir / "photos" / "model")
    assert_paragraph(
        refused("model=photos/model", output_dir="photos"),
        "would overwrite files in it",
        "model",
        "set another `output_dir`",
    )


def test_the_run_does_not_write_over_its_own_config_file(workdir: Path, refused: Refused) -> None:
    (workdir / "config.yaml").write_text(
        "model: builtin:qwen2-micro\ndataset: pairs.jsonl\nparallel: {device: cpu}\n"
    )
    assert_paragraph(
        refused("config.yaml", output_dir=".", defaults=False),
        "would overwrite your config file",
        "set another `output_dir`",
    )


def test_resume_from_what_is_no_checkpoint(workdir: Path, refused: Refused) -> None:
    assert_paragraph(
        refused("resume=./nowhere"),
        "`resume: ./nowhere` does not exist",
        "auto, never, or a checkpoint",
    )
    (workdir / "hollow").mkdir()
    assert_paragraph(refused("resume=./hollow"), "hollow", "no valid checkpoint")
    (workdir / "hollow" / "meta.json").write_text("{}")
    error = refused("resume=./hollow")
    assert_paragraph(error, "hollow", "not a valid checkpoint", "manifest.json")


# -- what only the ranks can see
@pytest.mark.slow
def test_targets_that_fit_nothing(workdir: Path) -> None:
    done = run_command(
        "model=builtin:qwen2-micro", "dataset=pairs.jsonl", "parallel.device=cpu", "max_steps=2",
        "output_dir=out/run", "per_device_train_batch_size=2", "lora.enable=true",
        "lora.target_modules=[q_prj]", expect=2, cwd=workdir,
    )  # fmt: skip
    error = done.stderr[done.stderr.index("error: ") :]
    assert_paragraph(error.rstrip(), "lora.target_modules", "q_prj", "q_proj")
    assert not (workdir / "out").exists()


@pytest.mark.slow
def test_a_real_process_leaves_nothing(workdir: Path) -> None:
    folder = workdir.parent / "empty"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    args = ("model=builtin:qwen2-micro", "dataset=none.jsonl", "output_dir=out/run")
    done = run_command(*args, expect=2, cwd=workdir, env=environment)
    assert done.stderr.count("error: ") == 1
    assert not (workdir / "out").exists()
    assert listing(folder) == []
