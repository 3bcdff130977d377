"""Routes that change what the panel shows of a run, or delete the run."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, Field

from paceline.core.formatting import clean
from paceline.web.responses import StrictJSONResponse
from paceline.web.runs.deletion import delete_run
from paceline.web.runs.notes import Note, NoteChange
from paceline.web.state import AppState, Panel, RunId

router = APIRouter()

_OneLine = AfterValidator(lambda text: clean(text).replace("\n", " ").strip())


class NoteRequest(BaseModel):
    """A user's note on a run, and the run's tags."""

    note: str = Field("", max_length=10_000)
    tags: list[Annotated[str, Field(min_length=1, max_length=60)]] = Field([], max_length=30)


class NameRequest(BaseModel):
    """The name to show for a run; empty for the name of its folder."""

    name: Annotated[str, Field(max_length=100), _OneLine]


class ArchiveRequest(BaseModel):
    """Whether to leave a run out of the list."""

    archived: bool


@router.put("/api/runs/{id}/note")
def put_note(panel: Panel, id: RunId, body: NoteRequest) -> StrictJSONResponse:
    """Save a note and tags."""
    return _update(panel, id, {"note": body.note, "tags": list(dict.fromkeys(body.tags))})


@router.put("/api/runs/{id}/name")
def put_name(panel: Panel, id: RunId, body: NameRequest) -> StrictJSONResponse:
    """Save the name that the panel shows. The run's folder keeps its name, which checkpoints,
    configs and commands refer to."""
    return _update(panel, id, {"name": body.name})


@router.put("/api/runs/{id}/archived")
def put_archived(panel: Panel, id: RunId, body: ArchiveRequest) -> StrictJSONResponse:
    """Leave a run out of the list, or undo that. No file of the run changes."""
    return _update(panel, id, {"archived": body.archived})


def _update(panel: AppState, id: str, change: NoteChange) -> StrictJSONResponse:
    run = panel.runs.get(id)
    panel.runs.notes.update(run.path, change)
    panel.streams.list_changed()
    note: Note = panel.runs.notes.of(run.path)
    return StrictJSONResponse(note)


@router.delete("/api/runs/{id}")
def delete(panel: Panel, id: RunId) -> StrictJSONResponse:
    """Delete a run: its folder with checkpoints, model and report, and its note."""
    run = panel.runs.get(id)
    delete_run(run, panel.folder)
    panel.launches.by_folder.pop(run.root, None)
    panel.runs.all(fresh=True)
    panel.runs.notes.remove(run.path)
    panel.streams.list_changed()
    return StrictJSONResponse({"id": id})


@router.get("/api/runs/{id}/longer")
def longer(
    panel: Panel, id: RunId, steps: Annotated[int, Field(ge=1, le=1 << 40)]
) -> StrictJSONResponse:
    """Return what the learning rate does if a run that has ended continues to the step
    ``steps``."""
    # It imports the config's schema, which would make the server start later.
    from paceline.web.runs.longer import continuation

    run = panel.runs.get(id)
    run.entry()  # reads what is new
    return StrictJSONResponse(continuation(run.summary.start, run.summary.newest, steps))
