"""The ASGI application: routes, the static page, and the middleware in front of them."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles

from paceline.web.api import (
    changes,
    chat,
    choices,
    datasets,
    launch,
    learn,
    messages,
    plan,
    ranks,
    runs,
    series,
)
from paceline.web.responses import StrictJSONResponse, add_handlers
from paceline.web.security import SecurityMiddleware
from paceline.web.state import AppState

STATIC = Path(__file__).parent / "static"


def create_app(panel: AppState) -> FastAPI:
    """Return the application of one served folder."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # Search for runs while the browser starts.
        first_search = threading.Timer(0.05, panel.runs.entries)
        first_search.daemon = True
        first_search.start()
        yield
        await panel.close()

    app = FastAPI(
        title="Paceline's panel", version=version("paceline"), lifespan=lifespan,
        default_response_class=StrictJSONResponse, openapi_url="/api/openapi.json", docs_url=None,
        redoc_url=None, redirect_slashes=False,
    )  # fmt: skip
    app.state.panel = panel
    add_handlers(app)
    for routes in (
        runs,
        changes,
        series,
        ranks,
        launch,
        plan,
        choices,
        datasets,
        chat,
        learn,
        messages,
    ):
        app.include_router(routes.router)
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)
    app.add_middleware(SecurityMiddleware, host=panel.host, port=panel.port, token=panel.token)
    return app
