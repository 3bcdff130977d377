"""The proof of an export: a damaged model fails it, and nothing half-written remains."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_families import make_family
from disks import mount_tmpfs
from peft import LoraConfig, get_peft_model
from raised import raises_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline
from paceline.checkpoint.store import save
from paceline.cli import main
from paceline.core.errors import ConfigError, RunError
from paceline.inference.exports.core.answers import answer_prompts, load_answers, save_answers
from paceline.inference.exports.core.comparison import ProofCheck, compare
from paceline.inference.exports.core.forms import ExportSource, ProofLimit
from paceline.inference.exports.core.prompts import proof_prompts
from paceline.inference.exports.core.prove import record_answers
from paceline.inference.exports.core.transformers_engine import TransformersProofEngine
from paceline.inference.exports.export import export
from paceline.inference.exports.full import FullForm
from paceline.inference.exports.registry import form_named
from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer


def write_run(folder: Path) -> Path:
    """Write an adapter with random weights to ``folder/model``, and return ``folder``."""
    base = make_family("qwen2", folder.parent / f"{folder.name}-base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False))
    adapted.save_pretrained(str(folder / "model"), save_embedding_layers=False)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), folder / "model")
    return folder


def hidden_entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".paceline")]


class DamagedForm(FullForm):
    """A full model, one of whose weights is wrong."""

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        super().write(source, model, folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"] += 0.01
        save_file(tensors, file, {"format": "pt"})


class TruncatedForm(FullForm):
    """A full model whose file is cut off."""

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        super().write(source, model, folder)
        os.truncate(folder / "model.safetensors", 1000)


class FilledDiskForm(FullForm):
    """A full model that is copied while another file has filled the disk."""

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        (folder.parents[1] / "filler").write_bytes(b"0" * (free - (64 << 10)))
        shutil.copyfile(model / "model.safetensors", folder / "model.safetensors")


def test_damaged_weights_differ(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base")
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    engine = TransformersProofEngine(AutoModelForCausalLM.from_pretrained(base), tokenizer)
    prompts = proof_prompts(tokenizer)
    save_answers(tmp_path / "answers", prompts, answer_prompts(engine, prompts), "float32")
    prompts, answers = load_answers(tmp_path / "answers")
    assert all(len(answer.answer) == 16 for answer in answers)
    limit = ProofLimit("logits", 1e-5)
    same = ProofCheck(compare(engine, prompts, answers), 4, limit)
    assert same.record()["max_logit_diff"] == 0.0
    assert same.is_ok
    assert same.record()["tokens_equal"]
    with torch.no_grad():
        engine.model.model.norm.weight.add_(1e-3)
    changed = ProofCheck(compare(engine, prompts, answers), 4, limit)
    assert changed.is_ok is False
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(torch.nan)
    broken = ProofCheck(compare(engine, prompts, answers), 4, limit)
    assert broken.is_ok is False
    assert broken.record()["max_logit_diff"] is None
    assert json.dumps(broken.record(), allow_nan=False)


def test_value_that_is_not_a_number_in_one_prompt_fails(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base")
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    engine = TransformersProofEngine(AutoModelForCausalLM.from_pretrained(base), tokenizer)
    prompts = proof_prompts(tokenizer)
    answers = answer_prompts(engine, prompts)
    others = {token for answer in answers[:-1] for token in answer.tokens}
    token = next(token for token in answers[-1].prompt if token not in others)
    with torch.no_grad():
        engine.model.model.embed_tokens.weight[token] = torch.nan
    figures = compare(engine, prompts, answers)
    assert ProofCheck(figures, 4, ProofLimit("logits", 1e-5)).is_ok is False
    with raises_error(RunError, code="export-not-finite"):
        answer_prompts(engine, prompts)


def test_prompts_fit_the_positions_of_the_model(tmp_path: Path) -> None:
    base = make_family("gpt2", tmp_path / "base", n_positions=40)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    answers = record_answers(model, tokenizer, tmp_path / "answers")
    prompts, expected = load_answers(answers.file)
    assert any(len(answer.encoded) > 40 for answer in expected)
    assert all(len(answer.tokens) <= 40 for answer in expected)
    engine = TransformersProofEngine(model, tokenizer)
    assert ProofCheck(compare(engine, prompts, expected), 4, ProofLimit("logits", 0)).is_ok


_TURNS = "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "contents"),
    [
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + _TURNS, ["text"] * 4),
        ("{% if enable_thinking %}{{ 1 / 0 }}{% endif %}" + _TURNS, ["text"] * 4),
        ("{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}" + _TURNS,
         ["text"] * 4),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('none') }}{% endif %}" + _TURNS,
         ["text"] * 4),
        ("{% for turn in messages %}{% for part in turn.content %}{{ part.text }}{% endfor %}"
         "{% endfor %}", ["parts"] * 4),
        ("{{ raise_exception('no chats') }}", ["plain"] * 4),
        ("{% if %}", ["plain"] * 4),
    ],
)  # fmt: skip
def test_templates_that_refuse_prompts_get_simpler_ones(template: str, contents: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:qwen2-micro"))
    tokenizer.chat_template = template
    prompts = proof_prompts(tokenizer)
    assert [prompt.content for prompt in prompts] == contents
    engine = TransformersProofEngine(torch.nn.Linear(1, 1), tokenizer)
    for prompt in prompts:
        assert prompt.turns[-1]["content"].strip() in tokenizer.decode(engine.encode(prompt))


def test_prompts_use_what_the_template_reads() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:qwen2-micro"))
    tokenizer.chat_template = "{{ messages[-1].content }}"
    prompts = proof_prompts(tokenizer)
    assert not any(prompt.tools or prompt.template_args for prompt in prompts)
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"
        "{% if enable_thinking %}<think>{% endif %}"
    )
    prompts = proof_prompts(tokenizer)
    assert [bool(prompt.tools) for prompt in prompts] == [False, False, False, True]
    assert [prompt.template_args for prompt in prompts] == [{}, {}, {"enable_thinking": True}, {}]
    tokenizer.chat_template = None
    assert len(proof_prompts(tokenizer)) == 4


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_merged_model_is_proved(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main(["export", str(run), "--merge", "--dtype", dtype, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["path"] == str(run / "exported")
    assert record["bytes"] == sum(file.stat().st_size for file in (run / "exported").iterdir())
    check = record["check"]
    assert check["ok"] is True
    assert check["prompts"] == 4
    assert check["limit"] == (1e-5 if dtype == "auto" else 2e-2)
    assert check["max_logit_diff"] <= check["limit"]
    file = run / "exported" / "model.safetensors"
    assert file.stat().st_mode & 0o044 == 0o044  # other users can read it
    assert not hidden_entries(run)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("form", "code"), [(DamagedForm, "export-not-equal"), (TruncatedForm, "export-not-loaded")]
)
def test_damaged_export_is_not_written(
    form: Callable[..., FullForm], code: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(RunError) as caught:
        export(run, form(merges=True))
    assert caught.value.code == code
    assert not (run / "exported").exists()
    assert not hidden_entries(run)


@pytest.mark.soak
def test_limit_of_the_command_replaces_the_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    command = ["export", str(run), "--merge", "--dtype", "bfloat16"]
    assert main([*command, "--limit", "1e-9"]) == 1
    assert "(limit: 1e-09)" in capsys.readouterr().err
    assert not (run / "exported").exists()


@pytest.mark.soak
def test_killed_export_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "paceline", "export", str(run), "--merge"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    while not hidden_entries(run):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run / "exported").exists()
    assert hidden_entries(run)
    subprocess.run(command, check=True, capture_output=True)
    assert (run / "exported").is_dir()
    assert not hidden_entries(run)


def test_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with mount_tmpfs(tmp_path / "disk", "size=1m") as mounted:
        if mounted:
            with raises_error(ConfigError, code="export-needs-disk"):
                export(run, FullForm(merges=True), output=str(tmp_path / "disk" / "merged"))
            assert not list((tmp_path / "disk").iterdir())


@pytest.mark.soak
def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with mount_tmpfs(tmp_path / "disk", "size=16m") as mounted:
        if mounted:
            with pytest.raises(RunError) as caught:
                export(run, FilledDiskForm(merges=True), output=str(tmp_path / "disk" / "merged"))
            assert caught.value.code == "export-not-written"
            assert [path.name for path in (tmp_path / "disk").iterdir()] == ["filler"]


@pytest.mark.soak
@pytest.mark.parametrize("adapters", [True, False])
def test_checkpoint_is_exported_as_the_run_would_be(adapters: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    paceline.train(
        {
            "model": "builtin:qwen2-micro",
            "dataset": "builtin:python-docs#40",
            "output_dir": str(run),
            "lora": {"enable": adapters},
            "train_args": {"max_steps": 4, "save_steps": 2, "learning_rate": 0.01},
            "parallel": {"mode": "zero3", "world_size": 2},
        }
    )
    form = FullForm(merges=adapters)
    last = export(run / "checkpoints" / "step-00000004", form)
    assert last.path == run / "exported-step-00000004"
    weights = load_file(last.path / "model.safetensors")
    expected = load_file(export(run, form).path / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    earlier = export(run / "checkpoints" / "step-00000002", form, output=str(tmp_path / "earlier"))
    changed = load_file(earlier.path / "model.safetensors")
    assert any(not torch.equal(changed[name], value) for name, value in expected.items())
    assert not hidden_entries(run)
    if adapters:
        gguf = export(run / "checkpoints" / "step-00000002", form_named("gguf-q8_0"))
        assert [file.name for file in gguf.path.iterdir()] == ["run-step-00000002-q8_0.gguf"]


@pytest.mark.soak
@pytest.mark.parametrize("form", ["transformers", "adapter", "gguf-f16"])
def test_adapter_without_a_tokenizer_gets_that_of_its_base(form: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for file in (run / "model").iterdir():
        if not file.name.startswith("adapter"):
            file.unlink()
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), tmp_path / "run-base")
    chosen = FullForm(merges=True) if form == "transformers" else form_named(form)
    done = export(run / "model", chosen, output=str(tmp_path / "out"))
    assert done.check.is_ok
    assert form == "gguf-f16" or (tmp_path / "out" / "tokenizer.json").is_file()


_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class MyConfig(Qwen2Config):
    model_type = "my_qwen2"

class MyModel(Qwen2ForCausalLM):
    config_class = MyConfig
"""


