"""A hand-written LoRA fine-tuning loop with packing: the samples of a micro-batch are in one row,
and logits are computed only for the answers.

torchrun --standalone --nproc-per-node 2 handwritten_packed.py SPEC.json
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from shared import (
    Record,
    Sample,
    autocast,
    close,
    encode,
    finish,
    model_dtype,
    num_labels,
    read_chats,
    read_spec,
    start,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer


def pack(
    samples: list[Sample], device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the inputs of the model (one row, with positions that restart at each sample) and the
    target of each computed logit."""
    ids = torch.tensor([token for sample in samples for token in sample["input_ids"]])
    # The first token of a sample is not a target, because the token before it belongs to another
    # sample.
    labels = torch.tensor([label for sample in samples for label in (-100, *sample["labels"][1:])])
    positions = torch.cat([torch.arange(len(sample["input_ids"])) for sample in samples])
    label_positions = (labels != -100).nonzero().flatten()
    inputs = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "logits_to_keep": label_positions - 1,
    }
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    return on_device, labels[label_positions].to(device)


def main() -> None:
    spec = read_spec()
    device = start(spec)
    rank, world_size = dist.get_rank(), dist.get_world_size()

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
        inputs, targets = pack(chunk, device)
        count = torch.tensor(float(num_labels(chunk)), device=device)
        dist.all_reduce(count)
        with autocast(device):
            logits = model(**inputs, use_cache=False).logits[0].float()
            loss = functional.cross_entropy(logits, targets, reduction="sum") * world_size / count
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
