"""Routes of plans: of the config that is typed, and of the page Plan."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from paceline.planner.devices import devices
from paceline.web.api.launch import ConfigText, load_configs
from paceline.web.files import JSONObject
from paceline.web.state import Panel

router = APIRouter()


class PlanRequest(ConfigText):
    """A config to plan for this machine's devices, or for others."""

    world_size: Annotated[int, Field(ge=1, le=65536)] | None = None
    device: Annotated[str, Field(max_length=80)] | None = None


@router.get("/api/devices")
def device_table() -> JSONObject:
    """Return the devices that a plan can be made for, with their memory."""
    return {
        "devices": [{"name": each.name, "memory_bytes": each.memory_bytes} for each in devices()]
    }


@router.post("/api/plan")
async def plan(body: PlanRequest, panel: Panel) -> JSONObject:
    """Return what the run would take in every mode (``paceline plan --json``). A newer request ends
    an older one."""
    args = ["plan", "CONFIG"]
    if body.world_size is not None:
        args.append(f"--world-size={body.world_size}")
    if body.device is not None:
        args.append(f"--device={body.device}")
    plan = await panel.commands.run("plan", args, body.yaml)
    return {**plan, "max_steps": load_configs().load(body.yaml).config.train_args.max_steps}
