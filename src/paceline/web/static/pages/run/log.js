// The tab Log of a run: its messages, newest last.

import { get } from "../../lib/api.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { choice, icon } from "../../lib/ui.js";

const TAIL = 500;

export async function show(root, store) {
  let lines = [];
  let level = "all";
  let searchText = "";
  const list = h("ol", { class: "log", tabindex: 0, "aria-label": t("log.label") });
  const note = h("p", { class: "muted small" });
  const search = h("input", {
    type: "search",
    "aria-label": t("log.search"),
    placeholder: t("log.search"),
    on: {
      input: (event) => {
        searchText = event.target.value.toLowerCase();
        draw();
      },
    },
  });
  put(
    root,
    h(
      "div",
      { class: "toolbar" },
      choice(
        t("log.level"),
        [
          ["all", t("log.all")],
          ["warning", t("log.warnings")],
        ],
        "all",
        (selected) => {
          level = selected;
          draw();
        },
      ),
      search,
      note,
    ),
    h("section", { class: "card flush" }, list),
  );

  function draw() {
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    const shownLines = lines.filter(
      (line) =>
        (level === "all" || line.level !== "info") && line.text.toLowerCase().includes(searchText),
    );
    put(
      list,
      shownLines.length
        ? shownLines.map(logLine)
        : h("li", { class: "log-line muted" }, t(lines.length ? "log.none_match" : "log.none")),
    );
    put(note, lines.length >= TAIL ? t("log.tail", { n: TAIL }) : "");
    if (atEnd) list.scrollTop = list.scrollHeight;
  }
  async function load() {
    ({ lines } = await get(`api/runs/${store.id}/log?tail=${TAIL}`));
    draw();
  }
  await load();
  list.scrollTop = list.scrollHeight;
  let timer = null;
  const loadSoon = () =>
    (timer ??= setTimeout(() => {
      timer = null;
      load().catch(() => {});
    }, 1000));
  const unsubscribers = [store.on("append", loadSoon), store.on("reload", loadSoon)];
  return () => {
    clearTimeout(timer);
    unsubscribers.forEach((unsubscribe) => unsubscribe());
  };
}

const logLine = ({ time, level, text }) =>
  h(
    "li",
    { class: `log-line log-${level}` },
    h("span", { class: "log-time", title: format.time(time) }, time ? format.clock(time) : ""),
    level === "info" || !level
      ? null
      : h(
          "span",
          { class: "log-level" },
          icon(level === "error" ? "fault" : "warning"),
          t(`level.${level}`),
        ),
    h("span", { class: "log-text" }, text),
  );
