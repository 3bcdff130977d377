"""`paceline verify`, `sweep` and the best checkpoint with tasks that generate completions."""

import json
from pathlib import Path

import pytest
from commands import report, run
from raised import raises_error
from rollout_runs import train_on_rollouts, write_inputs

from paceline.config.load import load_text
from paceline.config.metrics.evaluation import is_lower_better
from paceline.core.errors import ConfigError
from paceline.verify.run import VerifyOptions, verify

pytestmark = pytest.mark.slow


def settings(folder: Path, *args: str) -> list[str]:
    return [
        "model=builtin:qwen2-micro",
        "task=grpo",
        f"dataset={folder / 'prompts.jsonl'}",
        f"rewards=[{{function: '{folder / 'own_rewards.py'}:vowels'}}]",
        f"output_dir={folder / 'run'}",
        "grpo.num_generations=4",
        "grpo.max_completion_length=6",
        "train_args.global_batch_size=8",
        "train_args.precision=32",
        "max_length=64",
        "parallel.device=cpu",
        *args,
    ]


def test_verify_asks_for_recorded_completions(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = {
        "model": "builtin:qwen2-micro",
        "task": "grpo",
        "dataset": str(tmp_path / "prompts.jsonl"),
        "rewards": [{"name": "exact"}],
    }
    loaded = load_text(json.dumps(config), "mine.yaml")
    with raises_error(ConfigError, code="verify-with-rollouts"):
        verify(loaded, VerifyOptions(modes="ddp", world_size=2, steps=4))


def test_a_higher_reward_is_better() -> None:
    assert not is_lower_better("reward")
    assert is_lower_better("loss")


@pytest.mark.soak
def test_modes_agree_on_recorded_completions(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    training = ("grpo.num_iterations=2", "grpo.beta=0.1", "train_args.optim=sgd")
    rate = "train_args.learning_rate=0.5"
    train_on_rollouts(tmp_path, "one", "parallel.mode=single", "max_steps=4", *training, rate)
    process = run(
        *settings(tmp_path, *training, rate, f"grpo.replay={tmp_path / 'one/rollouts'}"),
        *("--modes", "ddp,zero2,zero3", "--world-size", "2", "--steps", "4", "--json"),
        verb="verify",
    )
    certificate = json.loads(process.stdout)
    assert certificate["ok"]
    assert [mode["mode"] for mode in certificate["modes"]] == ["ddp", "zero2", "zero3"]
    assert all(mode["final_loss"] != 0 for mode in certificate["modes"])
    assert all(mode["loss_rel_diff"] <= 1e-6 for mode in certificate["modes"])


@pytest.mark.soak
def test_a_sweep_maximizes_the_reward(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    process = run(
        *settings(tmp_path, "parallel.mode=single", f"val_dataset={tmp_path / 'prompts.jsonl'}"),
        *("max_steps=2", "train_args.learning_rate=1e-4,1e-2", "--metric", "reward"),
        verb="sweep",
    )
    rows = [line.split() for line in process.stdout.splitlines() if " done " in line]
    rewards = [float(row[2]) for row in rows]
    assert len(rewards) == 2
    assert rewards == sorted(rewards, reverse=True)
    assert all(reward > 0 for reward in rewards)


@pytest.mark.soak
def test_the_checkpoint_with_the_highest_reward_is_the_best(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    train_on_rollouts(
        tmp_path,
        "run",
        "parallel.mode=single",
        f"val_dataset={tmp_path / 'prompts.jsonl'}",
        "max_steps=3",
        "train_args.eval_steps=1",
        "train_args.save_steps=1",
        "train_args.metric_for_best_model=reward",
        "train_args.load_best_model_at_end=true",
        "train_args.learning_rate=0.01",
    )
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    evals = [each for each in map(json.loads, lines) if each["type"] == "eval"]
    best = report(tmp_path / "run")["best"]
    rewards = {each["step"]: each["metrics"]["reward"] for each in evals}
    assert rewards[best["step"]] == max(rewards.values())
