"""The same preference training with TRL and with Paceline: a tiny random model with a tokenizer,
rows, and a run of each, as the figures of its steps."""

import json
import random
from pathlib import Path
from typing import Any

from commands import events, run

STEPS, BATCH, LEARNING_RATE = 10, 4, 1e-3
#: Answers end in the end-of-text token: ORPOTrainer and CPOTrainer would append it to others.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ ' ' + message.content }}"
    "{{ eos_token if message.role == 'assistant' else ' ' }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)
VOCABULARY = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "red", "blue")


def make_model(folder: Path, kind: str, num_labels: int | None = None) -> Path:
    """Save a tiny random model of ``kind`` (``llama`` or ``gpt2``) with a tokenizer."""
    import torch
    from families import FAMILIES
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    from paceline.models.builtin import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:qwen2-micro"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model_type, sizes = FAMILIES[kind]
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(model_type, **{**sizes, "bos_token_id": None, **tokens})
    torch.manual_seed(0)
    if num_labels is None:
        model = AutoModelForCausalLM.from_config(config)
    else:
        config.num_labels = num_labels
        model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def make_adapter(model: Path, folder: Path, has_head: bool = False) -> Path:
    """Save an adapter that already changes the answers of a causal language model, or the rewards
    of a classifier."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(1)
    auto_class: Any = AutoModelForSequenceClassification if has_head else AutoModelForCausalLM
    settings = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="SEQ_CLS" if has_head else None,
    )
    adapted = get_peft_model(auto_class.from_pretrained(model), settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter += 0.02 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    return folder


def _phrase(numbers: random.Random) -> str:
    return " ".join(numbers.choices(VOCABULARY, k=numbers.randint(2, 10)))


def make_rows(task: str) -> list[dict[str, Any]]:
    """Return rows with conversational prompts, enough for one epoch; for ``margins`` pairs that
    have one each."""
    numbers = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(STEPS * BATCH):
        prompt = [{"role": "user", "content": f"What is {_phrase(numbers)}?"}]
        answers = [[{"role": "assistant", "content": _phrase(numbers)}] for _ in range(2)]
        if task == "kto":
            rows.append({"prompt": prompt, "completion": answers[0], "label": number % 3 > 0})
        else:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        if task == "margins":
            rows[-1]["margin"] = number % 4 / 4
    return rows


def trl_steps(
    task: str,
    model: Path,
    rows: list[dict[str, Any]],
    folder: Path,
    adapter: Path | None = None,
    **settings: Any,
) -> list[dict[str, float]]:
    """Train with TRL in this process; return the figures of each step."""
    import trl
    from datasets import Dataset
    from peft import PeftModel
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainers: dict[str, tuple[Any, Any]] = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
        "simpo": (CPOTrainer, CPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }
    trainer_class, config_class = trainers[task]
    if task == "simpo":
        settings = {"loss_type": "simpo", "cpo_alpha": 0.0, **settings}
    kind = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    trained = kind.from_pretrained(model)
    if adapter is not None:
        trained = PeftModel.from_pretrained(trained, adapter, is_trainable=True)
    arguments = config_class(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=128,
        **settings,
    )
    trainer = trainer_class(
        model=trained,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return [step for step in trainer.state.log_history if "loss" in step]


def paceline_steps(
    task: str,
    model: Path,
    rows: list[dict[str, Any]],
    folder: Path,
    adapter: Path | None = None,
    *args: str,
    **settings: Any,
) -> list[dict[str, float]]:
    """Train with Paceline in another process; return the figures of each step."""
    data = folder.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lora = () if adapter is None else ("lora.enable=true", f"lora.adapter={adapter}")
    run(
        f"model={model}",
        f"task={task}",
        f"dataset={data}",
        f"output_dir={folder}",
        "parallel.device=cpu",
        "parallel.num_gpus=1",
        f"max_steps={STEPS}",
        f"per_device_train_batch_size={BATCH}",
        f"learning_rate={LEARNING_RATE}",
        "lr_scheduler_type=constant",
        "train_args.shuffle=false",
        "train_args.precision=32",
        "logging_steps=1",
        "max_length=128",
        *(f"preference.{name}={value}" for name, value in settings.items()),
        *lora,
        *args,
        verb="train",
    )
    return [
        {"loss": step["loss"], "grad_norm": step["grad_norm"], **step["metrics"]}
        for step in events(folder, "step")
    ]
