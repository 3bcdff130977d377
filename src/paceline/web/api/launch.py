"""Routes for starting runs: the form, checks as one types, the plan, start, stop, resume."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from paceline.core.errors import ConfigError
from paceline.core.run_dir import RunDir
from paceline.web.files import JSONObject, read_inside
from paceline.web.jobs.runs import CONFIG, Launched, check_name, is_locked, stop
from paceline.web.state import AppState, Panel, RunId

router = APIRouter()

Yaml = Annotated[str, Field(max_length=1 << 20, description="A config's text.")]


class Text(BaseModel):
    """A config as it is typed."""

    yaml: Yaml


class Edit(Text):
    """Keys to set in a config's text, and keys to take out."""

    values: JSONObject = Field(default_factory=dict, max_length=500)
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
def schema() -> JSONObject:
    """The config's JSON schema, and the form's fields and groups that follow from it."""
    return dict(_configs().form())


@router.get("/api/presets")
def presets() -> dict[str, list[dict[str, str]]]:
    """Configs for the common jobs, as text."""
    return {"presets": _configs().PRESETS}


@router.post("/api/check")
def check(body: Text) -> JSONObject:
    """What is wrong with a config, with the line and the key of each mistake; and what its keys
    come to."""
    return dict(_configs().check(body.yaml))


@router.post("/api/yaml")
def yaml(body: Edit) -> dict[str, str | bool]:
    """A form's edit put into the text. ``kept``: the rest of the text is as it was, comments and
    all."""
    text, kept = _configs().edit_yaml(body.yaml, body.values, body.remove)
    return {"yaml": text, "kept": kept}


@router.post("/api/plan")
async def plan(body: Text, panel: Panel) -> JSONObject:
    """What the run would take under every mode: ``paceline plan --json``. A newer request ends an
    older one."""
    answer = await panel.verbs.run("plan", ["plan", "CONFIG"], body.yaml)
    return {**answer, "max_steps": _configs().load(body.yaml).config.train_args.max_steps}


@router.post("/api/steps")
async def steps(body: Text, panel: Panel) -> JSONObject:
    """Steps, batch and warm-up as they follow from the data, which is read and tokenised for it
    (and kept for the run): ``paceline sft --dry-run --json``."""
    words = ["sft", "CONFIG", "--dry-run"]
    return await panel.verbs.run("steps", words, body.yaml, timeout_s=900.0)


@router.post("/api/start")
async def start(body: Start, panel: Panel) -> dict[str, str | bool]:
    """Start a run in ``FOLDER/NAME``. Answers when it shows or has failed, or after a while if it
    is still preparing (``shows: false``); then :func:`launch` says more."""
    check_name(panel.folder, body.name)
    text, _ = _configs().edit_yaml(body.yaml, {"output_dir": f"./{body.name}"})
    _configs().load(text)
    return await _answer(panel, panel.launches.start(body.name, text))


async def _answer(panel: AppState, launched: Launched) -> dict[str, str | bool]:
    shows = await panel.launches.wait(launched)
    # so that its page is there at once
    await run_in_threadpool(panel.runs.all, fresh=True)
    folder = launched.folder
    return {"id": panel.id_of(folder), "name": folder.name, "shows": shows}


@router.get("/api/launches/{id}")
def launch(id: RunId, panel: Panel) -> dict[str, str | bool]:
    """How a start continues: ``{shows, ended, said}``; if it failed, its error."""
    launched = panel.launched(id)
    if launched is None:
        return {"shows": True, "ended": False, "said": ""}
    panel.launches.check_ended(launched)
    ended = launched.process.poll() is not None
    return {"shows": launched.shows(), "ended": ended, "said": launched.output()[-4000:]}


@router.post("/api/runs/{id}/stop")
def stop_run(id: RunId, body: Stop, panel: Panel) -> dict[str, int]:
    """Ask a run to stop, with a checkpoint."""
    return {"pid": stop(panel.run_folder(id), panel.launches, body.now)}


@router.get("/api/runs/{id}/resume")
def resumable(id: RunId, panel: Panel) -> dict[str, str | bool]:
    """The config to go on with: ``{yaml, going_on}``."""
    run = panel.run_folder(id)
    for path in (run / CONFIG, RunDir(run).config):
        text = read_inside(path)
        if text is not None:
            return {"yaml": text.decode("utf-8", "replace"), "going_on": is_locked(run)}
    raise ConfigError(f"{run.name} has no config to go on with", fix="start a new run")


@router.post("/api/runs/{id}/diff")
def diff(id: RunId, body: Text, panel: Panel) -> JSONObject:
    """Where a config differs from the run's own. ``needs_allow``: the change alters the numbers of
    the training."""
    return {"changes": _configs().differences(panel.run_folder(id), body.yaml)}


@router.post("/api/runs/{id}/resume")
async def resume(id: RunId, body: Resume, panel: Panel) -> dict[str, str | bool]:
    """Go on with a run, as :func:`start`."""
    run = panel.run_folder(id)
    if body.yaml is not None:
        _configs().load(body.yaml)
    return await _answer(panel, panel.launches.resume(run, body.yaml, body.allow_config_change))


@router.post("/api/runs/{id}/export")
async def export(id: RunId, panel: Panel) -> JSONObject:
    """The whole model in one folder, adapters added in: ``paceline export --merge``. Without
    adapters it is whole already."""
    run = panel.run_folder(id)
    model, exported = RunDir(run).model, run / "exported"
    if not model.is_dir():
        raise ConfigError(
            f"{run.name} has no model yet", fix="let the run finish; resume it where it was stopped"
        )
    if not (model / "adapter_config.json").is_file():
        return {"path": str(model), "merged": False}
    if exported.is_dir() and exported.stat().st_mtime >= model.stat().st_mtime:
        return {"path": str(exported), "merged": True}
    words = ["export", str(run), "--merge"]
    answer = await panel.verbs.run(f"export {id}", words, timeout_s=3600.0)
    return {"path": answer["path"], "merged": True}
