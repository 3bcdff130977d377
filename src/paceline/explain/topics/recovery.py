"""`paceline explain recovery`: a real run that loses a rank, goes back to its last checkpoint
and ends with the weights of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import RunError
from paceline.core.event_log import read_events
from paceline.core.events import Event
from paceline.core.files import Scratch
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import Cell, Check, DrawnRow, Frame, Recording, Span
from paceline.messages.event_text import text_of_event
from paceline.messages.pages import PageText

_STEPS, _SAVE_STEPS, _FAULT_STEP = 12, 4, 7
_TIMEOUT_S = 300.0
_ABOUT = PageText(
    "If a rank dies, the collectives of the others cannot complete. Paceline's launcher ends all"
    " ranks and restarts them, and they load the latest checkpoint: weights, optimizer, random"
    " state and position in the data. Steps after the checkpoint are made again, with the same"
    " batches and the same losses, so the run ends with the same digest as one that was not"
    " disturbed. Here, the last rank kills its own process with SIGKILL in step {fault_step}; a"
    " checkpoint is saved every {save_steps} steps.",
    fault_step=_FAULT_STEP,
    save_steps=_SAVE_STEPS,
)


@dataclass
class RecoveryState:
    """What a run has done up to an event."""

    losses: dict[int, float] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    repeated: set[int] = field(default_factory=set)


def record(options: ExplainOptions) -> Recording:
    """Train the same task twice with `paceline sft`, once with a rank that dies.

    The figures: ``ranks, fault_step, resumed_from_step, restarts, losses`` (step → loss, of the
    last time that the step was made), ``first_losses`` (of the first time) and ``digests`` (of
    both runs).
    """
    ranks = options.ranks
    with Scratch("paceline-explain-") as folder:
        events, digests = _run_both(folder, ranks)
    frames, spans, first, last = _replay(events, ranks)
    resumes = [event["step"] for event in events if event["type"] == "resume"]
    faults = [event for event in events if event["type"] == "fault"]
    repeated = sorted(set(range(resumes[0] + 1, _FAULT_STEP)) & first.keys() & last.keys())
    return Recording(
        topic="recovery",
        title=PageText("Recovery: a lost rank of {ranks:rank}, and a rollback", ranks=ranks),
        about=_ABOUT,
        actors=(*(f"rank {rank}" for rank in range(ranks)), "run"),
        frames=frames,
        checks=(
            Check.equal("one rank was lost", [[ranks - 1]], [event["ranks"] for event in faults]),
            Check.equal("the run resumed from the latest checkpoint", [_SAVE_STEPS], resumes),
            Check.equal(
                "repeated steps have the same losses",
                [first[step] for step in repeated],
                [last[step] for step in repeated],
            ),
            Check.equal("digest of the undisturbed run", digests[0], digests[1]),
        ),
        facts=(
            ("Resumed from step", str(resumes[0])),
            ("Steps made again", str(len(repeated))),
            ("Digest of both runs", digests[0][:12]),
        ),
        spans=spans,
        figures={
            "ranks": ranks,
            "fault_step": _FAULT_STEP,
            "resumed_from_step": resumes[0],
            "restarts": len(faults),
            "losses": last,
            "first_losses": first,
            "digests": list(digests),
        },
    )


def _run_both(folder: Path, ranks: int) -> tuple[list[Event], tuple[str, str]]:
    """Train with and without the fault at the same time. Return the events of the disturbed run,
    and the digests of the final checkpoints of both.

    Raises:
        RunError: a run failed.
    """
    fault = f"task_args={{flag: {folder / 'flag'}, rank: {ranks - 1}, step: {_FAULT_STEP}}}"
    common = (
        "model=regression",
        "dataset=made-by-the-task",
        "task=paceline.explain.lost_rank:LostRankTask",
        "parallel.mode=ddp",
        "parallel.device=cpu",
        f"parallel.num_gpus={ranks}",
        "per_device_train_batch_size=8",
        "logging_steps=1",
        f"save_steps={_SAVE_STEPS}",
        f"max_steps={_STEPS}",
    )
    disturbed, undisturbed = folder / "disturbed", folder / "undisturbed"
    _run_commands(
        ["sft", *common, f"output_dir={disturbed}", fault],
        ["sft", *common, f"output_dir={undisturbed}"],
    )
    final = f"checkpoints/step-{_STEPS:08d}"
    inspected = _run_commands(
        *(["inspect", str(run / final), "--json"] for run in (disturbed, undisturbed))
    )
    first, second = (str(json.loads(text)["digest"]) for text in inspected)
    return read_events(disturbed / "events.jsonl"), (first, second)


def _run_commands(*commands: list[str]) -> list[str]:
    """Run commands of Paceline at the same time, and return what they print."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "paceline", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if command[0] == "sft" else subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    outputs = []
    try:
        for process, command in zip(processes, commands, strict=True):
            output, _ = process.communicate(timeout=_TIMEOUT_S)
            if process.returncode != 0:
                raise RunError(
                    "`paceline {command}` failed with exit code {returncode}: {output}",
                    code="command-failed",
                    command=command[0],
                    returncode=process.returncode,
                    output=output,
                )
            outputs.append(output)
    except subprocess.TimeoutExpired as error:
        raise RunError(
            "`paceline {commands}` took more than {timeout_s} s",
            code="command-timed-out",
            commands=commands[0][0],
            timeout_s=f"{_TIMEOUT_S:.0f}",
        ) from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return outputs


