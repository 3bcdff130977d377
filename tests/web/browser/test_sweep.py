"""The pages of a sweep in a browser: its own page, offline, and the comparison of its runs."""

import re
from pathlib import Path

import pytest
from commands import MICRO, run
from panel_pages import serve
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two runs."""
    folder = tmp_path_factory.mktemp("sweeps") / "ranks"
    run(
        *MICRO,
        "max_steps=4",
        "eval_steps=2",
        "split_dataset_ratio=0.1",
        "lora.enable=true",
        "lora.rank=2,4",
        "--folder",
        str(folder),
        verb="sweep",
    )
    return folder


def test_page_of_a_sweep_is_complete_offline(browser: Browser, folder: Path) -> None:
    context = browser.new_context(offline=True)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((folder / "sweep.html").as_uri())
    rows = page.locator("#runs tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.locator(".badge")).to_have_text(["done", "done"])
    figures = [float(text) for text in rows.locator("td:nth-child(4)").all_inner_texts()]
    assert figures == sorted(figures)
    expect(page.locator("figure.plot")).to_have_count(2)
    evaluations = page.locator("figure.plot").first
    expect(evaluations.locator("path.s")).to_have_count(2)
    evaluations.locator(".area-box").hover()
    expect(evaluations.locator(".tip")).to_contain_text("rank=2")
    rows.first.locator("a").click()
    expect(page.get_by_text("Paceline report").first).to_be_visible()
    assert errors == []
    context.close()


def test_panel_opens_on_the_comparison_of_the_sweep(browser: Browser, folder: Path) -> None:
    server = serve(folder)
    try:
        page = browser.new_page()
        assert server.url.endswith("#/compare/all")
        page.goto(server.url)
        expect(page.locator(".compare-runs li")).to_have_count(2)
        dots = page.locator("#sweep .scatter a.dot")
        expect(dots).to_have_count(2)
        expect(page.locator("#sweep .parallel path")).to_have_count(2)
        expect(page.locator("#sweep .parallel-axis b")).to_have_text(["rank", "eval_loss"])
        differences = page.get_by_role("region", name="Config differences")
        expect(differences.locator("tbody tr th")).to_have_text(["lora.rank"])
        dots.last.click()  # the best one is on top
        expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("rank-[24]"))
        page.close()
    finally:
        server.stop()
