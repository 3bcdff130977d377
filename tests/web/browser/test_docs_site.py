"""The documentation site: it builds without warnings, and its search finds English and Chinese."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

DOCS = Path(__file__).parents[3] / "docs"

pytestmark = pytest.mark.soak


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built and served."""
    folder = str(tmp_path_factory.mktemp("site"))
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*build, str(DOCS), folder], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("query", ["straggler", "梯度累积", "检查点"])
def test_search_finds_glossary(browser: Browser, site: str, query: str) -> None:
    page = browser.new_page()
    try:
        page.goto(f"{site}/search.html?q={query}")
        results = page.locator("#search-results")
        expect(results.get_by_role("link", name="Glossary").first).to_be_visible()
        page.goto(f"{site}/search.html?q=qqqqzzzz")
        expect(results).to_contain_text("did not match any documents")
    finally:
        page.close()
