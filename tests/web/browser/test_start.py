"""Start, stop and resume real runs in a browser, and chat with the trained model."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from event_logs import begin
from panel_pages import Server, opened, run_id, serve
from playwright.sync_api import Browser, Locator, Page, expect
from starts import MICRO, events
from test_access import OVERFLOW

LONG_MS = 90_000  # for steps of a run on a busy machine


@pytest.fixture
def panel(tmp_path: Path) -> Iterator[Server]:
    """A server for runs that the test starts. It stops with all its processes before processes are
    counted."""
    panel = serve(tmp_path)
    yield panel
    panel.stop()


@pytest.fixture
def form(browser: Browser, panel: Server) -> Iterator[Page]:
    """The form with the config of a small run."""
    with opened(browser, f"{panel.url}#/new") as page:
        expect(page.locator("#verdict .good")).to_be_visible()
        page.fill("#yaml", MICRO % 6)
        expect(page.locator("#verdict .good")).to_be_visible()
        yield page


def field(page: Page, key: str) -> Locator:
    """Return the control of a key, in its group, which is opened if it is collapsed."""
    control = page.locator(f'[data-key="{key}"]').locator("input, select").first
    control.evaluate("node => node.closest('details')?.setAttribute('open', '')")
    return control


@pytest.mark.soak
def test_form_and_yaml_stay_in_sync(form):
    yaml = form.locator("#yaml")
    expect(field(form, "train_args.max_steps")).to_have_value("6")
    field(form, "train_args.learning_rate").fill("1e-3")
    expect(yaml).to_have_value(re.compile(r"# the smallest model\n[\s\S]*  learning_rate: 1e-3\n"))
    field(form, "lora.enable").check()
    field(form, "train_args.packing").select_option("false")
    expect(yaml).to_have_value(re.compile(r"lora:\n  enable: true\n[\s\S]*  packing: false\n"))
    form.locator('[data-key="train_args.max_steps"] .reset').click()
    expect(yaml).not_to_have_value(re.compile("max_steps"))
    # Edits of the text change the form. An error is shown at its line and its field, and disables
    # the start button.
    yaml.fill("model: m\ndataset: d\ntrain_args:\n  max_length: 2\n  lerning_rate: 1\n")
    expect(form.locator(".error-list li")).to_have_count(2)
    expect(form.locator(".error-list .place").first).to_have_text("line 4")
    expect(field(form, "model")).to_have_value("m")
    expect(field(form, "train_args.max_length")).to_have_attribute("aria-invalid", "true")
    expect(form.locator("#start")).to_be_disabled()
    form.locator(".error-list .place").last.click()
    assert form.evaluate("document.getSelection().toString()") == "  lerning_rate: 1"
    form.locator('[data-preset="classify"]').click()
    expect(field(form, "task")).to_have_value("classify")
    expect(form.locator("#start")).to_be_enabled()


@pytest.mark.soak
def test_upload_and_preview_dataset(form, panel):
    rows = [
        {"prompt": "What is a pace line?", "completion": "Riders in a row."},
        {"prompt": "<b>", "completion": "bold " * 60},
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    form.set_input_files(
        "#upload", {"name": "../mine.jsonl", "mimeType": "application/json", "buffer": content}
    )
    expect(field(form, "dataset")).to_have_value("./datasets/mine.jsonl")
    assert (panel.folder / "datasets" / "mine.jsonl").read_bytes() == content
    form.locator("#preview-button").click()
    shown = form.locator(".rows > li")
    expect(shown).to_have_count(2, timeout=LONG_MS)
    expect(shown.nth(0).locator("mark.label")).to_have_text("Riders in a row.<|im_end|>")
    expect(shown.nth(1).locator("del.cut").first).to_be_visible()
    assert shown.nth(1).locator("b").count() == 0
    form.locator("#choose-data").click()
    form.locator(".data-item", has_text="builtin:python-docs").click()
    expect(field(form, "dataset")).to_have_value("builtin:python-docs")
    form.locator('[data-preset="classify"]').click()
    expect(field(form, "dataset")).to_have_value("builtin:digits")
    expect(form.locator("#start")).to_be_enabled()
    form.locator("#preview-button").click()
    expect(form.locator(".pictures img")).to_have_count(5, timeout=LONG_MS)
    assert form.locator(".pictures img").evaluate_all(
        "images => images.every((image) => image.complete && image.naturalWidth > 0)"
    )


@pytest.mark.soak
def test_preview_of_labeled_texts(form):
    form.locator('[data-preset="classify"]').click()
    expect(field(form, "dataset")).to_have_value("builtin:digits")
    field(form, "dataset").fill("builtin:python-kinds")
    field(form, "model").fill("builtin:qwen2-micro")
    form.locator("#preview-button").click()
    shown = form.locator(".rows > li")
    expect(shown).to_have_count(5, timeout=LONG_MS)
    expect(shown.nth(0).locator("mark.label")).to_contain_text("label")
    expect(shown.nth(0).locator("dt")).to_have_text("text")


@pytest.mark.soak
def test_start_run_then_chat_and_export(form, panel):
    expect(form.locator("#plan-verdict")).to_contain_text("Fits in memory", timeout=LONG_MS)
    field(form, "lora.enable").check()
    expect(form.locator("#yaml")).to_have_value(re.compile("enable: true"))
    form.fill("#run-name", "a b")
    expect(form.locator("#name-wrong")).not_to_be_empty()
    form.fill("#run-name", "mine")
    form.locator("#yaml").scroll_into_view_if_needed()
    expect(form.locator("#start")).to_be_in_viewport()
    form.locator("#start").click()
    expect(form).to_have_url(re.compile(r"#/run/[0-9a-f]{12}$"), timeout=LONG_MS)
    expect(form.locator("h2", has_text="Starting")).to_be_visible()
    expect(form.locator("h2", has_text="Starting")).to_have_count(0, timeout=LONG_MS)
    expect(form.locator(".run-head .badge-done")).to_be_visible(timeout=LONG_MS)
    run = panel.folder / "mine"
    assert len(events(run, "step")) == 6
    first_line = (run / "panel.yaml").read_text().splitlines()[0]
    assert first_line == "model: builtin:qwen2-micro  # the smallest model"

    form.locator("#chat").click()
    form.locator(".choice label", has_text="Both").click()
    form.fill("#chat-max-tokens", "8")
    form.fill("#question", "What is os?")
    form.keyboard.press("Enter")
    for side in ("tuned", "base"):
        expect(form.locator(f".answer-{side} p")).to_contain_text("tokens/s", timeout=LONG_MS)
    form.locator(".choice label", has_text="Fine-tuned").click()
    form.fill("#chat-max-tokens", "4096")
    form.fill("#chat-temperature", "2")
    form.fill("#question", "Go on.")
    form.locator("#send").click()
    expect(form.locator(".turn").last.locator(".answer-text")).not_to_be_empty(timeout=LONG_MS)
    form.locator("#chat-stop").click()
    expect(form.locator(".turn").last.locator("p")).to_have_text("Stopped.")
    expect(form.locator("#send")).to_be_enabled()

    form.locator("#export").click()
    expect(form.locator(".command code").last).to_have_text(str(run / "exported"), timeout=LONG_MS)
    assert (run / "exported" / "model.safetensors").is_file()


def test_duplicate_opens_the_config_of_the_run(browser: Browser, panel: Server) -> None:
    """From the run, its config and the list; the new run gets another name and folder."""
    run = panel.folder / "mine-0102-030405"
    begin(run)
    (run / "config.yaml").write_text(f"{MICRO % 7}output_dir: {run}\n")
    with opened(browser, f"{panel.url}#/") as page:
        page.locator("tbody input").first.check()
        page.locator("#duplicate").click()
        expect(page.locator("#yaml")).to_have_value(MICRO % 7)
        expect(page.locator("#run-name")).to_have_value(re.compile(r"^mine-\d{4}-\d{6}$"))
        expect(page.locator("#run-name")).not_to_have_value(run.name)
        expect(page.locator("#start")).to_be_enabled()
        page.goto(f"{panel.url}#/run/{run_id(panel.folder, run.name)}")
        page.locator("#duplicate").click()
        expect(page.locator("#yaml")).to_have_value(MICRO % 7)
        page.goto(f"{panel.url}#/run/{run_id(panel.folder, run.name)}/config")
        page.locator("a", has_text="New run from this config").click()
        expect(page.locator("#yaml")).to_have_value(MICRO % 7)


@pytest.mark.soak
def test_stop_run_and_resume_with_config_change(form, panel):
    field(form, "train_args.max_steps").fill("5000")
    expect(form.locator("#yaml")).to_have_value(re.compile("max_steps: 5000"))
    expect(form.locator("#verdict .good")).to_be_visible()
    form.fill("#run-name", "long")
    form.locator("#start").click()
    expect(form.locator(".run-head .badge-live")).to_be_visible(timeout=LONG_MS)
    form.locator("#stop").click()
    form.locator("#stop-yes").click()
    expect(form.locator(".run-head .badge-stopped")).to_be_visible(timeout=LONG_MS)
    run = panel.folder / "long"
    reached = events(run, "run_end")[-1]["step"]

    form.locator("#resume").click()
    expect(form.locator("#no-changes")).to_be_visible()
    expect(form.locator("#start")).to_be_enabled()
    field(form, "train_args.max_steps").fill(str(reached + 2))
    expect(form.locator("#changes tbody tr")).to_have_count(1)
    expect(form.locator("#changes")).to_contain_text("5000")
    expect(form.locator("#start")).to_be_disabled()  # until the change is allowed
    form.locator("#allow").check()
    form.locator("#start").click()
    expect(form).to_have_url(re.compile(r"#/run/[0-9a-f]{12}$"), timeout=LONG_MS)
    expect(form.locator(".run-head .badge-done")).to_be_visible(timeout=LONG_MS)
    assert events(run, "resume")[-1]["step"] == reached
    assert events(run, "run_end")[-1]["step"] == reached + 2


def test_duplicate_that_fails_keeps_its_config(browser: Browser, panel: Server) -> None:
    run = panel.folder / "mine"
    begin(run)
    (panel.folder / "notes.jsonl").write_text('{"note": 1}\n')
    yaml = (MICRO % 7).replace("builtin:python-docs", str(panel.folder / "notes.jsonl"))
    assert "notes.jsonl" in yaml
    (run / "config.yaml").write_text(yaml)
    with opened(browser, f"{panel.url}#/new?from={run_id(panel.folder, run.name)}") as page:
        expect(page.locator("#yaml")).to_have_value(yaml)
        page.locator("#start").click()
        expect(page.locator(".state-error")).to_contain_text("notes.jsonl", timeout=LONG_MS)
        if page.locator("#edit").count():  # the run's page was open when the error came
            page.locator("#edit").click()
        expect(page.locator("#yaml")).to_have_value(yaml)


def test_run_is_stopped_while_it_starts(form, panel):
    form.fill("#run-name", "early")
    form.locator("#start").click()
    form.locator("#stop").click()
    form.locator("#stop-yes").click()
    expect(form.locator(".run-head .badge-stopped")).to_be_visible(timeout=LONG_MS)
    expect(form.locator(".run-head")).to_contain_text("stopped before its first event")


@pytest.mark.soak
def test_hung_rank_is_shown_and_second_stop_ends_run(form, panel):
    form.fill("#yaml", MICRO % 5000)
    expect(form.locator("#verdict .good")).to_be_visible()
    form.fill("#run-name", "stuck")
    form.locator("#start").click()
    expect(form.locator("[data-key='f.progress']")).to_contain_text(
        re.compile(r"step [1-9]"), timeout=LONG_MS
    )
    form.get_by_role("link", name="Ranks", exact=True).click()
    now = form.get_by_role("region", name="Ranks").locator("tbody tr")
    expect(now.nth(1)).to_contain_text(re.compile(r"step [1-9]"))
    run = panel.folder / "stuck"
    pid = json.loads((run / "heartbeats.json").read_text())["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    expect(now.nth(1)).to_contain_text("process is suspended", timeout=LONG_MS)
    expect(now.nth(1)).to_contain_text("no progress for", timeout=LONG_MS)
    expect(now.nth(0)).to_contain_text("waiting for", timeout=LONG_MS)
    for label in ("Stop", "End now"):
        expect(form.locator("#stop")).to_have_text(label)
        form.locator("#stop").click()
        form.locator("#stop-yes").click()
        # A second request from another page is rejected, because a second signal would end the run.
        if label == "Stop":
            expect(form.locator("#stop")).to_have_text("End now")
            address, _, token = panel.url.partition("?token=")
            again = f"{address}api/runs/{run_id(panel.folder, 'stuck')}/stop"
            assert (
                form.request.post(again, data={}, headers={"X-Paceline-Token": token}).status == 409
            )
    expect(form.locator(".run-head .badge-stopped")).to_be_visible(timeout=LONG_MS)
    assert not psutil.pid_exists(pid)


def test_start_error_is_shown_and_the_form_keeps_what_was_typed(form, panel):
    data = panel.folder / "notes.jsonl"
    data.write_text('{"note": 1}\n')
    field(form, "dataset").fill(str(data))
    expect(form.locator("#yaml")).to_have_value(re.compile("notes.jsonl"))
    expect(form.locator("#verdict .good")).to_be_visible()
    form.locator("#start").click()
    expect(form.locator(".state-error")).to_contain_text("notes.jsonl", timeout=LONG_MS)
    expect(form.locator(".state-error")).to_contain_text("prompt_completion")
    folders = [path.name for path in panel.folder.iterdir() if path.is_dir()]
    assert not any(name.startswith("first") for name in folders)
    if form.locator("#edit").count():  # the run's page was open when the error came
        form.locator("#edit").click()
    expect(field(form, "dataset")).to_have_value(str(data))


@pytest.mark.soak
def test_form_without_token_explains_how_to_get_it(browser, panel):
    with opened(browser, panel.url.partition("?")[0] + "#/new") as page:
        expect(page.locator(".state-error")).to_contain_text("open the link")


def test_form_and_dialogs_fit_each_width_in_chinese(browser, panel):
    with opened(browser, f"{panel.url}#/new", locale="zh-CN") as page:
        for width in (1440, 768, 390):
            page.set_viewport_size({"width": width, "height": 844})
            expect(page.locator("#verdict .good")).to_have_text("配置有效。")
            assert page.evaluate(OVERFLOW) <= 1
            expect(page.locator('[data-preset="recommend"] strong')).to_have_text("推荐系统")
            for button in ("choose-data", "choose-model", "paste"):
                page.locator(f"#{button}").click()
                dialog = page.locator("dialog")
                expect(dialog.locator(".data-item, textarea").first).to_be_visible()
                box = dialog.bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width
                assert dialog.evaluate("node => node.scrollWidth <= node.clientWidth")
                page.keyboard.press("Escape")
                expect(page.locator(f"#{button}")).to_be_focused()
        expect(page.locator('[data-key="model"] p.muted')).to_contain_text("本地文件夹")


def test_what_the_form_offers(browser, tmp_path):
    """A preset whose file is missing, the dialogs, lists with other values, a config of another
    tool; and the button while a run is starting."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "output").mkdir()
    panel = serve(tmp_path / "output", start_folder=tmp_path)
    try:
        with opened(browser, f"{panel.url}#/new") as page:
            expect(page.locator("#verdict .good")).to_be_visible()
            assert page.locator(".fields [data-key]").count() <= 10
            expect(page.locator(".more-group [data-key]:visible")).to_have_count(0)
            page.locator('[data-preset="lora"]').click()
            wrong = page.locator('[data-key="dataset"] .bad')
            expect(wrong).to_contain_text("./datasets/mine.jsonl does not exist")
            expect(wrong).to_contain_text("Choose a dataset")
            expect(page.locator(".error-list .place")).to_have_text("line 4")
            expect(page.locator("#start")).to_be_disabled()
            page.locator("#choose-data").click()
            page.get_by_label("Search the list").fill("mine")
            expect(page.locator(".data-item")).to_have_count(1)
            page.locator(".data-item").click()
            expect(field(page, "dataset")).to_have_value("./data/mine.jsonl")
            expect(wrong).to_be_empty()
            expect(page.locator("#start")).to_be_enabled()
            page.locator("#choose-model").click()
            page.locator(".data-item", has_text="builtin:qwen2-micro").click()
            expect(field(page, "model")).to_have_value("builtin:qwen2-micro")

            field(page, "task").select_option(label="other…")
            other = page.get_by_label("Another value of task")
            other.fill("./mine.py:Task")
            expect(page.locator("#yaml")).to_have_value(re.compile(r"task: ./mine\.py:Task\n"))
            expect(page.locator('[data-key="task"] .bad')).to_contain_text("./mine.py does not")
            field(page, "task").select_option("pretrain")
            expect(other).to_be_hidden()
            expect(page.locator("#yaml")).to_have_value(re.compile(r"task: pretrain\n"))
            field(page, "train_args.gradient_checkpointing").select_option("selective")
            expect(page.locator("#yaml")).to_have_value(
                re.compile(r"gradient_checkpointing: selective\n")
            )
            expect(page.locator("#plan-verdict")).to_be_visible(timeout=LONG_MS)
            expect(page.locator("#plan:not(.old)")).to_be_visible(timeout=LONG_MS)
            field(page, "train_args.max_length").fill("64")
            assert page.locator("#plan.old").count() == 1  # at once

            page.locator("#paste").click()
            page.locator("#pasted").fill(
                "model_name_or_path: builtin:qwen2-micro\nfinetuning_type: lora\n"
                "dataset: ./data/mine.jsonl\ncutoff_len: 128\n"
            )
            page.locator("#convert").click()
            expect(page.locator(".paste-feedback")).to_contain_text("LLaMA-Factory")
            page.keyboard.press("Escape")
            expect(field(page, "train_args.max_length")).to_have_value("128")
            expect(field(page, "lora.enable")).to_be_checked()

            page.route("**/api/start", lambda route: None)  # the request stays open
            expect(page.locator("#start")).to_be_enabled()
            page.locator("#start").click()
            expect(page.locator("#start")).to_be_disabled()
            expect(page.locator("#start-why")).to_have_text("Starting…")
    finally:
        panel.stop()
