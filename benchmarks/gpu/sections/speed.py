"""Training speed: Paceline and variants of it against a hand-written loop, the same compiled, and
the Trainer of transformers, on the same tokens."""

from pathlib import Path
from typing import Any

from cases import Case, Section
from context import Context
from training import train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
#: Rows of a step, and their tokens.
BATCH_ROWS, ROW_TOKENS = 4, 2048
MODELS = {"1.5B full": ("qwen2.5-1.5b.json", False), "3B LoRA": ("qwen2.5-3b.json", True)}
VARIANTS: dict[str, dict[str, Any]] = {
    "Paceline": {},
    "Paceline, compiled": {"torch_compile": True},
    "Paceline, Liger": {"use_liger_kernel": True},
    "Paceline, full recomputation": {"gradient_checkpointing": "full"},
}
FULL_VARIANTS: dict[str, dict[str, Any]] = {
    "Paceline, bf16-true": {"precision": "bf16-true"},
    "Paceline, bf16-true, compiled": {"precision": "bf16-true", "torch_compile": True},
}
LORA_VARIANTS: dict[str, dict[str, Any]] = {"Paceline, nf4": {"lora.quantize": "nf4"}}
NO_SIMULATION = "needs a GPU: speed is not measured on simulated devices"


def section(is_simulated: bool) -> Section:
    """Return the section."""
    why = NO_SIMULATION if is_simulated else ""
    cases = []
    for model, (config, lora) in MODELS.items():
        work = {"config_file": str(CONFIGS / config), "lora": lora, "batch_rows": BATCH_ROWS,
                "row_tokens": ROW_TOKENS}  # fmt: skip
        variants = VARIANTS | (LORA_VARIANTS if lora else FULL_VARIANTS)
        runs: list[tuple[str, str, dict[str, Any]]] = [
            ("Paceline", "time_paceline", {"settings": {}}),
            ("hand-written", "time_loop", {"is_compiled": False}),
            ("hand-written, compiled", "time_loop", {"is_compiled": True}),
            ("transformers Trainer", "time_trainer", {}),
            *((name, "time_paceline", {"settings": settings})
              for name, settings in variants.items() if settings),
        ]  # fmt: skip
        cases += [
            Case(f"{model}: {name}", f"sections.speed:{function}", {"work": work, **arguments},
                 limit_s=60, is_timing=True, why_skipped=why)
            for name, function, arguments in runs
        ]  # fmt: skip
    return Section("speed", 250, cases)


def fit_section(is_simulated: bool) -> Section:
    """Return the section in which the largest batch that the plan says fits is trained."""
    why = "needs a GPU: simulated devices have no limit of memory" if is_simulated else ""
    return Section("fit", 60, [
        Case("largest planned batch: 1.5B bf16-true", "sections.speed:train_largest_batch",
             {"config_file": str(CONFIGS / "qwen2.5-1.5b.json")}, limit_s=60, why_skipped=why)
    ])  # fmt: skip


