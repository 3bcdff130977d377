"""Fine-tuning a language model with the Trainer of transformers.

python hf_trainer.py MODEL_FOLDER CHATS.jsonl
"""

import json
import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            print(f"loss {logs['loss']:.9f}")


def encode(chat):
    """Return the token ids, and the labels: only the answers are learned."""
    encoded = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, truncation=True, max_length=256
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    labels = [token if is_answer else -100 for token, is_answer in pairs]
    return {"input_ids": encoded["input_ids"], "labels": labels}


folder, file = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
with open(file, encoding="utf-8") as lines:
    dataset = [encode(json.loads(line)["messages"]) for line in lines]

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="output/hf-trainer",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=dataset,
    data_collator=DataCollatorForSeq2Seq(tokenizer, padding="longest"),
    callbacks=[PrintLoss()],
)
trainer.train()
