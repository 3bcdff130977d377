"""Routes for starting runs: the form, checks as one types, the plan, start, stop, resume."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from paceline.core.errors import ConfigError
from paceline.core.run_dir import RunDir
from paceline.web.files import read_inside
from paceline.web.jobs.context import LaunchContext, run_folder
from paceline.web.jobs.runs import CONFIG, Launched, check_name, is_locked, stop
from paceline.web.runs.discovery import Runs

router = APIRouter()

Id = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$")]
Yaml = Annotated[str, Field(max_length=1 << 20, description="A config's text.")]


class Text(BaseModel):
    """A config as it is typed."""

    yaml: Yaml


class Edit(Text):
    """Keys to set in a config's text, and keys to take out."""

    values: dict[str, Any] = Field(default_factory=dict, max_length=500)
    remove: list[str] = Field(default_factory=list, max_length=500)


class Start(Text):
    """A run to start."""

    name: str


class Resume(BaseModel):
    """A run to go on with; without ``yaml`` by the config it was made with."""

    yaml: Yaml | None = None
    allow_config_change: bool = False


class Stop(BaseModel):
    """``now``: a second time, which ends the run at once."""

    now: bool = False


def _configs() -> Any:
    """What knows configs takes a fifth of the server's start: it is loaded for the first page that
    starts runs."""
    from paceline.web.api import configs

    return configs


@router.get("/api/schema")
def schema() -> dict[str, Any]:
    """The config's JSON schema, and the form's fields and groups that follow from it."""
    return dict(_configs().form())


@router.get("/api/presets")
def presets() -> dict[str, Any]:
    """Configs for the common jobs, as text."""
    return {"presets": _configs().PRESETS}


@router.post("/api/check")
def check(body: Text) -> dict[str, Any]:
    """What is wrong with a config, with the line and the key of each mistake; and what its keys
    come to."""
    return dict(_configs().check(body.yaml))


@router.post("/api/yaml")
def yaml(body: Edit) -> dict[str, Any]:
    """A form's edit put into the text. ``kept``: the rest of the text is as it was, comments and
    all."""
    text, kept = _configs().edit_yaml(body.yaml, body.values, body.remove)
    return {"yaml": text, "kept": kept}


@router.post("/api/plan")
async def plan(body: Text, request: Request) -> dict[str, Any]:
    """What the run would take under every mode: ``paceline plan --json``. A newer request ends an
    older one."""
    found, notes = await LaunchContext.of(request).verbs.run("plan", ["plan", "CONFIG"], body.yaml)
    args = _configs().load(body.yaml).config.train_args
    return {**found, "max_steps": args.max_steps, "said": notes}


@router.post("/api/steps")
async def steps(body: Text, request: Request) -> dict[str, Any]:
    """Steps, batch and warm-up as they follow from the data, which is read and tokenised for it
    (and kept for the run): ``paceline sft --dry-run --json``."""
    words = ["sft", "CONFIG", "--dry-run"]
    found, notes = await LaunchContext.of(request).verbs.run(
        "steps", words, body.yaml, timeout_s=900.0
    )
    return {**found, "said": notes}


@router.post("/api/start")
async def start(body: Start, request: Request) -> dict[str, Any]:
    """Start a run in ``FOLDER/NAME``. Answers when it shows or has failed, or after a while where
    it is still preparing (``shows: false``); then :func:`launch` says more."""
    starting = LaunchContext.of(request)
    check_name(starting.folder, body.name)
    text, _ = _configs().edit_yaml(body.yaml, {"output_dir": f"./{body.name}"})
    _configs().load(text)
    one = starting.launches.start(body.name, text)
    return await _told(starting, request.app.state.panel.runs, one)


async def _told(starting: LaunchContext, runs: Runs, one: Launched) -> dict[str, Any]:
    shows = await starting.launches.wait(one)
    await run_in_threadpool(runs.all, fresh=True)  # so that its page is there at once
    return {"id": starting.id_of(one.folder), "name": one.folder.name, "shows": shows}


@router.get("/api/launches/{id}")
def launch(id: Id, request: Request) -> dict[str, Any]:
    """How a start goes on: ``{shows, ended, said}``; where it failed, its error."""
    starting = LaunchContext.of(request)
    one = starting.launched(id)
    if one is None:
        return {"shows": True, "ended": False, "said": ""}
    starting.launches.check_ended(one)
    return {
        "shows": one.shows(),
        "ended": one.process.poll() is not None,
        "said": one.said()[-4000:],
    }


@router.post("/api/runs/{id}/stop")
def stop_run(id: Id, body: Stop, request: Request) -> dict[str, Any]:
    """Ask a run to stop, with a checkpoint."""
    return {"pid": stop(run_folder(request, id), LaunchContext.of(request).launches, body.now)}


@router.get("/api/runs/{id}/resume")
def resumable(id: Id, request: Request) -> dict[str, Any]:
    """The config to go on with: ``{yaml, going_on}``."""
    run = run_folder(request, id)
    for path in (run / CONFIG, RunDir(run).config):
        found = read_inside(path)
        if found is not None:
            return {"yaml": found.decode("utf-8", "replace"), "going_on": is_locked(run)}
    raise ConfigError(f"{run.name} has no config to go on with", fix="start a new run")


@router.post("/api/runs/{id}/diff")
def diff(id: Id, body: Text, request: Request) -> dict[str, Any]:
    """Where a config differs from the run's own. ``needs_allow``: the change alters the numbers of
    the training."""
    run = run_folder(request, id)
    return {"changes": _configs().differences(run, body.yaml)}


@router.post("/api/runs/{id}/resume")
async def resume(id: Id, body: Resume, request: Request) -> dict[str, Any]:
    """Go on with a run, as :func:`start`."""
    starting, run = LaunchContext.of(request), run_folder(request, id)
    if body.yaml is not None:
        _configs().load(body.yaml)
    return await _told(
        starting,
        request.app.state.panel.runs,
        starting.launches.resume(run, body.yaml, body.allow_config_change),
    )


@router.post("/api/runs/{id}/export")
async def export(id: Id, request: Request) -> dict[str, Any]:
    """The whole model in one folder, adapters added in: ``paceline export --merge``. Without
    adapters it is whole already."""
    run = run_folder(request, id)
    if not (RunDir(run).model / "adapter_config.json").is_file():
        if not RunDir(run).model.is_dir():
            raise ConfigError(
                f"{run.name} has no model yet",
                fix="let the run finish; resume it where it was stopped",
            )
        return {"path": str(RunDir(run).model), "merged": False}
    done = run / "exported"
    if done.is_dir() and done.stat().st_mtime >= RunDir(run).model.stat().st_mtime:
        return {"path": str(done), "merged": True}
    words = ["export", str(run), "--merge"]
    found, _ = await LaunchContext.of(request).verbs.run(f"export {id}", words, timeout_s=3600.0)
    return {"path": found["path"], "merged": True}
