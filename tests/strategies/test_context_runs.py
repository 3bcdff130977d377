"""Runs with context parallelism have the losses of one rank, with every method and setting."""

import json
from pathlib import Path

import pytest
from commands import losses, report, run
from families import make_model
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.models.context.choice import method_of_run
from paceline.parallel.registry import check_strategy

PAIRS = Path(__file__).parents[2] / "examples" / "dpo-pairs.jsonl"
BASE = (
    "model=builtin:qwen2-micro",
    "parallel.device=cpu",
    "train_args.precision=32",
    "max_length=96",
    "learning_rate=0.003",
    "logging_steps=1",
)
TEXTS = ("dataset=builtin:python-docs#64",)
EVALUATED = ("val_dataset=builtin:python-docs#6", "evaluation.metrics=[token_accuracy,rouge]")
MODES = "context4,data2-context2,shard2-context2,context2-tensor2,context2-pipeline2"


@pytest.mark.soak
@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_verify_certifies_each_method_with_each_axis(method: str, tmp_path: Path) -> None:
    args = [*BASE[:2], *TEXTS, "per_device_train_batch_size=5", "max_length=64"]
    args += [f"parallel.context_method={method}", f"output_dir={tmp_path}", "--steps", "4"]
    args += ["--world-size", "4", "--modes", MODES, "--json"]
    result = json.loads(run(*args, verb="verify", timeout_s=600).stdout)
    assert result["ok"], result
    assert all(mode["loss_rel_diff"] < 1e-6 for mode in result["modes"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("context=2", (*TEXTS, *EVALUATED, "per_device_train_batch_size=4")),
        (
            "mode=zero3 parallel.context=2",
            (*TEXTS, *EVALUATED, "per_device_train_batch_size=2", "lora.enable=true",
             "lora.dropout=0", "train_args.gradient_checkpointing=full"),
        ),
        (
            "mode=zero2 parallel.context=2",
            (*TEXTS, "per_device_train_batch_size=4", "train_args.neftune_noise_alpha=5",
             "train_args.label_smoothing_factor=0.1", "train_args.loss_chunk_size=16"),
        ),
        (
            "mode=ddp parallel.context=2",
            (*TEXTS, "per_device_train_batch_size=1", "train_args.packing_strategy=bfd",
             "train_args.gradient_accumulation_steps=2", "train_args.ema_decay=0.9",
             "val_dataset=builtin:python-docs#6"),
        ),
        (
            "mode=context",
            ("task=pretrain", *TEXTS, "per_device_train_batch_size=2",
             "train_args.packing_strategy=wrapped", "train_args.torch_compile=true"),
        ),
        ("mode=context", (*TEXTS, "streaming=true", "per_device_train_batch_size=4")),
        # Rows of one short sample, so that some ranks have no tokens.
        (
            "context=4",
            ("dataset={short}", "format=alpaca", "per_device_train_batch_size=1",
             "train_args.train_on_inputs=true"),
        ),
        *(
            (
                "mode=context",
                (f"task={task}", f"dataset={PAIRS}", "per_device_train_batch_size=2",
                 "train_args.gradient_accumulation_steps=2", "split_dataset_ratio=0.1",
                 "train_args.optim=sgd"),
            )
            for task in ("dpo", "orpo", "simpo")
        ),
        (
            "mode=context",
            ("task=kto", "dataset={marked}", "per_device_train_batch_size=2",
             "train_args.gradient_accumulation_steps=2", "train_args.optim=sgd"),
        ),
    ],
)  # fmt: skip
def test_losses_are_those_of_one_rank(
    layout: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    files = written_files(tmp_path)
    args = [*BASE, "max_steps=4", *(setting.format(**files) for setting in settings)]
    ranks = "4" if layout == "context=4" else "2"
    first, *others = layout.split()
    run(*args, "parallel.mode=single", f"output_dir={tmp_path / 'single'}")
    run(
        *args,
        f"parallel.{first}",
        *others,
        f"parallel.num_gpus={ranks}",
        f"output_dir={tmp_path / 'divided'}",
    )
    assert losses(tmp_path / "divided") == pytest.approx(losses(tmp_path / "single"), rel=1e-6)
    single, divided = report(tmp_path / "single"), report(tmp_path / "divided")
    assert divided["context"]["size"] == int(ranks)
    for figure in ("samples_seen", "train_tokens", "label_tokens", "steps"):
        assert divided[figure] == single[figure], figure
    if single["final_eval_loss"] is not None:
        assert divided["final_eval_loss"] == pytest.approx(single["final_eval_loss"], rel=2e-6)
    metrics = single["final_eval_metrics"] or {}
    for name, value in metrics.items():
        assert divided["final_eval_metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6)


def written_files(folder: Path) -> dict[str, str]:
    """Write datasets of short samples and of marked answers. Return their paths by name."""
    short = [{"instruction": "a", "output": "b"} for _ in range(32)]
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    marked = [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if number % 2 else "rejected"],
            "label": bool(number % 2),
        }
        for number, row in enumerate(rows)
    ]
    files = {}
    for name, each in (("short", short), ("marked", marked)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in each))
        files[name] = str(path)
    return files