def write_code_run(folder: Path, trusts_code: bool) -> Path:
    """Write a run whose base model needs code of its own."""
    run = write_run(folder)
    base = folder.parent / f"{folder.name}-base"
    (base / "code_of_mine.py").write_text(_CODE)
    content = json.loads((base / "config.json").read_text()) | {
        "model_type": "my_qwen2",
        "auto_map": {
            "AutoConfig": "code_of_mine.MyConfig",
            "AutoModelForCausalLM": "code_of_mine.MyModel",
        },
    }
    (base / "config.json").write_text(json.dumps(content))
    (run / "config.yaml").write_text(
        f"model: {base}\ndataset: builtin:python-docs\nlora: {{enable: true}}\n"
        f"trust_remote_code: {str(trusts_code).lower()}\n"
    )
    return run


class LateForm(FullForm):
    """A full model whose target another process has made meanwhile."""

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        super().write(source, model, folder)
        (source.run / "exported").mkdir()
        (source.run / "exported" / "notes.txt").write_text("mine")


@pytest.mark.soak
def test_target_that_another_process_has_made_is_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with raises_error(ConfigError, code="export-exists"):
        export(run, LateForm(merges=True))
    assert [file.name for file in (run / "exported").iterdir()] == ["notes.txt"]
    assert not hidden_entries(run)


