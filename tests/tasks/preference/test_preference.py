"""`task: dpo`, `orpo`, `kto`, `simpo` and `reward`: rows, tokens, losses, metrics and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from raised import raises_error
from torch.nn import functional

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.sources.rows import MalformedRow, Unsupported
from paceline.data.text.preferences import AnswerConverter, PairConverter
from paceline.data.text.sample import ChatSample
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import check_strategy
from paceline.planner.model_profile import describe
from paceline.tasks import load_task

QUESTION = [{"role": "user", "content": "q"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))


def turns(sample: ChatSample | None) -> list[str]:
    assert sample is not None
    if sample.pair is not None:
        return list(sample.pair)
    return [str(message["content"]) for message in sample.messages or []]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, {}),
        ({"prompt": QUESTION, "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD]}, {}),
        ({"prompt": "q", "chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD]}, {}),
        ({"messages": QUESTION, "chosen": GOOD, "rejected": BAD}, {}),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            {},
        ),
        ({"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}, {}),
        ({"messages": [*QUESTION, GOOD], "rejected_response": "bad"}, {}),
        ({"messages": [*QUESTION, GOOD], "rejected_messages": [*QUESTION, BAD]}, {}),
        ({"query": "q", "response": "good", "rejected_response": "bad"}, {}),
        ({"question": "q", "chosen": "good", "rejected": "bad"}, {}),
        ({"input": "q", "chosen": "good", "rejected": "bad"}, {}),
        ({"instruction": "q", "chosen_response": "good", "rejected_response": "bad"}, {}),
        (
            {
                "input": {"messages": QUESTION},
                "preferred_output": [GOOD],
                "non_preferred_output": [BAD],
            },
            {},
        ),
        ({"x": "q", "y": "good", "z": "bad"}, {"prompt": "x", "chosen": "y", "rejected": "z"}),
    ],
)
def test_every_form_of_a_pair(row: dict[str, Any], columns: dict[str, str]) -> None:
    sample = PairConverter("data", columns=columns)(row)
    assert turns(sample) == ["q", "good"]
    assert turns(sample.rejected) == ["q", "bad"]


@pytest.mark.parametrize("name", ["chosen", "prompt"])
def test_column_is_not_both_mapped_and_ignored(name: str) -> None:
    with raises_error(ConfigError, code="conflicting-settings", naming="ignore_columns"):
        PairConverter("data", columns={name: "x"}, ignore_columns=["x"])


def test_implicit_prompt_of_texts() -> None:
    sample = PairConverter("data")({"chosen": "Q: why? A: good", "rejected": "Q: why? A: bad"})
    assert turns(sample) == ["Q: why? A:", " good"]
    assert turns(sample.rejected) == ["Q: why? A:", " bad"]


@pytest.mark.parametrize(
    ("row", "mark"),
    [
        ({"prompt": "q", "completion": "good", "label": True}, True),
        ({"prompt": QUESTION, "completion": [GOOD], "label": False}, False),
        ({"messages": [*QUESTION, GOOD], "kto_tag": False}, False),
        ({"instruction": "q", "output": "good", "kto_tag": "true"}, True),
    ],
)
def test_every_form_of_a_marked_answer(row: dict[str, Any], mark: bool) -> None:
    sample = AnswerConverter("data")(row)
    assert sample.is_desirable is mark
    assert turns(sample) == ["q", "good"]


def test_other_data_is_refused_or_dropped() -> None:
    with pytest.raises(Unsupported, match="single answers"):
        PairConverter("data")({"prompt": "q", "completion": "a", "label": True})
    with pytest.raises(Unsupported, match="preference pairs"):
        AnswerConverter("data")({"prompt": "q", "chosen": "a", "rejected": "b"})
    with pytest.raises(MalformedRow, match="no pair"):
        PairConverter("data")({"prompt": "q", "completion": "a"})


def make_task(
    path: Path,
    task: str,
    rows: list[dict[str, Any]],
    settings: dict[str, Any] | None = None,
    **train_args: Any,
) -> Any:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = Config.model_validate(
        {
            "model": "builtin:qwen2-micro",
            "task": task,
            "dataset": str(path),
            "train_args": {"precision": "32", **train_args},
            **(settings or {}),
        }
    )
    made = load_task(config)
    made.check()
    made.prepared = made.prepare()
    return made


ROWS = [
    {"prompt": f"What is {n}?", "chosen": "one " * (n + 1), "rejected": f"no, {n}"}
    for n in range(3)
]


def test_dpo_loss_on_packed_and_padded_rows(tmp_path: Path) -> None:
    """The loss of packed rows, computed in chunks of a few tokens, is that of the formula, and so
    are its gradients."""
    task = make_task(tmp_path / "rows.jsonl", "dpo", ROWS, loss_chunk_size=5)
    dataset, _ = task.build_datasets()
    model = task.build_model()
    task.setup(model)
    batch = task.collate([dataset[index] for index in range(3)])
    dataset.reference = task.reference_values(model, batch)["values"].detach().numpy() - 0.3
    dataset.reference[:, 1] += np.array([0.1, 0.9, 2.0])
    batch = task.collate([dataset[index] for index in range(3)])
    assert "segment_lengths" in batch
    loss = task.loss(model, batch)
    loss.backward()
    gradient = model.model.embed_tokens.weight.grad.clone()

    model = task.build_model()  # of the same weights, with its own attention
    logps = []
    for index in range(3):
        sample = dataset[index]
        length = sample["chosen_length"]
        for part in (slice(0, length), slice(length, None)):
            ids = torch.from_numpy(sample["input_ids"][part]).long()
            mask = torch.from_numpy(sample["labels_mask"][part])[1:]
            scores = model(input_ids=ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
            logps.append(scores.gather(1, ids[1:, None])[mask, 0].sum())
    ratios = torch.stack(logps).view(3, 2) - torch.from_numpy(dataset.reference)
    expected = -functional.logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, model.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-7)
    padded = make_task(tmp_path / "rows.jsonl", "dpo", ROWS, packing=False)
    model = padded.build_model()  # of the same weights
    padded.setup(model)
    other = padded.loss(model, padded.collate([dataset[index] for index in range(3)]))
    assert other.item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("task", ["orpo", "simpo"])
def test_loss_of_a_batch_is_the_sum_of_its_parts(task: str, tmp_path: Path) -> None:
    made = make_task(tmp_path / "rows.jsonl", task, ROWS)
    dataset, _ = made.build_datasets()
    model = made.build_model()
    made.setup(model)
    full = made.collate([dataset[index] for index in range(3)])
    parts = [made.collate([dataset[0]]), made.collate([dataset[1], dataset[2]])]
    totals = made.totals(model, full)
    for batch in (full, *parts):
        batch["totals"] = totals
    total = sum(made.loss(model, part).item() for part in parts)
    assert total == pytest.approx(made.loss(model, full).item(), rel=1e-5)
    gathered = {name: row.double() for name, row in made.evaluate(model, full).items()}
    assert made.metrics(gathered)["loss"] == pytest.approx(total / 3, rel=1e-5)


def test_reward_of_pairs_with_margins(tmp_path: Path) -> None:
    """The loss of padded pairs is that of the formula on each text alone."""
    rows = [{**row, "margin": number / 2} for number, row in enumerate(ROWS)]
    rows.append({**ROWS[0], "margin": "large"})
    settings = {"preference": {"center_rewards_coefficient": 0.1}}
    task = make_task(tmp_path / "rows.jsonl", "reward", rows, settings)
    assert task.prepared.counts.dropped == {"`margin` is not a number": 1}
    dataset, _ = task.build_datasets()
    model = task.build_model()
    task.setup(model)
    batch = task.collate([dataset[index] for index in range(3)])
    loss = task.loss(model, batch)
    expected = []
    for index in range(3):
        ids = torch.from_numpy(dataset[index]["input_ids"]).long()
        length = dataset[index]["chosen_length"]
        good, bad = (
            model(input_ids=part.unsqueeze(0)).logits[0, 0] for part in (ids[:length], ids[length:])
        )
        loss_of_pair = -functional.logsigmoid(good - bad - index / 2) + 0.1 * (good + bad) ** 2
        expected.append(loss_of_pair.item())
    assert loss.item() == pytest.approx(sum(expected), rel=1e-5)
    with torch.no_grad():
        metrics = task.metrics(task.evaluate(model, batch))
    assert metrics["loss"] == pytest.approx(sum(expected) / 3, rel=1e-5)
    assert metrics["min_reward"] <= metrics["mean_reward"] <= metrics["max_reward"]


def test_plan_knows_the_activations_of_a_reward_model(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": "good", "rejected": "bad"}]
    profile = describe(make_task(tmp_path / "rows.jsonl", "reward", rows).config)
    assert not profile.notes
    assert profile.activation_bytes > 0
    assert profile.flops > 0


def test_prompt_of_kto_with_the_answer_of_the_row_before(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"What is {n}?", "completion": f"It is {n}", "label": n % 2 == 0}
        for n in range(5)
    ]
    task = make_task(tmp_path / "rows.jsonl", "kto", rows)
    task.global_batch_size = 2
    dataset, _ = task.build_datasets()

    def answer(sample: Any) -> list[int]:
        return sample["input_ids"][sample["labels_mask"]].tolist()

    partners = [1, 0, 3, 2, 3]  # groups of two rows; the last one has no other row in its group
    for index, partner in enumerate(partners):
        assert answer(dataset[index]["mismatched"]) == answer(dataset[partner])
    assert [dataset[index]["chosen_length"] > 0 for index in range(5)] == [True, False] * 2 + [True]


def test_kto_needs_two_samples_in_a_global_batch(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": f"{n}", "label": n > 1} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [
        "model=builtin:qwen2-micro", f"dataset={tmp_path / 'rows.jsonl'}", "parallel.device=cpu",
        "parallel.num_gpus=1", "per_device_train_batch_size=1",
        f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    error = run(*args, "task=kto", "--dry-run", expect=2).stderr
    assert "`task: kto` with a global batch of 1 sample cannot train" in error
    assert "Allowed: a global batch of at least 2 samples" in error
    run(*args, "task=kto", "preference.loss_type=apo_zero_unpaired", "--dry-run")
    run(*args, "task=kto", "gradient_accumulation_steps=2", "--dry-run")


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    base = {"model": "builtin:qwen2-micro", "dataset": "d", "task": "dpo"}
    for preference, message in (
        ({"loss_type": "aot"}, "sorts the rewards"),
        ({"loss_type": "kto"}, "not supported with task: dpo"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one weight per loss"),
        ({"loss_type": "exo_pair"}, "requires label_smoothing"),
        ({"loss_type": "apo_zero", "f_divergence_type": "forward_kl"}, "is not supported with"),
    ):
        with pytest.raises(ValueError, match=message):
            Config.model_validate({**base, "preference": preference})
    task = load_task(Config.model_validate({**base, "train_args": {"train_on_inputs": True}}))
    with raises_error(
        ConfigError, code="setting-with-preference", naming="train_args.train_on_inputs"
    ):
        task.check()
    config = Config.model_validate({**base, "parallel": {"mode": "tensor"}})
    with raises_error(ConfigError, code="not-supported", naming="task"):
        check_strategy("tensor", config, ParallelDims(tensor=2))
    for preference, name in (({"beta": 0.2}, "beta"), ({"loss_type": "hinge"}, "loss_type")):
        with pytest.raises(ValueError, match=f"preference.{name} is not supported with task: rew"):
            Config.model_validate({**base, "task": "reward", "preference": preference})
    with pytest.raises(ValueError, match="belongs to task: reward"):
        Config.model_validate({**base, "preference": {"center_rewards_coefficient": 0.1}})
    for args, code in (
        ({"packing": True}, "packing-with-task"),
        ({"train_on_inputs": True}, "setting-with-reward"),
        ({"packing_strategy": "bfd"}, "setting-with-reward"),
    ):
        task = load_task(Config.model_validate({**base, "task": "reward", "train_args": args}))
        with raises_error(ConfigError, code=code):
            task.check()
    for mode, dims in (("tensor", ParallelDims(tensor=2)), ("pipeline", ParallelDims(pipeline=2))):
        config = Config.model_validate({**base, "task": "reward", "parallel": {"mode": mode}})
        with raises_error(ConfigError, code="not-supported", naming="task"):
            check_strategy(mode, config, dims)
