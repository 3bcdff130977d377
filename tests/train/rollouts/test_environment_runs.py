"""Completions of several turns that call the tools of an environment: their tokens, their loss, the
number of ranks, records, replays and failures."""

from pathlib import Path
from typing import Any

import pytest
from commands import events
from environment_runs import GAME, play, teach_calls, write_game
from rollout_runs import rollouts
from safetensors.numpy import load_file

from paceline.data.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

QUESTION_ROW = '{{"prompt": [{{"role": "user", "content": "Play."}}], "secret": {}}}\n'
SINGLE = ("parallel.mode=single", "per_device_train_batch_size=4")
#: A game with a random secret.
RANDOM_GAME = GAME.replace("int(secret), []", "random.randrange(10), []").replace(
    "class Game:", "import random\n\nclass Game:"
)

#: A callback that makes a rank believe that the gathered weights do not fit in its memory.
LITTLE_MEMORY = """
import paceline
from paceline.train.rollouts.engines import base

class LittleMemory(paceline.Callback):
    def on_train_begin(self, info, state):
        base.free_bytes = lambda comm: 1.0
"""


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that guesses digits."""
    return teach_calls(tmp_path_factory.mktemp("player"))


def tokens(lines: list[dict[str, Any]]) -> list[Any]:
    return [
        (each["prompt"], each["index"], each["completion_ids"], each["loss_mask"]) for each in lines
    ]


def test_results_of_tools_carry_no_loss(player: Path, tmp_path: Path) -> None:
    write_game(tmp_path)
    play(tmp_path, player, "run", *SINGLE, "max_steps=1")
    (lines,) = rollouts(tmp_path / "run")
    decode = load_tokenizer(player).decode
    assert sum(line["tool_calls"] for line in lines) >= 4
    for line in lines:
        drawn = [bool(each) for each in line["loss_mask"]]
        pairs = list(zip(line["completion_ids"], drawn, strict=True))
        inserted = decode([token for token, is_drawn in pairs if not is_drawn])
        assert inserted.count("<|im_start|>tool\n") == line["tool_calls"] or line["truncated"]
        written = decode([token for token, is_drawn in pairs if is_drawn])
        assert "<|im_start|>" not in written or line["truncated"]
        assert [logp != 0.0 for logp in line["logprobs"]] == drawn
        guessed = line["rewards"]["environment"] == 1.0
        assert guessed == ("right" in inserted)
        assert (line["rewards"]["near"] == -1.0) == (line["tool_calls"] == 0)
    (step,) = events(tmp_path / "run", "step")
    assert step["tool_calls"] == sum(line["tool_calls"] for line in lines) / 8
    assert step["tool_failures"] == 0.0
    # Both are of the drawn tokens only: a token of a tool's result is improbable.
    assert step["logprob_diff"] < 1e-4
    assert step["entropy"] < 1.0
    assert step["completion_length"] == sum(len(line["loss_mask"]) for line in lines) / 8


@pytest.mark.soak
def test_rollouts_do_not_depend_on_the_ranks_and_can_be_replayed(
    player: Path, tmp_path: Path
) -> None:
    write_game(tmp_path, RANDOM_GAME)
    args = ("grpo.num_iterations=2", "grpo.beta=0.04", "max_steps=2", "train_args.optim=sgd")
    play(tmp_path, player, "one", *SINGLE, *args)
    expected = rollouts(tmp_path / "one")
    assert len({line["reward"] for line in expected[0]}) > 1
    for ranks in (2, 4):
        mode = ("parallel.mode=ddp", f"parallel.num_gpus={ranks}", "per_device_train_batch_size=2")
        play(tmp_path, player, f"ranks-{ranks}", *mode, *args, "train_args.save_steps=0")
        assert tokens(rollouts(tmp_path / f"ranks-{ranks}")[0]) == tokens(expected[0])
    # The file of the environment is not executed: a replay starts none.
    (tmp_path / "game.py").write_text(RANDOM_GAME.replace("int(secret)", "1 / 0"))
    for mode in ("zero3", "ddp"):
        play(
            tmp_path,
            player,
            f"replay-{mode}",
            *(*args, f"parallel.mode={mode}", "parallel.num_gpus=2"),
            f"grpo.replay={tmp_path / 'one/rollouts'}",
            "per_device_train_batch_size=2",
        )
        steps, others = (events(tmp_path / name, "step") for name in ("one", f"replay-{mode}"))
        for ours, theirs in zip(others, steps, strict=True):
            for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio", "logprob_diff"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
            for name in ("tool_calls", "tool_failures", "completion_length", "reward"):
                assert ours[name] == theirs[name]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_run_continues_with_the_same_bits(ranks: int, player: Path, tmp_path: Path) -> None:
    write_game(tmp_path, RANDOM_GAME)
    mode = ("parallel.mode=ddp", f"parallel.num_gpus={ranks}")
    args = (
        *(mode if ranks > 1 else SINGLE),
        *("grpo.num_iterations=2", "train_args.save_steps=1", "per_device_train_batch_size=4"),
        f"val_dataset={tmp_path / 'prompts.jsonl'}",
    )
    play(tmp_path, player, "parts", *args, "max_steps=3")  # between two updates on a rollout
    play(tmp_path, player, "parts", *args, "max_steps=4", "--allow-config-change")
    play(tmp_path, player, "whole", *args, "max_steps=4")
    assert rollouts(tmp_path / "parts") == rollouts(tmp_path / "whole")
    one, other = (
        load_file(tmp_path / each / "model/model.safetensors") for each in ("parts", "whole")
    )
    assert all((other[name] == value).all() for name, value in one.items())
    evaluation = events(tmp_path / "whole", "eval")[-1]["metrics"]
    assert evaluation["tool_calls"] > 0
    assert 0 <= evaluation["tool_failures"] < 1


@pytest.mark.soak
def test_ranks_whose_forward_passes_are_collectives_take_part_in_all_turns(
    player: Path, tmp_path: Path
) -> None:
    write_game(tmp_path, RANDOM_GAME)
    (tmp_path / "few.jsonl").write_text("".join(map(QUESTION_ROW.format, range(3))))
    shared = ("max_steps=1", f"val_dataset={tmp_path / 'few.jsonl'}")
    play(tmp_path, player, "one", *SINGLE, *shared)
    (tmp_path / "little_memory.py").write_text(LITTLE_MEMORY)
    args = ("parallel.mode=zero3", "parallel.num_gpus=2", *shared)
    callback = f"callbacks=['{tmp_path / 'little_memory.py'}:LittleMemory']"
    process = play(tmp_path, player, "layers", *args, callback)
    assert "gathered layer by layer" in process.stderr + process.stdout
    assert tokens(rollouts(tmp_path / "layers")[0]) == tokens(rollouts(tmp_path / "one")[0])
    one, layers = (events(tmp_path / name, "eval")[-1]["metrics"] for name in ("one", "layers"))
    assert layers == pytest.approx(one, abs=1e-6)


@pytest.mark.soak
def test_observations_turns_and_lengths_are_kept(player: Path, tmp_path: Path) -> None:
    source = GAME.replace("int(secret), []", "int(secret), []\n        return f' No {secret}.'")
    write_game(tmp_path, source)
    args = (*SINGLE, "max_steps=1", "grpo.max_turns=2", "grpo.max_completion_length=45")
    play(tmp_path, player, "run", *args)
    decode = load_tokenizer(player).decode
    for line in rollouts(tmp_path / "run")[0]:
        assert f"Play. No {line['prompt']}." in decode(line["prompt_ids"])
        assert line["prompt_text"] == decode(line["prompt_ids"])
        assert line["tool_calls"] <= 1
        assert len(line["completion_ids"]) <= 45


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_failing_environment_ends_the_run(ranks: int, player: Path, tmp_path: Path) -> None:
    write_game(tmp_path, GAME.replace("int(secret), []", "10 // (int(secret) - 3), []"))
    mode = ("parallel.mode=ddp", f"parallel.num_gpus={ranks}") if ranks > 1 else SINGLE
    process = play(tmp_path, player, "run", *mode, "max_steps=8", expect=1)
    for part in ("[environment-failed]", "game.py:Game", "ZeroDivisionError", "prompts.jsonl"):
        assert part in process.stderr


@pytest.mark.soak
def test_reset_must_accept_each_row(player: Path, tmp_path: Path) -> None:
    write_game(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "Play.", "number": 3}\n')
    process = play(tmp_path, player, "run", "--dry-run", "max_steps=2", expect=2)
    assert "[reset-signature]" in process.stderr
    assert "'secret'" in process.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("grpo.environment=./missing.py:Game",), "missing-user-file"),
        (("grpo.environment=Game",), "environment-without-class"),
        (("grpo.environment=null",), "reward-without-environment"),
        (("grpo.environment=null", "rewards={name: exact}", "grpo.max_turns=2"),
         "turns-without-environment"),
        (("chat_template=vicuna",), "template-without-environment"),
    ],
)  # fmt: skip
def test_refused_before_anything_starts(
    args: tuple[str, ...], code: str, player: Path, tmp_path: Path
) -> None:
    write_game(tmp_path)
    process = play(tmp_path, player, "run", "--dry-run", "max_steps=2", *args, expect=2)
    assert f"[{code}]" in process.stderr
    assert not (tmp_path / "run").exists()