@pytest.mark.parametrize("form", ["adapter", "gguf-f16", "fp8"])
def test_base_that_is_gone_is_named_by_every_form(form: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run-base")
    with raises_error(ConfigError, code="base-files-missing"):
        export(run, form_named(form))


@pytest.mark.soak
def test_code_of_a_model_runs_if_its_run_has_trusted_it(tmp_path: Path) -> None:
    run = write_code_run(tmp_path / "run", True)
    done = export(run, FullForm(merges=True))
    assert done.check.is_ok
    assert (done.path / "code_of_mine.py").is_file()
    with raises_error(ConfigError, code="gguf-unsupported-model"):
        export(run, form_named("gguf-f16"))


def test_code_of_a_model_needs_trust(tmp_path: Path) -> None:
    run = write_code_run(tmp_path / "run", False)
    with raises_error(ConfigError, code="export-needs-code"):
        export(run, FullForm(merges=True))


def test_target_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for name in ("file/out", f"{'x' * 300}/out"):
        with raises_error(ConfigError, code="export-folder-not-writable"):
            export(run, FullForm(merges=True), output=str(tmp_path / name))


@pytest.mark.parametrize("limit", ["nan", "inf", "-1"])
def test_limit_is_a_finite_number(limit: str, tmp_path: Path) -> None:
    assert main(["export", str(tmp_path), "--merge", "--limit", limit]) == 2


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    save(checkpoint.parent, 4, {"model/weight": torch.ones(2)}, {"step": 4})
    with raises_error(ConfigError, code="checkpoint-without-run"):
        export(checkpoint, FullForm())
    (tmp_path / "run" / "config.yaml").write_text(
        "model: builtin:qwen2-micro\ndataset: builtin:python-docs\n"
    )
    with next(checkpoint.glob("state*.safetensors")).open("ab") as file:
        file.write(b"0")
    with raises_error(ConfigError, code="damaged-checkpoint"):
        export(checkpoint, FullForm())
