"""Errors, notices, faults and events of a run are shown in the language of the panel."""

from pathlib import Path

import event_logs
from panel_pages import opened, run_id, serve
from playwright.sync_api import Browser, expect

from paceline.core.texts import UserText


def test_texts_follow_the_language(browser: Browser, tmp_path: Path) -> None:
    log = event_logs.begin(tmp_path / "one")
    event_logs.emit_steps(log, 1, 3)
    cut = UserText("{truncated} samples truncated", code="samples-truncated", truncated=4, limit=8)
    log.notice(cut, "warning")
    log.notice(UserText("about {n}", code="no-template-of-this", n=1), "warning")
    log.notice("of an older version", "warning")
    killed = {"exits": "rank 1 was killed by SIGKILL", "rank_numbers": "1"}
    log.emit({
        "type": "fault", "step": 3, "ranks": [1], "hosts": [], "reason": killed["exits"],
        "code": "ranks-killed", "values": killed, "restart": 1, "seen_at": 0.0,
    })  # fmt: skip
    # The codes and values of a log come from anywhere.
    log.emit(
        {"type": "notice", "level": "warning", "text": "x", "code": "constructor", "values": {}}
    )
    log.close()
    server = serve(tmp_path)
    try:
        url = f"{server.url}#/run/{run_id(tmp_path, 'one')}/log"
        with opened(browser, url, locale="zh-CN") as page:
            lines = page.locator(".log-text")
            expect(lines.filter(has_text="4 个样本被截断到 max_length 8")).to_have_count(1)
            expect(lines.filter(has_text="about 1（英文）")).to_have_count(1)
            expect(lines.filter(has_text="of an older version（英文）")).to_have_count(1)
            expect(lines.filter(has_text="故障，rank 1：rank 1 的进程意外终止")).to_have_count(1)
            expect(lines.filter(has_text="（第 1 次重启）")).to_have_count(1)
            page.click("#language")
            expect(lines.filter(has_text="fault, rank 1: rank 1 was killed by SIG")).to_have_count(
                1
            )
            expect(lines.filter(has_text="英文")).to_have_count(0)
            page.click("#language")
            page.goto(f"{server.url}#/new")
            page.fill(
                "#yaml", "model: m\ndataset: d\ntrain_args:\n  learning_rat: 1\nlora: {rank: 0}\n"
            )
            mistakes = page.locator(".error-list li")
            expect(mistakes.first).to_contain_text("配置中没有键 train_args.learning_rat")
            expect(mistakes.first).to_contain_text("是否想写 train_args.learning_rate？")
            expect(mistakes.last).to_contain_text("超出允许的范围")
            expect(mistakes.last).to_contain_text("不小于 1 的整数")
            page.goto(f"{server.url}#/run/{'0' * 12}")
            expect(page.locator(".state-error")).to_contain_text("找不到训练任务")
    finally:
        server.stop()
