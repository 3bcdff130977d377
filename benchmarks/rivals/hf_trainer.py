"""LoRA fine-tuning with the Trainer of transformers and with peft.

torchrun --standalone --nproc-per-node 2 hf_trainer.py SPEC.json
"""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from shared import Record, close, encode, finish, model_dtype, read_chats, read_spec
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class StepRecorder(TrainerCallback):
    """Records the end of each step and the tokens of this rank's share of the global batch."""

    def __init__(
        self, record: Record, samples: list[Any], size: int, rank: int, world_size: int
    ) -> None:
        self.record, self.samples, self.size, self.rank, self.world_size = (
            record,
            samples,
            size,
            rank,
            world_size,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        start = ((state.global_step - 1) * self.world_size + self.rank) * self.size
        self.record.step_done(self.samples[start : start + self.size])


def main() -> None:
    spec = read_spec()
    is_cpu = spec["device"] == "cpu"
    arguments = TrainingArguments(
        output_dir=spec["scratch"],
        per_device_train_batch_size=spec["per_device_batch_size"],
        max_steps=len(spec["batches"]),
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=spec["max_grad_norm"],
        seed=spec["seed"],
        use_cpu=is_cpu,
        bf16=not is_cpu,
        ddp_backend="gloo" if is_cpu else "nccl",
        ddp_find_unused_parameters=False,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=not is_cpu,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(spec["seed"])

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    chats = read_chats(spec["train_file"])
    samples = encode(
        tokenizer,
        [chats[index] for batch in spec["batches"] for index in batch],
        spec["max_length"],
    )

    base = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=model_dtype(arguments.device))
    lora = LoraConfig(
        r=spec["lora_rank"],
        lora_alpha=spec["lora_alpha"],
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
    record = Record()
    callback = StepRecorder(
        record,
        samples,
        spec["per_device_batch_size"],
        arguments.process_index,
        arguments.world_size,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=samples,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding="longest"),
        callbacks=[callback],
    )
    trainer.train()
    finish(spec, record, model, tokenizer)
    close()


if __name__ == "__main__":
    main()
