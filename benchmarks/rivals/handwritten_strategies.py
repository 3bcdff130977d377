"""Full fine-tuning by hand with what torch has: torchrun, transformers, and DDP,
ZeroRedundancyOptimizer, FSDP2 or DeepSpeed.

torchrun --standalone --nproc-per-node 2 handwritten_strategies.py SPEC.json      (SPEC names the
mode)
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from shared import Record, close, encode, finish, num_labels, pad, read_chats, read_spec
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer


def place(
    model: torch.nn.Module, mode: str, rate: float
) -> tuple[Any, torch.optim.Optimizer | None]:
    """The model as the mode wants it, and its optimizer (None: DeepSpeed's engine is both)."""
    if mode in ("ddp", "zero1"):
        from torch.nn.parallel import DistributedDataParallel

        placed = DistributedDataParallel(model)
        if mode == "ddp":
            return placed, torch.optim.AdamW(
                placed.parameters(), lr=rate, weight_decay=0.0, fused=True
            )
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return placed, ZeroRedundancyOptimizer(
            placed.parameters(),
            torch.optim.AdamW,
            lr=rate,
            weight_decay=0.0,
            fused=True,
            parameters_as_bucket_view=True,
        )
    if mode in ("zero2", "zero3"):
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block, reshard_after_forward=mode == "zero3")
        fully_shard(model, reshard_after_forward=mode == "zero3")
        return model, torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    size = dist.get_world_size()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": size,
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine, None


def main() -> None:
    spec = read_spec()
    mode = spec["mode"]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(spec["seed"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    chats = read_chats(spec["train_file"])
    size = spec["per_device_batch_size"]
    local_chats = [chats[index] for batch in spec["batches"] for index in batch[rank::world_size]]
    samples = encode(tokenizer, local_chats, spec["max_length"])

    model, optimizer = place(
        AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        mode,
        spec["learning_rate"],
    )
    record = Record()
    for step in range(len(spec["batches"])):
        chunk = samples[step * size : (step + 1) * size]
        batch = pad(chunk, tokenizer.pad_token_id)
        count = torch.tensor(float(num_labels(chunk)))
        dist.all_reduce(count)
        # The head is computed where some row has a label, and nowhere else.
        targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        keep = (targets != -100).any(0).nonzero().flatten()
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            use_cache=False,
            logits_to_keep=keep,
        ).logits
        # All of them average over the ranks; the loss is to be divided by the labels of all of
        # them.
        loss = (
            functional.cross_entropy(
                logits.flatten(0, 1), targets[:, keep].flatten(), reduction="sum"
            )
            * world_size
            / count
        )
        if optimizer is None:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
        record.losses.append(float(loss.detach()))
        record.step_done(chunk)

    finish(spec, record, model if mode in ("zero2", "zero3") else model.module, tokenizer)
    close()


if __name__ == "__main__":
    main()
