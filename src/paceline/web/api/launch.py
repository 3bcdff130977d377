"""Routes for starting runs: the form, checking a config while it is typed, and starting, stopping
and resuming."""

from types import ModuleType
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

Yaml = Annotated[str, Field(max_length=1 << 20, description="The text of a config.")]


class ConfigText(BaseModel):
    """A config as it is typed.

    Attributes:
        run: the run that is resumed with it, in whose folder its relative paths may start.
    """

    yaml: Yaml
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")] | None = None


class Edit(ConfigText):
    """Keys to set in the text of a config, and keys to remove."""

    values: JSONObject = Field(default_factory=dict, max_length=500)
    remove: list[str] = Field(default_factory=list, max_length=500)


class Start(ConfigText):
    """A run to start."""

    name: str


class Resume(BaseModel):
    """A run to resume; without ``yaml`` with its own config."""

    yaml: Yaml | None = None
    allow_config_change: bool = False


class Stop(BaseModel):
    """``now``: repeat the request, which ends the run at once."""

    now: bool = False


def load_configs() -> ModuleType:
    """Import what reads configs. It takes a fifth of the server's start-up time, so it is imported
    for the first page that needs it."""
    from paceline.web.api import configs

    return configs


@router.get("/api/schema")
def schema() -> Any:
    """Return the JSON schema of the config, and the fields and groups of the form."""
    from paceline.web.api.form import form

    return form()


@router.get("/api/presets")
def presets(panel: Panel) -> JSONObject:
    """Return the text of a config for each common job, and the panel's two folders."""
    from paceline.web.presets import PRESETS

    return {
        "presets": [{"id": id, "yaml": text} for id, text in PRESETS.items()],
        "folders": panel.folders.shown(),
    }


@router.post("/api/check")
def check(body: ConfigText, panel: Panel) -> JSONObject:
    """Return the mistakes of a config, each with its line and key, and the values of its keys.
    ``is_config``: it can be loaded; paths that do not exist are mistakes of their own."""
    return dict(load_configs().check(body.yaml, panel.config_folder(body.run)))


@router.post("/api/convert")
def convert(body: ConfigText) -> JSONObject:
    """Return a config of another tool with Paceline's keys (``paceline convert``), and the notices
    of the conversion."""
    return dict(load_configs().convert(body.yaml))


@router.post("/api/yaml")
def yaml(body: Edit) -> dict[str, str | bool]:
    """Apply an edit of the form to the text. ``kept``: the rest of the text is unchanged, comments
    included."""
    text, is_unchanged = load_configs().edit_yaml(body.yaml, body.values, body.remove)
    return {"yaml": text, "kept": is_unchanged}


@router.post("/api/steps")
async def steps(body: ConfigText, panel: Panel) -> JSONObject:
    """Return the steps, batch size and warm-up that follow from the data
    (``paceline sft --dry-run --json``). The data is read and tokenized, and cached for the run."""
    return await panel.commands.run(
        "steps", ["sft", "CONFIG", "--dry-run"], body.yaml, timeout_s=900.0,
        cwd=panel.config_folder(body.run),
    )  # fmt: skip


@router.post("/api/start")
async def start(body: Start, panel: Panel) -> dict[str, str | bool]:
    """Start a run in ``FOLDER/NAME``. Returns when the run has written an event, has failed, or is
    still preparing after a while (``shows: false``); then ``GET /api/launches/ID`` shows more."""
    check_name(panel.folder, body.name)
    output_dir = panel.folders.named(panel.folder / body.name)
    text, _ = load_configs().edit_yaml(body.yaml, {"output_dir": output_dir})
    load_configs().require(text, panel.folders.start)
    return await _wait_for_events(panel, panel.launches.start(body.name, text))


