"""The same training on recorded completions with TRL and with Paceline."""

import json
import math
import random
from pathlib import Path
from typing import Any

from commands import events, run
from trl_runs import STEPS

PROMPTS, GENERATIONS = 2, 4
BATCH = PROMPTS * GENERATIONS
LEARNING_RATE = 0.3
NAMES = ("first", "second")


def write_rewards(folder: Path) -> Path:
    """Write functions that are never called: the rewards are recorded."""
    lines = [f"def {name}(completions, **columns):\n    raise AssertionError\n" for name in NAMES]
    path = folder / "rewards.py"
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def loss_mask(numbers: random.Random, length: int) -> list[int]:
    """Return whether each of some tokens carries loss; the first one does."""
    return [int(not at or numbers.random() < 0.6) for at in range(length)]


def record_rollouts(
    folder: Path,
    eos: int,
    num_iterations: int,
    with_nulls: bool,
    noise: float = 0.0,
    with_masks: bool = False,
) -> list[Any]:
    """Write rollouts with random completions and rewards; return the records of all of them.

    Args:
        with_nulls: whether some rewards are missing.
        noise: largest difference between the recorded log-probabilities and those of a model that
            prefers no token.
        with_masks: whether some tokens carry no loss, as the results of tools.
    """
    around = -math.log(8192) if noise else -5.0
    numbers = random.Random(0)
    folder.mkdir()
    records = []
    for rollout in range(STEPS // num_iterations):
        lines = []
        for prompt in range(rollout * PROMPTS, (rollout + 1) * PROMPTS):
            ids = [numbers.randrange(100, 400) for _ in range(numbers.randint(2, 6))]
            for index in range(GENERATIONS):
                length = numbers.randint(2, 9)
                is_truncated = length == 9
                completion = [numbers.randrange(100, 400) for _ in range(length)]
                if not is_truncated:
                    completion[-1] = eos
                rewards = {name: round(numbers.random(), 3) for name in NAMES}
                if with_nulls and index == 1:
                    rewards = dict.fromkeys(NAMES) if prompt % 2 else {**rewards, "first": None}
                lines.append(
                    {
                        "prompt": prompt,
                        "index": index,
                        "prompt_ids": ids,
                        "completion_ids": completion,
                        "logprobs": [
                            around + numbers.uniform(-noise, noise) if noise else around
                            for _ in range(length)
                        ],
                        "rewards": rewards,
                        "truncated": is_truncated,
                        **({"loss_mask": loss_mask(numbers, length)} if with_masks else {}),
                    }
                )
        name = f"step-{rollout * num_iterations + 1:08d}.jsonl"
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        records += lines
    return records


def trl_steps(
    task: str,
    model: Path,
    records: list[Any],
    folder: Path,
    correction: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[dict[str, float]], list[float]]:
    """Train with TRL in this process; return the figures of each step, and the advantages.

    Args:
        correction: settings of TRL's correction for the probabilities of vLLM; None for none.
    """
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    by_prompt: dict[str, list[Any]] = {}
    for record in records:
        by_prompt.setdefault(str(record["prompt"]), []).append(record)
    advantages: list[float] = []

    def chosen(prompts: list[str]) -> list[Any]:
        return [by_prompt[prompt][number % GENERATIONS] for number, prompt in enumerate(prompts)]

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = chosen(prompts)
        names = {name: name for name in ("prompt_ids", "completion_ids", "logprobs")}
        if "loss_mask" in found[0]:
            names["env_mask"] = "loss_mask"
        return {name: [each[key] for each in found] for name, key in names.items()}

    def reward(name: str) -> Any:
        def function(prompts: list[str], **columns: Any) -> list[float | None]:
            return [each["rewards"][name] for each in chosen(prompts)]

        function.__name__ = name
        return function

    class Group(trl.GRPOTrainer):  # type: ignore[misc]
        # TRL would give vLLM the weights of each step; the completions are recorded.
        _last_loaded_step = property(lambda self: self.state.global_step, lambda self, step: None)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            outputs = super()._generate_and_score_completions(inputs)
            advantages.extend(outputs["advantages"].tolist())
            return outputs

    class LeaveOneOut(trl.RLOOTrainer):  # type: ignore[misc]
        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            self.asked = prompts
            return [each["prompt_ids"] for each in chosen(prompts)], None, {}

        def _generate_single_turn(self, *args: Any, **keywords: Any) -> Any:
            found = chosen(self.asked)
            return [each["completion_ids"] for each in found]

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            outputs = super()._generate_and_score_completions(inputs)
            advantages.extend(outputs["advantages"].tolist())
            return outputs

    is_group = task == "grpo"
    config_class = trl.GRPOConfig if is_group else trl.RLOOConfig
    arguments = config_class(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        num_generations=GENERATIONS,
        max_completion_length=9,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **settings,
    )
    trainer_class = Group if is_group else LeaveOneOut
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=[reward(name) for name in NAMES],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in by_prompt]),
        processing_class=AutoTokenizer.from_pretrained(model),
        **({"rollout_func": rollout_func} if is_group else {}),
    )
    if correction is not None:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        for name, value in correction.items():
            setattr(trainer, f"vllm_importance_sampling_{name}", value)
    trainer.train()
    return [step for step in trainer.state.log_history if "loss" in step], advantages


def paceline_steps(
    task: str, model: Path, replay: Path, folder: Path, *args: str
) -> tuple[list[dict[str, Any]], list[float]]:
    """Train with Paceline in another process; return the figures of each step, and the
    advantages."""
    data, rewards = folder.with_suffix(".jsonl"), write_rewards(folder.parent)
    rows = [{"prompt": str(number)} for number in range(STEPS * PROMPTS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    functions = ", ".join(f"{{function: '{rewards}:{name}'}}" for name in NAMES)
    run(
        f"model={model}",
        f"task={task}",
        f"dataset={data}",
        f"output_dir={folder}",
        f"rewards=[{functions}]",
        f"grpo.replay={replay}",
        f"grpo.num_generations={GENERATIONS}",
        "grpo.max_completion_length=9",
        "parallel.device=cpu",
        f"max_steps={STEPS}",
        f"learning_rate={LEARNING_RATE}",
        "lr_scheduler_type=constant",
        "train_args.optim=sgd",
        "train_args.momentum=0",
        "train_args.shuffle=false",
        "train_args.precision=32",
        "logging_steps=1",
        "max_length=128",
        *args,
        verb="train",
    )
    lines = [
        json.loads(line)
        for path in sorted((folder / "rollouts").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return events(folder, "step"), [line["advantage"] for line in lines]
