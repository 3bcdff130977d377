"""A run that is killed while it generates, computes rewards, updates or saves continues with the
same bits."""

from pathlib import Path

import pytest
from commands import events
from rollout_runs import SOURCE, rollouts, train_on_rollouts, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.soak]

#: Ends the last rank once, in the given phase of a step.
KILLER = """
import os, signal, threading, time
from pathlib import Path
import paceline
from paceline.distributed.timing.progress import PROGRESS

class Killer(paceline.Callback):
    def __init__(self, config):
        super().__init__(config)
        self.phase = config.task_args["phase"]
        self.mark = Path(config.task_args["mark"])
        self.step = config.task_args["step"]

    def on_train_begin(self, info, state):
        self.is_victim = info.rank == info.world_size - 1

    def on_step_begin(self, state):
        if state.step == self.step and self.is_victim and not self.mark.exists():
            threading.Thread(target=self.watch, daemon=True).start()

    def before_checkpoint(self, state):
        if self.phase == "save" and state.step == self.step + 1 and self.is_victim:
            self.kill()

    def watch(self):
        while PROGRESS.phase != self.phase:
            time.sleep(0.0005)
        self.kill()

    def kill(self):
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
#: A reward that takes as long as the killer needs to notice.
SLOW = SOURCE.replace("    return", "    __import__('time').sleep(0.05)\n    return")


PHASES = [("rollout", 1), ("rewards", 1), ("forward", 1), ("save", 1), ("forward", 2), ("save", 2)]
#: Phases in which a run with another engine is killed: while it generates, and between two updates
#: on a rollout.
PHASES_OF_ENGINE = [("rollout", 1), ("save", 2)]


@pytest.mark.parametrize(
    ("engine", "phase", "iterations"),
    [
        *[("generate", *each) for each in PHASES],
        *[("continuous_batching", *each) for each in PHASES_OF_ENGINE],
    ],
)
@pytest.mark.parametrize("mode", ["single", "ddp", "zero3"])
def test_killed_run_continues_with_the_same_bits(
    mode: str, engine: str, phase: str, iterations: int, tmp_path: Path
) -> None:
    write_inputs(tmp_path, SLOW)
    (tmp_path / "killer.py").write_text(KILLER)
    ranks = 1 if mode == "single" else 2
    step = 3 if iterations == 2 else 2  # with two updates on a rollout, the second one
    args = (
        f"parallel.mode={mode}",
        f"parallel.num_gpus={ranks}",
        "per_device_train_batch_size=4",
        f"grpo.engine={engine}",
        f"grpo.num_iterations={iterations}",
        "grpo.beta=0.04",
        "max_steps=5",
        "train_args.save_steps=1",
        f"callbacks=['{tmp_path / 'killer.py'}:Killer']",
        f"task_args={{phase: {phase}, step: {step}, mark: '{tmp_path / 'mark'}'}}",
    )
    train_on_rollouts(tmp_path, "killed", *args)
    assert (tmp_path / "mark").exists()
    assert events(tmp_path / "killed", "resume")
    train_on_rollouts(tmp_path, "undisturbed", *args)
    assert rollouts(tmp_path / "killed") == rollouts(tmp_path / "undisturbed")
    files = [tmp_path / name / "model/model.safetensors" for name in ("killed", "undisturbed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    last = {
        name: {step["step"]: step["loss"] for step in events(tmp_path / name, "step")}
        for name in ("killed", "undisturbed")
    }
    assert last["killed"] == last["undisturbed"]


@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_failing_reward_ends_the_run_with_its_step_and_row(mode: str, tmp_path: Path) -> None:
    write_inputs(
        tmp_path,
        "def vowels(completions, step, **columns):\n"
        "    return [1.0 if step < 3 else float('nan')] * len(completions)\n",
    )
    args = (f"parallel.mode={mode}", "max_steps=4", "train_args.save_steps=1")
    process = train_on_rollouts(tmp_path, "run", *args, expect=1)
    assert "own_rewards.py:vowels` returned nan at step 3" in process.stderr
    assert "prompts.jsonl" in process.stderr
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())][-1] == (
        "step-00000002"
    )
