// The list of runs, live ones first, with search, filters and selection for comparison.

import { get, stream } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { announce, errorState, icon, termOf } from "../lib/ui.js";
import { machineStrip } from "./machine.js";
import { noMatch, nothing } from "./runs/empty.js";
import { cells, chosen, replaceCell } from "./runs/rows.js";

const PAGE = 200;
const RUNNING = ["live", "waiting"];
const SORTS = {
  started: (one, two) => (two.started_at ?? two.updated_at ?? 0) - (one.started_at ?? one.updated_at ?? 0),
  name: (one, two) => one.name.localeCompare(two.name, undefined, { numeric: true }),
  loss: (one, two) => lower(one.loss, two.loss),
  eval_loss: (one, two) => lower(one.eval_loss, two.eval_loss),
  rate: (one, two) => lower(-(one.tokens_per_second ?? -Infinity), -(two.tokens_per_second ?? -Infinity)),
};
const SORT_WORDS = {
  started: "runs.started",
  name: "runs.name",
  loss: "runs.loss",
  eval_loss: "runs.eval_loss",
  rate: "runs.rate",
};
const lower = (one, two) => (Number.isFinite(one) ? one : Infinity) - (Number.isFinite(two) ? two : Infinity) || 0;

export async function show(root, params, ctx) {
  ctx.title(t("runs.title"));
  const state = {
    runs: new Map(),
    folder: "",
    limit: PAGE,
    query: params.query.get("q") ?? "",
    status: params.query.get("status") ?? "",
    tag: params.query.get("tag") ?? "",
    sort: params.query.get("sort") in SORTS ? params.query.get("sort") : "started",
  };
  let asked = get("api/runs"); // before anything is drawn: the page is what it waits for
  asked.catch(() => {});
  const view = frame(state, ctx, redraw);
  put(root, view.root);

  async function load() {
    const first = asked ?? get("api/runs");
    asked = null;
    const answer = await first;
    state.folder = answer.folder;
    state.runs = new Map(answer.runs.map((run) => [run.id, run]));
    for (const id of [...chosen]) if (!state.runs.has(id)) chosen.delete(id);
    redraw();
  }

  function redraw() {
    ctx.setQuery({ q: state.query, status: state.status, tag: state.tag, sort: state.sort === "started" ? null : state.sort });
    view.draw();
  }

  try {
    await load();
  } catch (error) {
    view.fail(error);
  }
  let first = true;
  const end = stream("api/stream", {
    open: () => (first ? (first = false) : load().catch(view.fail)), // what changed while nobody listened
    runs: ({ changed = [], removed = [] }) => {
      for (const run of changed) {
        const before = state.runs.get(run.id);
        if (before && before.status !== run.status) announce(`${run.name}: ${t(`status.${run.status}`)}`);
        state.runs.set(run.id, run);
      }
      for (const id of removed) {
        state.runs.delete(id);
        chosen.delete(id);
      }
      view.draw();
    },
  });
  const ticking = setInterval(() => view.tick(), 10_000);
  return () => {
    end();
    clearInterval(ticking);
    view.end();
  };
}

