"""A process that plans the configs it is sent: ``paceline plan --serve``. Both requests and answers
are JSON lines.

In: ``{id, yaml, world_size, device, cwd}``; all but ``id`` and ``yaml`` may be null or missing.
Relative paths of the config start at ``cwd``. A newer request ends an older one, which gets no
answer.
Out: first ``{ready: true}``; then for each request ``{id, plan, max_steps}`` with the JSON of
``paceline plan --json``, or ``{id, error, exit_code}`` with the record of an error and the exit
code of the command. The process ends when its input ends.

A process that this one forks answers each request, so an outdated plan can be ended at any time.
This process keeps what later plans use too: the imported modules, the profiles of models, and the
measured rates of the CPU.
"""

import gc
import json
import os
import pickle
import select
import signal
from typing import NoReturn, TypedDict

from paceline.config.load import load_text
from paceline.config.packages import DEVICE_PACKAGES, unused_packages
from paceline.core.errors import EXIT_DONE, ErrorRecord, PacelineError, RunError
from paceline.core.processes import end_with_parent, exit_text
from paceline.core.user_code import hide_packages, show_packages
from paceline.models.files import fit_to_model
from paceline.models.kernels.attention_choice import installed_packages
from paceline.planner.api import PlanReport, make_plan
from paceline.planner.machine.hardware import remember_cpu_rates
from paceline.planner.model_profile import ModelProfile, remember_profiles

_CHUNK_BYTES = 1 << 16
_MAX_PROFILES = 64
_STDIN = 0
#: The name of the config in messages.
_NAME = "config.yaml"
#: A plan that imports what most plans need. It has all settings that are otherwise read from this
#: machine's devices: a process that is forked after CUDA was initialized cannot use it.
_FIRST = """\
model: Qwen/Qwen2.5-0.5B-Instruct
dataset: none.jsonl
lora: {enable: true}
train_args: {precision: bf16-mixed}
"""


class ConfigToPlan(TypedDict, total=False):
    """A request, as described above."""

    id: int
    yaml: str
    world_size: int | None
    device: str | None
    cwd: str | None


class PlanAnswer(TypedDict, total=False):
    """An answer, as described above."""

    id: int | None
    ready: bool
    plan: PlanReport
    max_steps: int | None
    error: ErrorRecord
    exit_code: int


def serve() -> int:
    """Answer requests until the input ends."""
    out = os.dup(1)
    os.dup2(2, 1)  # libraries may print, which would corrupt the answers
    # As in the fork server of the ranks: what is imported before a fork must not initialize CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    hide_packages(DEVICE_PACKAGES)
    profiles, rates = remember_profiles(), remember_cpu_rates()
    _answer_of(ConfigToPlan(yaml=_FIRST, world_size=8, device="H100-SXM"))
    gc.freeze()  # the collector would otherwise copy the shared memory into each process
    _send(out, {"ready": True})
    planning: _Planning | None = None
    unread = b""
    while True:
        sources = [_STDIN] if planning is None else [_STDIN, planning.pipe]
        ready = select.select(sources, [], [])[0]
        if planning is not None and planning.pipe in ready and planning.has_ended():
            answer, new_profiles, new_rates = planning.result()
            _send(out, answer)
            profiles.update(new_profiles)
            rates.update(new_rates)
            for key in [*profiles][:-_MAX_PROFILES]:
                del profiles[key]
            planning = None
        if _STDIN not in ready:
            continue
        chunk = os.read(_STDIN, _CHUNK_BYTES)
        *requests, unread = (unread + chunk).split(b"\n")
        if planning is not None and (requests or not chunk):
            planning.end()
            planning = None
        if not chunk:
            return EXIT_DONE
        if requests:
            planning = _Planning(json.loads(requests[-1]))


class _Planning:
    """A process that answers one request. ``pipe`` is readable when it has sent a part of its
    answer."""

    def __init__(self, request: ConfigToPlan) -> None:
        self.request = request
        self.pipe, end = os.pipe()
        self._received = b""
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.pipe)
            _plan_and_exit(request, end)
        os.close(end)

    def has_ended(self) -> bool:
        """Receive a part of the answer. Return whether it is complete."""
        part = os.read(self.pipe, _CHUNK_BYTES)
        self._received += part
        return not part

    def result(self) -> tuple[PlanAnswer, dict[str, ModelProfile], dict[bool, float]]:
        """Return the answer of a process that has ended, the profiles of new models, and rates that
        it has measured."""
        os.close(self.pipe)
        _, status = os.waitpid(self._pid, 0)
        id = self.request.get("id")
        if status == 0:
            answer, profiles, rates = pickle.loads(self._received)
            answer["id"] = id
            return answer, profiles, rates
        text = exit_text(os.waitstatus_to_exitcode(status))
        error = RunError(
            "the process that plans {ended}",
            code="planner-ended",
            fix="change the config, or try again",
            ended=text,
        )
        failure = _as_answer(error)
        failure["id"] = id
        return failure, {}, {}

    def end(self) -> None:
        os.close(self.pipe)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _plan_and_exit(request: ConfigToPlan, pipe: int) -> NoReturn:
    code = 1
    try:
        gc.disable()  # A collection would take longer than this process needs its memory for.
        end_with_parent()
        show_packages()
        installed_packages.cache_clear()
        profiles = remember_profiles()
        known = set(profiles)
        answer = _answer_of(request)
        new = {key: profile for key, profile in profiles.items() if key not in known}
        with os.fdopen(pipe, "wb") as handle:
            pickle.dump((answer, new, remember_cpu_rates()), handle)
        code = EXIT_DONE
    finally:
        os._exit(code)


def _answer_of(request: ConfigToPlan) -> PlanAnswer:
    try:
        cwd = request.get("cwd")
        if cwd is not None:
            os.chdir(cwd)
        loaded = load_text(request["yaml"], _NAME)
        hide_packages(unused_packages(loaded.config))
        config = fit_to_model(loaded).config
        plan = make_plan(config, request.get("world_size"), device=request.get("device"))
        return {"plan": plan.as_dict(), "max_steps": config.train_args.max_steps}
    except PacelineError as error:
        return _as_answer(error)
    except Exception as error:
        failure = RunError(
            "{reason}",
            code="plan-failed",
            fix="run `paceline plan` with --debug in a terminal",
            reason=f"{type(error).__name__}: {error}"[:500],
        )
        return _as_answer(failure)


def _as_answer(error: PacelineError) -> PlanAnswer:
    record = error.record()
    record["what"] = error.what.removeprefix(f"{_NAME}: ").removeprefix(f"{_NAME} ")
    return {"error": record, "exit_code": error.exit_code}


def _send(out: int, message: PlanAnswer) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(out, line) :]
