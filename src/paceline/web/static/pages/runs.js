// The list of runs, live ones first, with search, filters and selection for comparison.

import { get, stream } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { announce, errorState, icon, termOf } from "../lib/ui.js";
import { machineStrip } from "./machine.js";
import { noMatchingRuns, noRuns } from "./runs/empty.js";
import { rowCells, selectedIds, replaceCell } from "./runs/rows.js";

const PAGE = 200;
const RUNNING = ["live", "waiting"];
const SORTS = {
  started: (a, b) => (b.started_at ?? b.updated_at ?? 0) - (a.started_at ?? a.updated_at ?? 0),
  name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
  loss: (a, b) => compareNumbers(a.loss, b.loss),
  eval_loss: (a, b) => compareNumbers(a.eval_loss, b.eval_loss),
  rate: (a, b) =>
    compareNumbers(-(a.tokens_per_second ?? -Infinity), -(b.tokens_per_second ?? -Infinity)),
};
const SORT_LABELS = {
  started: "runs.started",
  name: "runs.name",
  loss: "runs.loss",
  eval_loss: "runs.eval_loss",
  rate: "runs.rate",
};
const compareNumbers = (a, b) =>
  (Number.isFinite(a) ? a : Infinity) - (Number.isFinite(b) ? b : Infinity) || 0;

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
  let firstRequest = get("api/runs"); // sent before the page is drawn, to save time
  firstRequest.catch(() => {});
  const view = frame(state, ctx, redraw);
  put(root, view.root);

  async function load() {
    const request = firstRequest ?? get("api/runs");
    firstRequest = null;
    const response = await request;
    state.folder = response.folder;
    state.runs = new Map(response.runs.map((run) => [run.id, run]));
    for (const id of [...selectedIds]) if (!state.runs.has(id)) selectedIds.delete(id);
    redraw();
  }

  function redraw() {
    ctx.setQuery({
      q: state.query,
      status: state.status,
      tag: state.tag,
      sort: state.sort === "started" ? null : state.sort,
    });
    view.draw();
  }

  try {
    await load();
  } catch (error) {
    view.fail(error);
  }
  let isFirst = true;
  const end = stream("api/stream", {
    // After a reconnection, changes may have been missed.
    open: () => (isFirst ? (isFirst = false) : load().catch(view.fail)),
    runs: ({ changed = [], removed = [] }) => {
      for (const run of changed) {
        const previous = state.runs.get(run.id);
        if (previous && previous.status !== run.status)
          announce(`${run.name}: ${t(`status.${run.status}`)}`);
        state.runs.set(run.id, run);
      }
      for (const id of removed) {
        state.runs.delete(id);
        selectedIds.delete(id);
      }
      view.draw();
    },
  });
  const timer = setInterval(() => view.tick(), 10_000);
  return () => {
    end();
    clearInterval(timer);
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
      h("option", { value: name, prop: { selected: name === state.sort } }, t(SORT_LABELS[name])),
    ),
  );
  const tagField = h("label", { class: "field" }, t("runs.tags"), tags);
  const selectionTools = h("div", { class: "end toolbar" });
  const tools = h(
    "div",
    { class: "toolbar runs-tools" },
    search,
    h("label", { class: "field" }, t("runs.status"), status),
    tagField,
    h("label", { class: "field" }, t("runs.sort"), sort),
    selectionTools,
  );
  const root = h(
    "div",
    { class: "stack" },
    h(
      "div",
      { class: "page-head" },
      h("h1", {}, t("runs.title")),
      heading,
      h("div", { class: "end" }, machine.node),
    ),
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
          ].map(([label, isNumber]) =>
            h("th", { scope: "col", class: isNumber ? "number" : null }, label),
          ),
        ),
      ),
      tbody,
    ),
  );

  function draw() {
    const runs = [...state.runs.values()];
    const live = runs.filter((run) => RUNNING.includes(run.status)).length;
    put(
      heading,
      t("runs.count", { n: runs.length }),
      live ? ` · ${t("runs.live", { n: live })}` : "",
    );
    tools.hidden = runs.length === 0;
    setOptions(
      status,
      [
        ["", t("runs.all")],
        ...[...new Set(runs.map((run) => run.status))].map((status) => [
          status,
          t(`status.${status}`),
        ]),
      ],
      state.status,
    );
    const knownTags = [...new Set(runs.flatMap((run) => run.tags ?? []))].sort();
    tagField.hidden = knownTags.length === 0 && !state.tag;
    setOptions(tags, [["", t("runs.all")], ...knownTags.map((tag) => [tag, tag])], state.tag);
    drawSelection();
    if (runs.length === 0) return void put(body, noRuns(state.folder));
    const matching = runs
      .filter((run) => matches(run, state))
      .sort((a, b) => running(b) - running(a) || SORTS[state.sort](a, b));
    if (matching.length === 0) return void put(body, noMatchingRuns(runs.length, clearFilters));
    fillRows(matching.slice(0, state.limit));
    const hiddenCount = matching.length - state.limit;
    if (table.parentNode !== body || hiddenCount > 0 || body.children.length > 1) {
      put(
        body,
        table,
        hiddenCount > 0
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
                t("runs.more", { n: Math.min(hiddenCount, PAGE) }),
              ),
            )
          : null,
      );
    }
    return undefined;
  }

  // A row is redrawn only if its run has changed, and moved only if the order has changed, so that
  // it keeps the focus.
  function fillRows(runs) {
    const ids = new Set(runs.map((run) => run.id));
    for (const [id, row] of rows)
      if (!ids.has(id)) {
        row.node.remove();
        rows.delete(id);
      }
    runs.forEach((run, index) => {
      const row = rows.get(run.id);
      if (!row)
        rows.set(run.id, {
          run,
          node: h("tr", { data: { id: run.id } }, rowCells(run, drawSelection)),
        });
      else if (row.run !== run) {
        row.run = run;
        const [selectionCell, ...otherCells] = rowCells(run, drawSelection);
        [...row.node.children]
          .slice(1)
          .forEach((cell, index) => replaceCell(cell, otherCells[index]));
        selectionCell.remove();
      }
      const node = rows.get(run.id).node;
      if (tbody.children[index] !== node) tbody.insertBefore(node, tbody.children[index] ?? null);
    });
  }

  function drawSelection() {
    const ids = [...selectedIds];
    const ready = ids.length >= 2;
    put(
      selectionTools,
      ids.length
        ? h(
            "button",
            {
              type: "button",
              class: "quiet",
              on: {
                click: () => {
                  selectedIds.clear();
                  for (const checkbox of tbody.querySelectorAll("input")) checkbox.checked = false;
                  drawSelection();
                  search.focus();
                },
              },
            },
            t("runs.clear"),
          )
        : null,
      ids.length === 1
        ? h(
            "a",
            { class: "button", id: "duplicate", href: `#/new?from=${ids[0]}` },
            icon("copy"),
            t("runs.duplicate"),
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
      for (const time of body.querySelectorAll("time[data-at]"))
        time.textContent = format.ago(Number(time.dataset.at));
    },
  };
}

const running = (run) => (RUNNING.includes(run.status) ? 1 : 0);

function matches(run, { query, status, tag }) {
  if (status && run.status !== status) return false;
  if (tag && !(run.tags ?? []).includes(tag)) return false;
  const text = [
    run.name,
    run.path,
    run.model,
    run.task,
    run.strategy,
    run.device,
    run.note,
    ...(run.tags ?? []),
  ]
    .join(" ")
    .toLowerCase();
  return query
    .toLowerCase()
    .split(/\s+/)
    .every((term) => text.includes(term));
}

function setOptions(select, choices, value) {
  const key = JSON.stringify([choices, value]);
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  if (!choices.some(([choice]) => choice === value)) choices = [...choices, [value, value]];
  put(
    select,
    choices.map(([choice, text]) =>
      h("option", { value: choice, prop: { selected: choice === value } }, text),
    ),
  );
}