async def _wait_for_events(panel: AppState, launched: Launched) -> dict[str, str | bool]:
    has_events = await panel.launches.wait(launched)
    # Its page must exist when the browser opens it.
    await run_in_threadpool(panel.runs.all, fresh=True)
    folder = launched.folder
    return {"id": panel.id_of(folder), "name": folder.name, "shows": has_events}


@router.get("/api/launches/{id}")
def launch(id: RunId, panel: Panel) -> dict[str, str | bool]:
    """Return the state of a start, ``{shows, ended, output}``, or the error that ended it."""
    launched = panel.launched(id)
    if launched is None:
        return {"shows": True, "ended": False, "output": ""}
    panel.launches.check_ended(launched)
    has_ended = launched.process.poll() is not None
    return {
        "shows": launched.has_events(),
        "ended": has_ended,
        "output": launched.output()[-4000:],
    }


@router.post("/api/runs/{id}/stop")
def stop_run(id: RunId, body: Stop, panel: Panel) -> dict[str, int]:
    """Ask a run to stop after writing a checkpoint."""
    return {"pid": stop(panel.run_folder(id), panel.launches, body.now)}


@router.get("/api/runs/{id}/resume")
def resumable(id: RunId, panel: Panel) -> dict[str, str | bool]:
    """Return the config to resume with: ``{yaml, is_running}``."""
    return {"yaml": _config_text(panel, id), "is_running": is_locked(panel.run_folder(id))}


def _config_text(panel: AppState, id: str) -> str:
    run = panel.run_folder(id)
    for path in (run / CONFIG, RunDir(run).config):
        text = read_inside(path)
        if text is not None:
            return text.decode("utf-8", "replace")
    raise ConfigError(
        "{run} has no config to resume with",
        code="no-config-to-resume",
        fix="start a new run",
        run=run.name,
    )


@router.get("/api/runs/{id}/duplicate")
def duplicate(id: RunId, panel: Panel) -> JSONObject:
    """Return the config of a run for a new one: without its folder, and with absolute paths if the
    run was started in another folder."""
    text = _config_text(panel, id)
    cwd = panel.config_folder(id)
    moved_from = None if cwd == panel.folders.start else cwd
    return {"yaml": load_configs().without_folder(text, moved_from)}


@router.post("/api/runs/{id}/diff")
def diff(id: RunId, body: ConfigText, panel: Panel) -> JSONObject:
    """Return the keys in which a config differs from the run's config. ``needs_allow``: the change
    affects the numerics of the training."""
    return {"changes": load_configs().differences(panel.run_folder(id), body.yaml)}


@router.post("/api/runs/{id}/resume")
async def resume(id: RunId, body: Resume, panel: Panel) -> dict[str, str | bool]:
    """Resume a run; the response is the same as for ``POST /api/start``."""
    run = panel.run_folder(id)
    if body.yaml is not None:
        load_configs().require(body.yaml, panel.config_folder(id))
    launched = panel.launches.resume(run, body.yaml, body.allow_config_change)
    return await _wait_for_events(panel, launched)


@router.post("/api/runs/{id}/export")
async def export(id: RunId, panel: Panel) -> JSONObject:
    """Write the full model to one folder, with adapters merged (``paceline export --merge``).
    Without adapters the run's ``model`` folder is returned."""
    run = panel.run_folder(id)
    model, exported = RunDir(run).model, run / "exported"
    if not model.is_dir():
        raise ConfigError(
            "{run} has no model yet",
            code="no-model-yet",
            fix="wait until the run has finished; resume it if it was stopped",
            run=run.name,
        )
    if not (model / "adapter_config.json").is_file():
        return {"path": str(model), "merged": False}
    if exported.is_dir() and exported.stat().st_mtime >= model.stat().st_mtime:
        return {"path": str(exported), "merged": True}
    result = await panel.commands.run(
        f"export {id}", ["export", str(run), "--merge"], timeout_s=3600.0,
        cwd=panel.config_folder(id),
    )  # fmt: skip
    return {"path": result["path"], "merged": True}