def _replay(
    events: list[Event], ranks: int
) -> tuple[tuple[Frame, ...], tuple[Span, ...], dict[int, float], dict[int, float]]:
    """Return the frames and spans of a run, and the losses of each step when it was first and last
    made."""
    begin = next(event["time"] for event in events if event["type"] == "run_start")
    state, first = RecoveryState(), dict[int, float]()
    frames: list[Frame] = []
    spans: list[Span] = []
    is_lost = False
    step_start_s, is_restarting = 0.0, False
    for event in events:
        time_s = float(event["time"]) - begin
        text, is_key = "", False
        if event["type"] == "run_start":
            text = "The run starts." if not frames else ""
            is_restarting = bool(frames)
            is_key = not frames
        elif event["type"] == "step":
            step, loss = int(event["step"]), float(event["loss"])
            if step in first:
                state.repeated.add(step)
            first.setdefault(step, loss)
            state.losses[step] = loss
            again = ", again with the loss of the first time" if step in state.repeated else ""
            text = PageText(
                "Step {step}: loss {loss}{again}.", step=step, loss=f"{loss:.4f}", again=again
            )
            is_key = step == _STEPS or (step in state.repeated and len(state.repeated) == 1)
            name = "restart" if is_restarting else "step"
            spans += [
                Span(rank, "steps", name, str(step), step_start_s, time_s) for rank in range(ranks)
            ]
            is_restarting = False
        elif event["type"] == "checkpoint":
            state.checkpoints.append(int(event["step"]))
            text = PageText("The checkpoint of step {step} is complete.", step=event["step"])
        elif event["type"] == "fault":
            is_lost = is_key = True
            text = PageText("The restart begins: {reason}.", reason=text_of_event(event, "reason"))
        elif event["type"] == "resume":
            is_lost, is_key = False, True
            step = int(event["step"])
            state.losses = {done: loss for done, loss in state.losses.items() if done <= step}
            text = PageText(
                "All ranks load the checkpoint of step {step}: later steps are made again.",
                step=step,
            )
        if event["type"] in ("step", "run_start") and not is_restarting:
            step_start_s = time_s
        if text:
            rows = _rows(state, ranks, is_lost)
            frames.append(Frame(text, rows, phase=event["type"], time_s=time_s, is_key=is_key))
    last = dict(state.losses)
    return tuple(frames), tuple(spans), first, last


def _rows(state: RecoveryState, ranks: int, is_lost: bool) -> tuple[tuple[DrawnRow, ...], ...]:
    """Return the steps that each rank has made, and the checkpoints of the run."""
    newest = max(state.losses, default=0)

    def steps(rank: int) -> tuple[Cell, ...]:
        if is_lost and rank == ranks - 1:
            return (Cell("lost", tone="wrong"),)
        return tuple(
            Cell("", tone="idle")
            if step not in state.losses
            else Cell(str(step), tone="new" if step == newest else "done")
            for step in range(1, _STEPS + 1)
        )

    saved = tuple(
        Cell("saved", tone="done") if step in state.checkpoints else Cell("", tone="idle")
        for step in range(1, _STEPS + 1)
    )
    return (
        *((DrawnRow("steps", steps(rank)),) for rank in range(ranks)),
        (DrawnRow("saved", saved),),
    )
