"""The recipe `grpo-letters`: rewards for right answers raise the reward on held-out prompts, and
rewards for permuted answers do not."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from commands import events, run

RECIPE = Path(__file__).parents[3] / "examples" / "recipes" / "grpo-letters"


def _data_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", RECIPE / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def _held_out_reward(folder: Path, name: str, *args: str) -> float:
    """Train with rewards, and return the mean reward on the held-out prompts at the end."""
    output = f"output_dir={folder / name}"
    run(str(RECIPE / "grpo.yaml"), *args, output, cwd=folder, timeout_s=600)
    reward: float = events(folder / name, "eval")[-1]["metrics"]["reward"]
    return reward


def _warm_up(folder: Path, seed: int) -> None:
    _data_program().write_data(folder, seed)
    run(str(RECIPE / "warm-up.yaml"), f"seed={seed}", cwd=folder, timeout_s=600)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rewards_raise_the_reward_on_held_out_prompts(seed: int, tmp_path: Path) -> None:
    _warm_up(tmp_path, seed)
    untrained = ("max_steps=1", "learning_rate=1e-12")
    assert _held_out_reward(tmp_path, "before", f"seed={seed}", *untrained) < 0.2
    assert _held_out_reward(tmp_path, "after", f"seed={seed}") > 0.8


@pytest.mark.soak
@pytest.mark.slow
def test_permuted_answers_do_not_raise_it(tmp_path: Path) -> None:
    _warm_up(tmp_path, 0)
    permuted = ("seed=0", "dataset=./permuted.jsonl")
    assert _held_out_reward(tmp_path, "permuted", *permuted) < 0.3


def test_held_out_prompts_are_in_no_other_file(tmp_path: Path) -> None:
    _data_program().write_data(tmp_path, seed=1)
    prompts = {
        path.stem: {line.split('"')[3] for line in path.read_text().splitlines()}
        for path in tmp_path.glob("*.jsonl")
    }
    held_out = prompts.pop("held-out")
    assert len(held_out) == 200
    assert prompts.keys() == {"warm-up", "train", "permuted"}
    for used in prompts.values():
        assert len(used) == 800
        assert not used & held_out
