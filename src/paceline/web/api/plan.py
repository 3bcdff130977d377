"""Routes of plans: of the config that is typed, and of the page Plan."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from paceline.planner.devices import devices
from paceline.web.api.launch import ConfigText
from paceline.web.files import JSONObject
from paceline.web.presets import BUILT_IN_MODELS, HUB_MODELS
from paceline.web.state import Panel

router = APIRouter()


class PlanRequest(ConfigText):
    """A config to plan for this machine's devices, or for others. ``page``: identifies the page
    that requests the plan."""

    world_size: Annotated[int, Field(ge=1, le=65536)] | None = None
    device: Annotated[str, Field(max_length=80)] | None = None
    page: Annotated[str, Field(max_length=40)] = ""


@router.get("/api/devices")
def device_table() -> JSONObject:
    """Return the devices that a plan can be made for, with their memory, and common models."""
    return {
        "devices": [{"name": each.name, "memory_bytes": each.memory_bytes} for each in devices()],
        "models": [*HUB_MODELS, *BUILT_IN_MODELS],
    }


@router.post("/api/plan")
async def plan(body: PlanRequest, panel: Panel) -> JSONObject:
    """Return what the run would take in every mode (``paceline plan --json``), and ``max_steps``. A
    newer request ends an older one of the same page."""
    cwd = panel.config_folder(body.run)
    return await panel.planner.plan(body.yaml, body.world_size, body.device, cwd, body.page)


@router.post("/api/planner")
async def start_planner(panel: Panel) -> JSONObject:
    """Start the process that plans, if it is not running: a page that will request plans calls this
    first."""
    await panel.planner.start()
    return {}