@pytest.mark.soak
def test_checkpoints_move_between_divisions(tmp_path: Path) -> None:
    args = [*BASE, *TEXTS, "train_args.global_batch_size=4", "per_device_train_batch_size=2"]
    args.append("train_args.lr_scheduler_type=constant")
    folder = tmp_path / "run"
    layouts = ("mode=context parallel.num_gpus=2", "mode=zero3 parallel.num_gpus=2",
               "mode=zero3 parallel.context=2 parallel.num_gpus=4", "mode=single")  # fmt: skip
    for step, layout in enumerate(layouts, start=1):
        first, *others = layout.split()
        run(
            *args,
            f"parallel.{first}",
            *others,
            f"output_dir={folder}",
            f"max_steps={step}",
            "--allow-config-change",
        )
    run(
        *args,
        "parallel.mode=single",
        "max_steps=4",
        f"output_dir={tmp_path / 'whole'}",
    )
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=2e-6)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "passes a state from each token"),
        ("recurrent_gemma", "mixes samples"),
        ("stablelm", "mixes samples"),
    ],
)
def test_ranks_refuse_models_that_need_whole_rows(family: str, reason: str, tmp_path: Path) -> None:
    # The check before the ranks start is ended when the data is read, as it is here.
    model = make_model(family, tmp_path)
    args = [f"model={model}", *BASE[1:], *TEXTS, "max_steps=1", "parallel.mode=context"]
    result = run(*args, "parallel.num_gpus=2", f"output_dir={tmp_path / 'run'}", expect=2)
    assert "[context-model]" in result.stderr
    assert reason in result.stderr


def config_with(**changes: object) -> Config:
    content = {"model": "builtin:qwen2-micro", "dataset": "d", "task": "sft", **changes}
    return Config.model_validate(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "recommend"},
        {"task": "reward"},
        {"train_args": {"packing": False}},
        {"evaluation": {"mode": "rank0"}},
        {"compression": {"method": "bf16"}},
        {"parallel": {"all_reduce_algorithm": "ring"}},
        {"parallel": {"balance": "speed"}},
    ],
)
def test_unsupported_settings_are_refused(changes: dict) -> None:
    with raises_error(ConfigError, code="not-supported"):
        check_strategy("ddp", config_with(**changes), ParallelDims(data=2, context=2))


@pytest.mark.parametrize(
    ("fields", "method", "code"),
    [
        ({"attn_logit_softcapping": 50.0}, "ring", "context-method-not-possible"),
        ({"attention_dropout": 0.1}, "ulysses", "context-method-not-possible"),
        ({"num_attention_heads": 3}, "ulysses", "context-method-not-possible"),
        ({"attention_chunk_size": 8}, "auto", "context-not-possible"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
             "max_position_embeddings": 64},
            "auto",
            "context-not-possible",
        ),
    ],
)  # fmt: skip
def test_models_that_do_not_allow_it_are_refused(
    fields: dict, method: str, code: str, tmp_path: Path
) -> None:
    content = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 48,
               "num_hidden_layers": 2, "vocab_size": 32, **fields}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = config_with(
        model=str(tmp_path),
        parallel={"context_method": method},
        train_args={"max_length": 128},
    )
    with raises_error(ConfigError, code=code):
        method_of_run(config, ParallelDims(context=2), "cpu")


def test_ring_is_refused_if_torch_has_no_kernel_for_blocks() -> None:
    config = config_with(
        parallel={"context_method": "ring"}, train_args={"precision": "bf16-mixed"}
    )
    dims = ParallelDims(context=2)
    assert method_of_run(config, dims, "cuda").name == "ring"
    with raises_error(ConfigError, code="context-method-not-possible"):
        method_of_run(config, dims, "cuda", has_varlen=False)
