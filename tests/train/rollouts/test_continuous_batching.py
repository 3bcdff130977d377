"""Completions that transformers' continuous batching generates: with the probabilities of training,
the same when a run is repeated, and on ranks that shard the weights."""

from pathlib import Path

import pytest
from commands import events
from families import build_model
from rollout_runs import rollouts, train_on_rollouts, write_inputs
from transformers import AutoTokenizer

from paceline.models.builtin import resolve_model

pytestmark = pytest.mark.slow

ENGINE = ("grpo.engine=continuous_batching", "per_device_train_batch_size=4")
SINGLE = ("parallel.mode=single", *ENGINE)
#: Largest mean difference of log-probabilities, by precision.
DIFFERENCES = {"32": 1e-5, "bf16-mixed": 5e-3, "bf16-true": 5e-3}


def completions(folder: Path) -> list[list[tuple[int, int, list[int], list[float]]]]:
    return [
        [
            (line["prompt"], line["index"], line["completion_ids"], line["logprobs"])
            for line in lines
        ]
        for lines in rollouts(folder)
    ]


def test_a_repeated_run_has_the_same_completions_with_the_probabilities_of_training(
    tmp_path: Path,
) -> None:
    write_inputs(tmp_path)
    for name in ("one", "again"):
        train_on_rollouts(tmp_path, name, *SINGLE, "max_steps=2")
    one = completions(tmp_path / "one")
    assert one == completions(tmp_path / "again")
    assert len({tuple(ids) for lines in one for _, _, ids, _ in lines}) > 8
    for step in events(tmp_path / "one", "step"):
        assert 0 <= step["logprob_diff"] < DIFFERENCES["32"]
        assert step["importance_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert step["importance_clipped"] == 0.0
    (notice,) = [
        each for each in events(tmp_path / "one", "notice") if each.get("code") == "rollout-engine"
    ]
    assert "continuous_batching" in notice["text"]


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("mode", ["single", "ddp", "zero2", "zero3"])
@pytest.mark.parametrize("lora", [(), ("lora.enable=true",)], ids=["full", "lora"])
def test_probabilities_are_those_of_training(
    mode: str, precision: str, lora: tuple[str, ...], tmp_path: Path
) -> None:
    if lora and precision == "bf16-true":
        pytest.skip("adapters are float32 with mixed precision")
    write_inputs(tmp_path)
    ranks = () if mode == "single" else ("parallel.num_gpus=2",)
    args = (*ENGINE, *lora, f"parallel.mode={mode}", *ranks, f"train_args.precision={precision}")
    train_on_rollouts(
        tmp_path,
        "run",
        *args,
        "max_steps=2",
        "train_args.learning_rate=0.01",
        f"val_dataset={tmp_path / 'prompts.jsonl'}",
        "grpo.temperature=0.7",
    )
    for step in events(tmp_path / "run", "step"):
        assert step["logprob_diff"] < DIFFERENCES[precision]
    assert events(tmp_path / "run", "eval")


@pytest.mark.soak
def test_a_model_with_recurrent_layers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    model = tmp_path / "model"
    build_model("jamba").save_pretrained(model)
    AutoTokenizer.from_pretrained(resolve_model("builtin:qwen2-micro")).save_pretrained(model)
    for extra in ((), ("--dry-run",)):
        process = train_on_rollouts(
            tmp_path, "run", f"model={model}", *SINGLE, "max_steps=1", *extra, expect=2
        )
        assert "[engine-not-supported]" in process.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_prompts_of_one_token_have_all_completions(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 4)
    template = tmp_path / "plain.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    train_on_rollouts(tmp_path, "run", *SINGLE, "max_steps=1", f"chat_template={template}")
    (lines,) = rollouts(tmp_path / "run")
    assert {len(line["prompt_ids"]) for line in lines} == {1}
    assert [line["index"] for line in lines] == [0, 1, 2, 3] * 2