function frame(state, ctx, redraw) {
  const heading = h("span", { class: "muted", id: "runs-count" });
  const machine = machineStrip();
  const body = h("div", {});
  const search = h("input", {
    type: "search",
    id: "search",
    placeholder: t("runs.search.hint"),
    "aria-label": t("runs.search"),
    prop: { value: state.query },
    on: {
      input: (event) => {
        state.query = event.target.value;
        redraw();
      },
    },
  });
  const status = h("select", {
    id: "status",
    on: {
      change: (event) => {
        state.status = event.target.value;
        redraw();
      },
    },
  });
  const tags = h("select", {
    id: "tag",
    on: {
      change: (event) => {
        state.tag = event.target.value;
        redraw();
      },
    },
  });
  const sort = h(
    "select",
    {
      id: "sort",
      on: {
        change: (event) => {
          state.sort = event.target.value;
          redraw();
        },
      },
    },
    Object.keys(SORTS).map((name) =>
      h("option", { value: name, prop: { selected: name === state.sort } }, t(SORT_WORDS[name])),
    ),
  );
  const tagField = h("label", { class: "field" }, t("runs.tags"), tags);
  const pick = h("div", { class: "end toolbar" });
  const tools = h(
    "div",
    { class: "toolbar runs-tools" },
    search,
    h("label", { class: "field" }, t("runs.status"), status),
    tagField,
    h("label", { class: "field" }, t("runs.sort"), sort),
    pick,
  );
  const root = h(
    "div",
    { class: "stack" },
    h("div", { class: "page-head" }, h("h1", {}, t("runs.title")), heading, h("div", { class: "end" }, machine.node)),
    tools,
    body,
  );
  const rows = new Map();
  const tbody = h("tbody", {});

  const table = h(
    "div",
    { class: "card flush" },
    h(
      "table",
      { class: "runs" },
      h("caption", { class: "sr" }, t("runs.title")),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          [
            [h("span", { class: "sr" }, t("runs.compare.hint"))],
            [t("runs.name")],
            [t("runs.progress")],
            [termOf("runs.loss"), true],
            [termOf("runs.eval_loss"), true],
            [termOf("runs.rate"), true],
            [termOf("runs.strategy")],
            [t("runs.model")],
            [t("runs.started")],
          ].map(([head, number]) => h("th", { scope: "col", class: number ? "number" : null }, head)),
        ),
      ),
      tbody,
    ),
  );

  function draw() {
    const all = [...state.runs.values()];
    const live = all.filter((run) => RUNNING.includes(run.status)).length;
    put(heading, t("runs.count", { n: all.length }), live ? ` · ${t("runs.live", { n: live })}` : "");
    tools.hidden = all.length === 0;
    options(
      status,
      [["", t("runs.all")], ...[...new Set(all.map((run) => run.status))].map((one) => [one, t(`status.${one}`)])],
      state.status,
    );
    const known = [...new Set(all.flatMap((run) => run.tags ?? []))].sort();
    tagField.hidden = known.length === 0 && !state.tag;
    options(tags, [["", t("runs.all")], ...known.map((one) => [one, one])], state.tag);
    drawPick();
    if (all.length === 0) return void put(body, nothing(state.folder));
    const found = all
      .filter((run) => matches(run, state))
      .sort((one, two) => running(two) - running(one) || SORTS[state.sort](one, two));
    if (found.length === 0) return void put(body, noMatch(all.length, clearFilters));
    fillRows(found.slice(0, state.limit));
    const more = found.length - state.limit;
    if (table.parentNode !== body || more > 0 || body.children.length > 1) {
      put(
        body,
        table,
        more > 0
          ? h(
              "p",
              {},
              h(
                "button",
                {
                  type: "button",
                  on: {
                    click: () => {
                      state.limit += PAGE;
                      draw();
                    },
                  },
                },
                t("runs.more", { n: Math.min(more, PAGE) }),
              ),
            )
          : null,
      );
    }
    return undefined;
  }

  // A row is redrawn only if its run has changed, and moved only if the order has, so that the focus stays.
  function fillRows(found) {
    const wanted = new Set(found.map((run) => run.id));
    for (const [id, one] of rows)
      if (!wanted.has(id)) {
        one.node.remove();
        rows.delete(id);
      }
    found.forEach((run, at) => {
      const known = rows.get(run.id);
      if (!known) rows.set(run.id, { run, node: h("tr", { data: { id: run.id } }, cells(run, drawPick)) });
      else if (known.run !== run) {
        known.run = run;
        const [box, ...rest] = cells(run, drawPick);
        [...known.node.children].slice(1).forEach((cell, index) => replaceCell(cell, rest[index]));
        box.remove();
      }
      const node = rows.get(run.id).node;
      if (tbody.children[at] !== node) tbody.insertBefore(node, tbody.children[at] ?? null);
    });
  }

  function drawPick() {
    const ids = [...chosen];
    const ready = ids.length >= 2;
    put(
      pick,
      ids.length
        ? h(
            "button",
            {
              type: "button",
              class: "quiet",
              on: {
                click: () => {
                  chosen.clear();
                  for (const box of tbody.querySelectorAll("input")) box.checked = false;
                  drawPick();
                  search.focus();
                },
              },
            },
            t("runs.clear"),
          )
        : null,
      ready
        ? h(
            "a",
            { class: "button main", id: "compare", href: `#/compare/${ids.join(",")}` },
            icon("compare"),
            t("runs.compare", { n: ids.length }),
          )
        : h("span", { class: "muted small" }, t("runs.compare.hint")),
    );
  }

  function clearFilters() {
    Object.assign(state, { query: "", status: "", tag: "" });
    search.value = "";
    redraw();
    search.focus();
  }

  return {
    root,
    draw,
    end: machine.end,
    fail: (error) =>
      put(
        body,
        errorState(error, () => location.reload()),
      ),
    tick: () => {
      for (const one of body.querySelectorAll("time[data-at]")) one.textContent = format.ago(Number(one.dataset.at));
    },
  };
}

const running = (run) => (RUNNING.includes(run.status) ? 1 : 0);

function matches(run, { query, status, tag }) {
  if (status && run.status !== status) return false;
  if (tag && !(run.tags ?? []).includes(tag)) return false;
  const text = [run.name, run.path, run.model, run.task, run.strategy, run.device, run.note, ...(run.tags ?? [])]
    .join(" ")
    .toLowerCase();
  return query
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

function options(select, wanted, value) {
  const key = JSON.stringify([wanted, value]);
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  if (!wanted.some(([one]) => one === value)) wanted = [...wanted, [value, value]];
  put(
    select,
    wanted.map(([one, text]) => h("option", { value: one, prop: { selected: one === value } }, text)),
  );
}
