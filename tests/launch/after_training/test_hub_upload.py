"""Uploads with huggingface_hub's own client to a server that stands in for the hub."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from adapter_families import make_family
from hub_stand_in import OWNER, TOKEN, HubStandIn, hub_stand_in
from raised import raises_error

from paceline.cli import main
from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.hub import unreachable
from paceline.launch.after_training.hub_upload import check_hub_upload, upload_model
from paceline.launch.after_training.model_card import model_card
from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with hub_stand_in() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        unreachable.cache_clear()
        yield server
        unreachable.cache_clear()


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A folder as a run leaves it."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "README.md").write_text("a card of peft")
    config = Config(
        model="Qwen/Qwen2.5-0.5B",
        dataset=["/home/me/private/data.jsonl", "tatsu-lab/alpaca#50"],
        output_dir=str(folder),
    )
    start = {
        "type": "run_start",
        "time": 1.0,
        "config": config.model_dump(mode="json"),
        "versions": {"paceline": "0.1.0", "torch": "2.13"},
        "mesh": {"ranks": [{"rank": 0, "device": "NVIDIA H100"}]},
        "derived": {"global_batch_size": 8, "learning_rate": 2e-5},
    }
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    figures = {
        "final_eval_loss": 1.25,
        "final_eval_metrics": {"token_accuracy": 0.75},
        "steps": 40,
        "strategy": "ddp",
        "data": {"read": 60, "kept": 58, "truncated": 2},
        "lm_eval": {"results": {"arc_easy": {"acc": 0.5}}},
    }
    (folder / "report.json").write_text(json.dumps(figures))
    return folder


def test_upload_is_one_commit_with_a_card(hub: HubStandIn, finished_run: Path) -> None:
    name, url = upload_model(finished_run / "model", finished_run, "tuned", private=True)
    repository = hub.repositories[f"{OWNER}/tuned"]
    assert name == f"{OWNER}/tuned"
    assert url.startswith(f"{hub.url}/{name}/commit/")
    assert repository.private
    assert repository.num_commits == 1
    assert repository.files["model.safetensors"] == b"weights" * 1000
    assert repository.files["config.json"] == b"{}"
    card = repository.files["README.md"].decode()
    _, metadata, text = card.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "tags": ["paceline", "sft"],
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen2.5-0.5B",
        "datasets": ["tatsu-lab/alpaca"],
    }
    for expected in (
        "# tuned",
        f'from_pretrained("{name}")',
        "58 of 60 rows were used; 2 of them were truncated.",
        "| token_accuracy | 0.7500 |",
        "| arc_easy | acc | 0.5000 |",
        "| devices | NVIDIA H100 |",
        "| peak learning rate | 2e-5 |",
        "torch 2.13",
        "- `data.jsonl`",
    ):
        assert expected in text
    assert "/home/me" not in card
    assert str(finished_run) not in card


def test_card_of_a_model_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    card = model_card(tmp_path, tmp_path, "me/adapter")
    assert "A LoRA adapter of" in card
    assert "library_name: peft" in card
    assert "## Results" not in card


@pytest.mark.parametrize(
    ("task", "files", "expected"),
    [
        (
            "sft",
            {"config.json": {"model_type": "llava"}},
            ["pipeline_tag: image-text-to-text", "AutoModelForImageTextToText", "AutoProcessor"],
        ),
        (
            "reward",
            {"config.json": {"architectures": ["Qwen2ForSequenceClassification"]}},
            ["pipeline_tag: text-classification", "AutoModelForSequenceClassification.from_pretra"],
        ),
        (
            "classify",
            {"adapter_config.json": {}, "classes.json": {"id2label": {"0": "bad", "1": "good"}}},
            ["pipeline_tag: text-classification", 'from_pretrained("me/x", num_labels=2)'],
        ),
        ("dpo", {"config.json": {"model_type": "qwen2"}}, ["AutoModelForCausalLM.from_pretrained"]),
    ],
)
def test_card_tells_how_the_model_is_loaded(
    finished_run: Path, task: str, files: dict[str, object], expected: list[str]
) -> None:
    events = [json.loads(line) for line in (finished_run / "events.jsonl").read_text().splitlines()]
    events[0]["config"]["task"] = task
    (finished_run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    for name, content in files.items():
        (finished_run / "model" / name).write_text(json.dumps(content))
    card = model_card(finished_run, finished_run / "model", "me/x")
    assert all(text in card for text in expected), card


def test_failed_upload_commits_nothing_and_can_be_repeated(
    hub: HubStandIn, finished_run: Path
) -> None:
    hub.fails_at = "/commit/"
    with pytest.raises(RunError, match=r"could not be uploaded") as failure:
        upload_model(finished_run / "model", finished_run, f"{OWNER}/tuned")
    assert failure.value.fix is not None
    assert f"paceline export {finished_run} --push {OWNER}/tuned" in failure.value.fix
    assert hub.repositories[f"{OWNER}/tuned"].files == {}
    assert (finished_run / "model" / "README.md").read_text() == "a card of peft"
    hub.fails_at = None
    upload_model(finished_run / "model", finished_run, f"{OWNER}/tuned")
    assert set(hub.repositories[f"{OWNER}/tuned"].files) == {
        "README.md", "config.json", "model.safetensors",
    }  # fmt: skip


def test_refused_before_the_start(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**keys: object) -> Config:
        args = {"push_to_hub": True, **keys}
        return Config(model="m", dataset="d", output_dir="out/demo", train_args=args)

    check_hub_upload(config())
    with raises_error(ConfigError, code="invalid-repository-name"):
        check_hub_upload(config(hub_model_id="a/b/c"))
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with raises_error(ConfigError, code="hub-refuses-token"):
        check_hub_upload(config())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    unreachable.cache_clear()
    with raises_error(ConfigError, code="hub-unreachable"):
        check_hub_upload(config())


def test_card_says_how_other_forms_are_used(finished_run: Path, tmp_path: Path) -> None:
    gguf, quantized = tmp_path / "gguf", tmp_path / "fp8"
    gguf.mkdir()
    (gguf / "tuned-q8_0.gguf").write_bytes(b"GGUF")
    card = model_card(finished_run, gguf, "me/tuned")
    assert yaml.safe_load(card.split("---\n", 2)[1])["library_name"] == "gguf"
    assert "llama-server --hf-repo me/tuned --hf-file tuned-q8_0.gguf" in card
    assert "from_pretrained" not in card
    quantized.mkdir()
    settings = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (quantized / "config.json").write_text(json.dumps(settings))
    card = model_card(finished_run, quantized, "me/tuned")
    assert "`quant_method: compressed-tensors`" in card
    assert "vllm serve me/tuned" in card


@pytest.mark.soak
def test_exported_form_is_uploaded(
    hub: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "run" / "model"
    make_family("qwen2", base)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), base)
    command = ["export", str(tmp_path / "run"), "--gguf", "f16", "--limit", "0.01"]
    assert main([*command, "--push", "tuned", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["format"] == "gguf-f16"
    assert output["check"]["ok"] is True
    assert output["repository"] == f"{OWNER}/tuned"
    files = hub.repositories[f"{OWNER}/tuned"].files
    assert sorted(files) == ["README.md", "run-f16.gguf"]
    assert files["run-f16.gguf"] == (Path(output["path"]) / "run-f16.gguf").read_bytes()
