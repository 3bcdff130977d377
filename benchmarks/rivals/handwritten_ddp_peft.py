"""A hand-written LoRA fine-tuning loop with torchrun, transformers, peft and
DistributedDataParallel. Batches are padded to their longest sample.

torchrun --standalone --nproc-per-node 2 handwritten_ddp_peft.py SPEC.json
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from shared import (
    Record,
    autocast,
    close,
    encode,
    finish,
    model_dtype,
    num_labels,
    pad,
    read_chats,
    read_spec,
    start,
    summed_loss,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    spec = read_spec()
    device = start(spec)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # Each rank tokenizes only its own samples of each global batch.
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    chats = read_chats(spec["train_file"])
    size = spec["per_device_batch_size"]
    local_chats = [chats[index] for batch in spec["batches"] for index in batch[rank::world_size]]
    samples = encode(tokenizer, local_chats, spec["max_length"])

    base = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=model_dtype(device))
    lora = LoraConfig(
        r=spec["lora_rank"],
        lora_alpha=spec["lora_alpha"],
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = DistributedDataParallel(get_peft_model(base, lora).to(device))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=spec["learning_rate"], weight_decay=0.0)

    record = Record()
    for step in range(len(spec["batches"])):
        chunk = samples[step * size : (step + 1) * size]
        batch = pad(chunk, tokenizer.pad_token_id, device)
        count = torch.tensor(float(num_labels(chunk)), device=device)
        dist.all_reduce(count)
        with autocast(device):
            logits = model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                use_cache=False,
            ).logits
            # DDP averages over the ranks, but the loss is divided by the labels of all ranks.
            loss = summed_loss(logits, batch["labels"]) * world_size / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, spec["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        record.losses.append(float(loss.detach()))
        record.step_done(chunk)

    finish(spec, record, model.module, tokenizer)
    close()


if __name__ == "__main__":
    main()
