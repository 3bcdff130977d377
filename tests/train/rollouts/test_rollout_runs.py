"""Training on completions of its own: equal on any number of ranks, recorded, and evaluated."""

from pathlib import Path

import pytest
from commands import events, report
from raised import raises_error
from rollout_runs import NUM_PROMPTS, rollouts, train_on_rollouts, write_inputs
from safetensors.numpy import load_file

from paceline.core.errors import ConfigError
from paceline.rollouts.records import read_groups

pytestmark = pytest.mark.slow

SINGLE = ("parallel.mode=single", "per_device_train_batch_size=4")
#: Mode and its arguments.
MODES = {
    "ddp": ("parallel.mode=ddp", "parallel.num_gpus=2"),
    "zero1": ("parallel.mode=zero1", "parallel.num_gpus=2"),
    "zero2": ("parallel.mode=zero2", "parallel.num_gpus=2"),
    "zero3": ("parallel.mode=zero3", "parallel.num_gpus=2"),
    "hybrid": ("parallel.mode=hybrid", "parallel.shard=2", "parallel.num_gpus=4"),
}
ITERATIONS = ("grpo.num_iterations=2", "grpo.beta=0.04", "max_steps=4")


def steps(folder: Path) -> list[tuple[float, float, float]]:
    return [(each["loss"], each["grad_norm"], each["reward"]) for each in events(folder, "step")]


def test_first_rollout_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    train_on_rollouts(tmp_path, "one", *SINGLE, "max_steps=1")
    train_on_rollouts(tmp_path, "two", *MODES["ddp"], "max_steps=1", "train_args.save_steps=0")
    one, two = rollouts(tmp_path / "one"), rollouts(tmp_path / "two")
    tokens = [(line["prompt"], line["index"], line["completion_ids"]) for line in one[0]]
    assert tokens == [(line["prompt"], line["index"], line["completion_ids"]) for line in two[0]]
    assert len({tuple(ids) for _, _, ids in tokens}) == 8
    (step,) = events(tmp_path / "one", "step")
    assert step["reward"] == pytest.approx(sum(line["reward"] for line in one[0]) / 8)
    assert step["rewards"] == {"vowels": pytest.approx(step["reward"])}
    assert step["rollout_s"] > 0
    assert steps(tmp_path / "two") == [pytest.approx(steps(tmp_path / "one")[0], abs=1e-6)]


@pytest.mark.soak
@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize("lora", [(), ("lora.enable=true",)], ids=["full", "lora"])
@pytest.mark.parametrize("mode", MODES)
def test_replayed_rollouts_give_the_same_training(
    mode: str, lora: tuple[str, ...], task: str, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    args = (*ITERATIONS, *lora, f"task={task}", "train_args.optim=sgd")
    train_on_rollouts(tmp_path, "one", *SINGLE, *args)
    train_on_rollouts(
        tmp_path,
        "many",
        *(*args, *MODES[mode], "per_device_train_batch_size=2"),
        f"grpo.replay={tmp_path / 'one/rollouts'}",
    )
    for ours, expected in zip(steps(tmp_path / "many"), steps(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    one, many = (load_file(tmp_path / name / "model" / file) for name in ("one", "many"))
    for name, value in one.items():
        assert many[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["single", *MODES])
def test_evaluation_reports_the_mean_reward(mode: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    args = MODES.get(mode, SINGLE)
    validation = f"val_dataset={tmp_path / 'prompts.jsonl'}"
    train_on_rollouts(tmp_path, "run", *args, validation, "max_steps=1")
    (evaluation,) = events(tmp_path / "run", "eval")
    assert evaluation["count"] == NUM_PROMPTS
    assert evaluation["metrics"]["reward"] == -evaluation["loss"]
    expected = pytest.approx(evaluation["metrics"]["reward"])
    assert evaluation["metrics"]["rewards/vowels"] == expected


@pytest.mark.soak
def test_dynamic_sampling_leaves_out_groups_without_signal(tmp_path: Path) -> None:
    write_inputs(
        tmp_path,
        "def vowels(prompts, completions, **columns):\n"
        "    is_useful = int(prompts[0].strip('Count .')) % 3 == 0\n"
        "    return [number * is_useful for number in range(len(completions))]\n",
    )
    train_on_rollouts(tmp_path, "run", *SINGLE, "grpo.dynamic_sampling=true", "max_steps=2")
    for lines in rollouts(tmp_path / "run"):
        assert all(line["prompt"] % 3 == 0 for line in lines)
    assert sum(step["skipped_groups"] for step in events(tmp_path / "run", "step")) > 0
    prompts = [line["prompt"] for lines in rollouts(tmp_path / "run") for line in lines[::4]]
    assert len(set(prompts)) == 4


@pytest.mark.soak
def test_truncated_completions_are_left_out(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    args = (*SINGLE, "grpo.mask_truncated_completions=true", "max_steps=1")
    train_on_rollouts(tmp_path, "run", *args)
    (step,) = events(tmp_path / "run", "step")
    assert step["truncated"] == 1.0
    assert step["loss"] == step["grad_norm"] == 0.0
    assert report(tmp_path / "run")["steps"] == 1


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("parallel.mode=tensor", "parallel.num_gpus=2"), "rollouts-with-mode"),
        (("parallel.mode=local_sgd", "parallel.num_gpus=2"), "rollouts-with-mode"),
        (("train_args.global_batch_size=6",), "batch-divides-groups"),
        (("grpo.replay=missing",), "no-rollout-file"),
        (("grpo.engine=vllm",), "rollouts-need-vllm"),
        (("rewards=[{name: exact, column: solution}]",), "no-reward-column"),
    ],
)
def test_refused_before_anything_starts(args: tuple[str, ...], code: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    process = train_on_rollouts(tmp_path, "run", "--dry-run", "max_steps=50", *args, expect=2)
    assert f"[{code}]" in process.stderr
    assert not (tmp_path / "run").exists()


def test_a_damaged_rollout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.jsonl"
    path.write_text('{"prompt": 1, "index": 0}\n')
    with raises_error(ConfigError, code="not-a-rollout"):
        read_groups(path, ["vowels"], 4)


@pytest.mark.soak
def test_recorded_rollouts_need_the_batch_of_their_run(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    train_on_rollouts(tmp_path, "one", *SINGLE, "max_steps=1")
    args = (
        f"grpo.replay={tmp_path / 'one/rollouts'}",
        "max_steps=1",
        "train_args.global_batch_size=16",
    )
    process = train_on_rollouts(tmp_path, "run", *SINGLE, *args, "--dry-run", expect=2)
    assert "[rollout-of-other-size]" in process.stderr
    assert "2 prompts, and the step has 4" in process.stderr
