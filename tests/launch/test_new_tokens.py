"""Runs that add tokens to the vocabulary: every strategy trains the same, and the saved model has
the tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import MICRO, losses, run
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.soak]

TOKENS = ("<think>", "</think>", "qwxz")
ARGS = (
    "new_special_tokens=<think>,</think>",
    "new_tokens=qwxz",
    "lora.dropout=0",
    "train_args.learning_rate=1e-2",
    "train_args.lr_scheduler_type=constant",
)
LORA = "lora.enable=true"
#: name → (ranks, replicas, arguments)
MODES = {
    "ddp": (2, 2, ()),
    "zero1": (2, 2, ()),
    "zero3": (2, 2, ()),
    "deepspeed": (2, 2, ("parallel.deepspeed_stage=3",)),
    "tensor": (2, 1, ()),
    "pipeline": (2, 1, ()),
    "hybrid": (4, 2, ("parallel.shard=2", "parallel.tensor=2")),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [
        {"prompt": f"What is {n}?", "completion": f"<think>{n} is {n}</think>It is qwxz {n}."}
        for n in range(64)
    ]
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"dataset={file}"


def mode_args(mode: str) -> list[str]:
    ranks, replicas, args = MODES.get(mode, (1, 1, ()))
    accumulation = f"gradient_accumulation_steps={2 // replicas}"
    name = [] if mode == "hybrid" else [f"parallel.mode={mode}"]
    return [*name, f"parallel.num_gpus={ranks}", accumulation, *args]


def train(folder: Path, data: str, *args: str) -> None:
    model = [arg for arg in MICRO if not arg.startswith("dataset=")]
    run(*model, data, *ARGS, f"output_dir={folder}", *args)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: str) -> Any:
    """Return the folder of a run of one rank, with or without adapters."""
    folders: dict[tuple[str, ...], Path] = {}

    def find(*extra: str) -> Path:
        if extra not in folders:
            folders[extra] = tmp_path_factory.mktemp("alone") / "run"
            train(folders[extra], data, *extra, *mode_args("single"), "max_steps=4")
        return folders[extra]

    return find


@pytest.mark.parametrize("extra", [(), (LORA,)], ids=["full", "lora"])
@pytest.mark.parametrize("mode", MODES)
def test_strategies_agree(
    mode: str, extra: tuple[str, ...], alone: Any, data: str, tmp_path: Path
) -> None:
    train(tmp_path, data, *extra, *mode_args(mode), "max_steps=4")
    assert losses(tmp_path) == pytest.approx(losses(alone(*extra)), rel=2e-4)


def test_adapters_in_mixed_precision(data: str, tmp_path: Path) -> None:
    """The embeddings are float32 and the frozen weights between them and the head bfloat16."""
    args = (LORA, "train_args.precision=bf16-mixed", "max_steps=4")
    train(tmp_path, data, *args, *mode_args("single"))
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_saved_model_has_the_tokens(alone: Any) -> None:
    folder = alone() / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(f"a{'b'.join(TOKENS)}").input_ids
    assert set(tokenizer.convert_tokens_to_ids(list(TOKENS))) <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("qwxz")
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = model.get_input_embeddings().weight
    assert weights.shape[0] % 64 == 0
    assert weights.shape[0] >= len(tokenizer)
    # They start as equal means and are trained apart.
    trained = weights[tokenizer.convert_tokens_to_ids(list(TOKENS))]
    assert not torch.equal(trained[0], trained[1])
    assert model.get_output_embeddings().weight is weights


def test_adapter_has_the_tokens_in_peft_and_merged(alone: Any, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    folder = alone(LORA)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    inputs = tokenizer("What is 7?<think>7", return_tensors="pt")
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "model").eval()
    run(str(folder), "--merge", "--output", str(tmp_path / "merged"), verb="export")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == len(tokenizer)
    with torch.no_grad():
        assert torch.allclose(adapted(**inputs).logits, merged(**inputs).logits, atol=1e-4)
    answer = run(str(folder), "What is 7?", "--max-new-tokens", "3", verb="generate").stdout
    assert "<think>" not in answer


@pytest.mark.parametrize("extra", [(), (LORA,)], ids=["full", "lora"])
def test_resumed_run_ends_with_the_same_bits(
    extra: tuple[str, ...], alone: Any, data: str, tmp_path: Path
) -> None:
    for mode, steps in (("zero3", 2), ("single", 4)):
        changed = ["--allow-config-change", f"max_steps={steps}"]
        train(tmp_path, data, *extra, *mode_args(mode), *changed)
    once, twice = inspect(alone(*extra)), inspect(tmp_path)
    assert once.keys() == twice.keys()
    assert any("embed_tokens" in name for name in once)
    assert losses(tmp_path) == pytest.approx(losses(alone(*extra)), rel=2e-4)


def inspect(folder: Path) -> dict[str, Any]:
    return json.loads(run(str(folder), "--json", verb="inspect").stdout)["tensors"]
