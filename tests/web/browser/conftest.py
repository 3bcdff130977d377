"""Fixtures of the browser tests: a headless Chromium and a `paceline ui` process, each started once
per session."""

import shutil
from collections.abc import Iterator

import event_logs
import httpx
import made_runs
import pytest
from not_run import record_not_run
from panel_pages import ARGUMENTS, NAMES, Server, opened, serve, why_no_browser
from playwright.sync_api import Browser, Page, expect, sync_playwright

expect.set_options(timeout=20_000)  # tests must also pass on a busy machine


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the browser tests if there is no browser, and report it at the end."""
    browser_tests = [item for item in items if "browser" in getattr(item, "fixturenames", ())]
    if browser_tests and why_no_browser() is not None:
        items[:] = [item for item in items if item not in browser_tests]
        config.hook.pytest_deselected(items=browser_tests)
        record_not_run(
            config,
            "browser",
            f"NOT RUN: {len(browser_tests)} test(s) in a real browser: {why_no_browser()}.",
        )


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium of this machine, or else of Playwright."""
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        # The first page starts helper processes. They must exist before a test counts processes.
        page = browser.new_page()
        page.goto("about:blank")
        page.close()
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for a folder with different kinds of runs."""
    folder = tmp_path_factory.mktemp("runs")
    event_logs.finished(folder / "one", steps=40)
    config = {
        "model": "builtin:qwen2-micro",
        "task": "sft",
        "train_args": {"learning_rate": 0.002, "seed": 42},
    }
    event_logs.finished(folder / "two", steps=30, strategy="zero1", config=config)
    made_runs.world(folder / "cluster", ranks=16, hosts=2)
    made_runs.world(folder / f"named {made_runs.HARM}", ranks=4, hosts=1)
    made_runs.older(folder / "older")
    (folder / "one" / "model").mkdir()
    server = serve(folder)
    # The process that plans must exist before a test counts processes, as Chromium's.
    address, _, token = server.url.partition("?token=")
    httpx.post(f"{address}api/planner", headers={"X-Paceline-Token": token}).raise_for_status()
    yield server
    server.stop()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The list of runs in English with light colors."""
    with opened(browser, server.url) as page:
        yield page
