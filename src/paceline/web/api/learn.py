"""Routes of the page Learn: the topics of `paceline explain`, and their recordings."""

import tempfile
from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel
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
    """What to record: the default algorithm of the topic if ``algorithm`` is empty."""

    algorithm: str = ""


@router.get("/api/topics")
def topics(panel: Panel) -> JSONObject:
    """Return the topics in reading order, each with the names of its algorithms. ``recorded``: the
    algorithm that this server has recorded last, empty if the topic has none; null: nothing yet."""
    return {
        "topics": [
            {
                "name": name,
                "algorithms": list(topic.algorithms),
                "recorded": panel.explanations[name].algorithm
                if name in panel.explanations
                else None,
            }
            for name, topic in TOPICS.items()
        ]
    }


@router.post("/api/topics/{name}/record")
async def record(panel: Panel, name: str, body: Variant) -> JSONObject:
    """Record a topic with `paceline explain`, and keep its page until the server ends."""
    topic = _check(name)
    algorithm = body.algorithm
    if algorithm and algorithm not in topic.algorithms:
        raise unknown_name(f"{name} algorithm", algorithm, topic.algorithms)
    variant = [f"--algorithm={algorithm}"] if algorithm else []
    with tempfile.TemporaryDirectory(prefix="paceline-panel-") as folder:
        page = Path(folder) / "page.html"
        args = ["explain", name, *variant, f"--output={page}"]
        result = await panel.commands.run("explain", args, timeout_s=_TIMEOUT_S)
        recorded = algorithm or next(iter(topic.algorithms), "")
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
