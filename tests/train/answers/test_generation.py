"""Answers generated during training do not depend on batches, ranks or strategies."""

from pathlib import Path

import pytest
import torch
from commands import events, train

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.timing.progress import PROGRESS
from paceline.models import attention
from paceline.strategies.ddp.strategy import DDPStrategy
from paceline.tasks.language import LanguageTask
from paceline.train.answers.generation import AnswerGenerator
from paceline.train.answers.metrics import answer_metrics
from paceline.train.precision import Precision

FINGERPRINT = """
import hashlib

def fingerprint(answers, references):
    # numbers that depend on every character
    return {
        name: int(hashlib.sha256("\\n".join(texts).encode()).hexdigest()[:8], 16)
        for name, texts in (("answers", answers), ("references", references))
    }
"""


def test_batched_answers_match_single_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = Config(
        model="builtin:qwen2-micro",
        dataset="builtin:python-docs#12",
        evaluation={"max_new_tokens": 8},
        train_args={"max_length": 96},
    )
    world = Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu"))
    task = LanguageTask(config)
    task.prepared = task.prepare()
    rows, _ = task.build_datasets()
    torch.manual_seed(0)
    model = task.build_model()
    task.setup(model.train())
    strategy = DDPStrategy(config, world)
    generator = AnswerGenerator(
        task, strategy.setup(model), strategy, Precision(config.train_args, world), config, PROGRESS
    )
    prompts = [generator.last_prompt(rows, index) for index in range(len(rows))]
    assert all(prompt is not None for prompt in prompts)
    assert len({len(prompt.ids) for prompt in prompts if prompt}) > 1  # rows need padding
    single = generator.generate([prompt for prompt in prompts if prompt])
    batched = generator.generate([prompt for prompt in prompts if prompt], batch_size=5)
    assert single.error is None
    assert batched.ids == single.ids
    assert model.training
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    for number, prompt in enumerate(prompts[:3]):
        assert prompt is not None
        settings.eos_token_id = [token for token in prompt.end_ids if token is not None]
        with torch.no_grad(), attention.without_packing(model):
            output = model.eval().generate(torch.tensor([prompt.ids]), generation_config=settings)
        assert single.ids[number] == output[0, len(prompt.ids) :].tolist()
    metrics, num_rows = answer_metrics(generator, rows, ["exact_match", "f1"], 4)
    assert num_rows == len(rows)
    assert metrics.keys() == {"exact_match", "f1"}


def test_prompt_of_a_chat_ends_before_its_last_answer() -> None:
    import numpy as np

    generator = object.__new__(AnswerGenerator)
    vars(generator)["task"] = None
    ids, has_loss = np.arange(8), np.array([0, 0, 1, 1, 0, 0, 1, 0], dtype=bool)
    vars(generator)["tokenizer"] = type("T", (), {"eos_token_id": 7, "special_ids": frozenset()})
    vars(generator)["_generation_config"] = None
    prompt = generator.last_prompt([{"input_ids": ids, "labels_mask": has_loss}], 0)
    assert prompt is not None
    assert (prompt.ids, prompt.reference) == ([0, 1, 2, 3, 4, 5], [6])
    first = generator.first_prompt([{"input_ids": ids, "labels_mask": has_loss}], 0)
    assert first is not None
    assert (first.ids, first.reference) == ([0, 1], [2, 3])
    assert generator.last_prompt([{"input_ids": ids, "labels_mask": has_loss | True}], 0) is None


@pytest.mark.soak
def test_metrics_do_not_depend_on_the_strategy(tmp_path: Path) -> None:
    """With a learning rate of 0 all strategies evaluate the same weights."""
    (tmp_path / "own_metrics.py").write_text(FINGERPRINT)
    names = f"token_accuracy,perplexity,f1,rouge,{tmp_path}/own_metrics.py:fingerprint"
    results = {}
    for name, args in {
        "single": ("parallel.mode=single", "parallel.num_gpus=1"),
        "ddp": ("parallel.mode=ddp", "parallel.num_gpus=3"),
        "zero3": ("parallel.mode=zero3", "parallel.num_gpus=2"),
        "tensor": ("parallel.mode=tensor", "parallel.num_gpus=2"),
        "hybrid": ("parallel.shard=2", "parallel.tensor=2", "parallel.num_gpus=4"),
        "diloco": ("parallel.mode=diloco", "parallel.num_gpus=2", "local_sgd.sync_every=1"),
        "chunked": ("parallel.mode=ddp", "parallel.num_gpus=2", "train_args.loss_chunk_size=16"),
    }.items():
        folder = tmp_path / name
        train(
            folder,
            *args,
            "train_args.max_steps=1",
            "train_args.learning_rate=0",
            "train_args.weight_decay=0",
            "split_dataset_ratio=0.1",
            "evaluation.max_new_tokens=10",
            "evaluation.metric_rows=11",
            "evaluation.num_samples=0",
            f"evaluation.metrics={names}",
        )
        (results[name],) = events(folder, "eval")
    expected = results.pop("single")
    assert expected["answered_rows"] == 11
    assert expected["metrics"]["token_accuracy"] > 0
    for name, result in results.items():
        losses = ("perplexity",)
        for key, value in expected["metrics"].items():
            tolerance = 1e-5 if key in losses else 0
            assert result["metrics"][key] == pytest.approx(value, rel=tolerance), (name, key)


@pytest.mark.soak
def test_generated_metrics_are_refused_with_a_pipeline(tmp_path: Path) -> None:
    args = ("parallel.mode=pipeline", "parallel.num_gpus=2", "split_dataset_ratio=0.1")
    result = train(tmp_path / "run", *args, "evaluation.metrics=bleu", expect=2)
    assert "stages of the pipeline" in result.stderr
    assert not (tmp_path / "run").exists()


FAILING_TASK = """
import torch.distributed as dist

from paceline.tasks.language import LanguageTask


class FailingTask(LanguageTask):
    def __init__(self, config):
        super().__init__(config)
        self.failing = config.task_args["failing"]

    def build_model(self):
        model = super().build_model()

        def fail(module, args, kwargs):
            if kwargs.get("use_cache") and dist.get_rank() in self.failing:
                raise ValueError("no cache here")

        model.model.layers[1].register_forward_pre_hook(fail, with_kwargs=True)
        return model
"""


@pytest.mark.soak
@pytest.mark.parametrize("failing", ["[1]", "[0, 1]"])
def test_rank_that_fails_to_generate_ends_the_run_unless_all_fail(
    failing: str, tmp_path: Path
) -> None:
    """The others wait for that rank in a collective."""
    (tmp_path / "failing_task.py").write_text(FAILING_TASK)
    result = train(
        tmp_path / "run",
        f"task={tmp_path}/failing_task.py:FailingTask",
        f"task_args.failing={failing}",
        "parallel.mode=zero3",
        "parallel.num_gpus=2",
        "train_args.max_steps=2",
        "train_args.eval_steps=1",
        "split_dataset_ratio=0.1",
        "recovery.max_restarts=0",
        expect=int(failing == "[1]"),
    )
    if failing == "[1]":
        assert "rank 1 failed to generate answers at an evaluation" in result.stderr
        assert "no cache here" in result.stderr
        assert "evaluation.num_samples: 0" in result.stderr
    else:
        assert "the model failed to generate (ValueError: no cache here)" in result.stderr
        assert len(events(tmp_path / "run", "eval")) == 2
