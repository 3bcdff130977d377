"""Routes of the page Learn: the topics of `paceline explain`, and their recordings."""

import tempfile
from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response

from paceline.core.errors import unknown_name
from paceline.explain.catalog import TOPICS, Topic
from paceline.web.api.runs import REPORT_CSP
from paceline.web.files import JSONObject
from paceline.web.responses import NotFound
from paceline.web.state import Explanation, Panel

router = APIRouter()
_TIMEOUT_S = 300.0


class Variant(BaseModel):
    """What to record: by default with the topic's first algorithm and usual number of ranks."""

    algorithm: str = ""
    ranks: int | None = Field(None, ge=1)


@router.get("/api/topics")
def topics(panel: Panel) -> JSONObject:
    """Return the topics in reading order, each with its algorithms and numbers of ranks.
    ``recorded``: the algorithm that this server has recorded last, empty if the topic has none, and
    the number of ranks; null: nothing yet."""
    return {"topics": [_topic(panel, name, topic) for name, topic in TOPICS.items()]}


def _topic(panel: Panel, name: str, topic: Topic) -> JSONObject:
    default, lowest, highest = topic.ranks
    explanation = panel.explanations.get(name)
    recorded = None if explanation is None else explanation.variant
    return {
        "name": name,
        "algorithms": list(topic.algorithms),
        "ranks": {"default": default, "min": lowest, "max": highest, "step": topic.multiple_of},
        "recorded": recorded,
    }


@router.post("/api/topics/{name}/record")
async def record(panel: Panel, name: str, body: Variant) -> JSONObject:
    """Record a topic with `paceline explain`, and keep its page until the server ends."""
    topic = _check(name)
    algorithm = body.algorithm
    if algorithm and algorithm not in topic.algorithms:
        raise unknown_name(f"{name} algorithm", algorithm, topic.algorithms)
    variant = [f"--algorithm={algorithm}"] if algorithm else []
    ranks = topic.ranks[0] if body.ranks is None else body.ranks
    if topic.ranks[1] < topic.ranks[2]:
        variant.append(f"--ranks={ranks}")
    with tempfile.TemporaryDirectory(prefix="paceline-panel-") as folder:
        page = Path(folder) / "page.html"
        args = ["explain", name, *variant, f"--output={page}"]
        result = await panel.commands.run("explain", args, timeout_s=_TIMEOUT_S)
        algorithm = algorithm or next(iter(topic.algorithms), "")
        recorded: JSONObject = {"algorithm": algorithm, "ranks": ranks}
        panel.explanations[name] = Explanation(recorded, page.read_bytes())
    return {"title": result["title"], "checks": result["checks"]}


@router.get("/api/topics/{name}/page", response_class=Response)
def page(panel: Panel, name: str) -> Response:
    """Return the page of the last recording in a sandbox."""
    _check(name)
    explanation = panel.explanations.get(name)
    if explanation is None:
        raise NotFound(
            "`{name}` is not recorded yet",
            code="not-recorded",
            fix="record it on the page Learn",
            name=name,
        )
    return Response(
        explanation.page,
        media_type="text/html; charset=utf-8",
        headers={"content-security-policy": REPORT_CSP},
    )


def _check(name: str) -> Topic:
    topic = TOPICS.get(name)
    if topic is None:
        raise NotFound(
            "there is no topic `{name}`",
            code="unknown-topic",
            fix="use one of {topics}",
            name=name,
            topics=", ".join(TOPICS),
        )
    return topic