def time_paceline(
    context: Context, work: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Train with Paceline, and return its figures."""
    import speed_work
    from speed_callback import ClockCallback
    from speed_work import NUM_MEASURED, NUM_PROFILED, NUM_WARM_UP

    if settings.get("lora.quantize"):
        context.needs_packages(["bitsandbytes"])
    if settings.get("use_liger_kernel"):
        context.needs_packages(["liger_kernel", "triton"])
    made = speed_work.make_work(context, **work)
    chosen = made.settings | settings
    planned = speed_work.skip_unless_planned(chosen) if not context.is_simulated else {}
    first_profiled = NUM_WARM_UP + NUM_MEASURED + 1
    profile = {"start_step": first_profiled, "num_steps": NUM_PROFILED}
    callbacks = ["speed_callback:ClockCallback"]
    run = train(
        context,
        "run",
        chosen | {"logging_steps": 1, "profile": profile, "callbacks": callbacks},
    )
    steps = run.events("step")
    step_s = ClockCallback.latest.step_s
    traces = sorted((run.folder / "profile").glob("*.json"))
    figures = made.figures(
        step_s, run.report["peak_memory_bytes"][0], traces[0] if traces else None
    )
    step_time = run.report["step_time_s"] or {}
    return figures | planned | {
        "mfu_of_event": steps[NUM_WARM_UP + NUM_MEASURED - 1]["mfu"],
        "planned_step_s": step_time.get("predicted"),
        "losses": run.losses[:3],
    }  # fmt: skip


def time_loop(context: Context, work: dict[str, Any], is_compiled: bool) -> dict[str, Any]:
    """Train with a loop as one writes it by hand: autocast, fused AdamW, clipping."""
    import speed_work
    import torch
    from torch.nn import functional

    made = speed_work.make_work(context, **work)
    device = "cuda"
    model = load_by_hand(made, work["lora"], device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=speed_work.LEARNING_RATE, weight_decay=0.0, fused=True
    )
    forward = torch.compile(model) if is_compiled else model
    losses: list[torch.Tensor] = []

    def step(number: int) -> None:
        rows, labels = (
            each.pin_memory().to(device, non_blocking=True) for each in made.batch(number)
        )
        with torch.autocast(device, torch.bfloat16):
            logits = forward(input_ids=rows, use_cache=False).logits
            targets = functional.pad(labels[:, 1:], (0, 1), value=-100)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    torch.cuda.reset_peak_memory_stats()
    step_s, trace = speed_work.measure(step, context.scratch, torch.cuda.synchronize)
    figures = made.figures(step_s, torch.cuda.max_memory_allocated(), trace)
    torch._dynamo.reset()
    return figures | {"losses": [float(loss) for loss in losses[:3]]}


def load_by_hand(work: Any, lora: bool, device: str) -> Any:
    """Load the model: in float32 if all weights are trained, else in bfloat16 with adapters."""
    import torch
    from peft import LoraConfig, get_peft_model
    from speed_work import LORA_RANK
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype).to(device)
    if lora:
        adapter = LoraConfig(
            r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear",
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, adapter)
    return model.train()


def time_trainer(context: Context, work: dict[str, Any]) -> dict[str, Any]:
    """Train with the Trainer of transformers."""
    import speed_work
    import torch
    from speed_work import NUM_MEASURED, NUM_PROFILED, NUM_WARM_UP
    from transformers import Trainer, TrainerCallback, TrainingArguments

    made = speed_work.make_work(context, **work)
    # The Trainer would read the variables of a launcher that an earlier case has set.
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    model = load_by_hand(made, work["lora"], "cuda")
    trace, clock = context.scratch / "trace.json", speed_work.StepClock(torch.cuda.synchronize)
    profiler = torch.profiler.profile()
    first_profiled = NUM_WARM_UP + NUM_MEASURED

    class Timer(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == first_profiled:
                profiler.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.after_step(state.global_step)

    num_steps = NUM_WARM_UP + NUM_MEASURED + NUM_PROFILED
    batches = [made.batch(step) for step in range(num_steps)]
    samples = [
        {"input_ids": row, "labels": label}
        for rows, labels in batches
        for row, label in zip(rows, labels, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(context.scratch / "trainer"), per_device_train_batch_size=made.batch_rows,
        max_steps=num_steps, learning_rate=speed_work.LEARNING_RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, bf16=True,
        optim="adamw_torch_fused", train_sampling_strategy="sequential", save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[Timer()])
    trainer.train()
    profiler.stop()
    profiler.export_chrome_trace(str(trace))
    return made.figures(clock.step_s, torch.cuda.max_memory_allocated(), trace)


def train_largest_batch(context: Context, config_file: str) -> dict[str, Any]:
    """Train with the largest number of rows that the plan says fits, and compare the peak."""
    import speed_work

    import paceline

    context.needs_gpu("simulated devices have no limit of memory")
    base = speed_work.make_work(context, config_file, False, 1, ROW_TOKENS).settings
    base |= {"precision": "bf16-true", "max_steps": 2}
    best: tuple[int, int] | None = None
    rows = 1
    while rows <= 64:
        plan = paceline.plan(base | {"per_device_train_batch_size": rows})
        (mode,) = (each for each in plan["modes"] if each["mode"] == "single")
        if not mode["fits"]:
            break
        best = rows, mode["memory_bytes"]["total"]
        rows = rows * 2 if rows < 4 else rows + 2
    if best is None:
        speed_work.skip_unless_planned(base)
        return {}
    run = train(context, "run", base | {"per_device_train_batch_size": best[0]})
    (peak,) = run.report["peak_memory_bytes"]
    if peak > best[1] * 1.05:
        raise AssertionError(f"the peak of {peak} bytes is above the planned {best[1]} bytes")
    return {"rows": best[0], "tokens": best[0] * ROW_TOKENS, "planned_bytes": best[1],
            "peak_bytes": peak}  # fmt: skip
