"""A hand-written full fine-tuning loop with torchrun, transformers, and DDP,
ZeroRedundancyOptimizer, FSDP2 or DeepSpeed.

torchrun --standalone --nproc-per-node 2 handwritten_strategies.py SPEC.json  # SPEC.json sets the
mode
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from shared import Record, close, encode, finish, num_labels, pad, read_chats, read_spec
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer


def parallelize(
    model: torch.nn.Module, mode: str, learning_rate: float
) -> tuple[Any, torch.optim.Optimizer | None]:
    """Return the parallelized model and its optimizer, which is None if the DeepSpeed engine owns
    it."""
    if mode in ("ddp", "zero1"):
        from torch.nn.parallel import DistributedDataParallel

        parallel_model = DistributedDataParallel(model)
        if mode == "ddp":
            return parallel_model, torch.optim.AdamW(
                parallel_model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True
            )
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return parallel_model, ZeroRedundancyOptimizer(
            parallel_model.parameters(),
            torch.optim.AdamW,
            lr=learning_rate,
            weight_decay=0.0,
            fused=True,
            parameters_as_bucket_view=True,
        )
    if mode in ("zero2", "zero3"):
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block, reshard_after_forward=mode == "zero3")
        fully_shard(model, reshard_after_forward=mode == "zero3")
        return model, torch.optim.AdamW(
            model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    world_size = dist.get_world_size()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world_size,
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True
    )
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

    model, optimizer = parallelize(
        AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        mode,
        spec["learning_rate"],
    )
    record = Record()
    for step in range(len(spec["batches"])):
        chunk = samples[step * size : (step + 1) * size]
        batch = pad(chunk, tokenizer.pad_token_id, torch.device("cpu"))
        count = torch.tensor(float(num_labels(chunk)))
        dist.all_reduce(count)
        # The head is computed only at positions at which at least one row has a label.
        targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        label_positions = (targets != -100).any(0).nonzero().flatten()
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            use_cache=False,
            logits_to_keep=label_positions,
        ).logits
        # Every mode averages over the ranks, but the loss is divided by the labels of all ranks.
        loss = (
            functional.cross_entropy(
                logits.flatten(0, 1), targets[:, label_positions].flatten(), reduction="sum"
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
