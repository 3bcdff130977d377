// The list of runs, live ones first, with search, filters and selection.

import { get, stream } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { announce, errorState, termOf } from "../lib/ui.js";
import { machineStrip } from "./machine.js";
import { MAX_COMPARED, compareLink, selectionButtons } from "./runs/actions.js";
import { noMatchingRuns, noRuns } from "./runs/empty.js";
import { SORTS, filterFields, filtersOf, matches, queryOf } from "./runs/filters.js";
import { rowCells, selectedIds, replaceCell } from "./runs/rows.js";
import { sparklines } from "./runs/sparkline.js";

const PAGE = 200;
const RUNNING = ["live", "waiting"];

export async function show(root, params, ctx) {
  ctx.title(t("runs.title"));
  const state = { runs: new Map(), folder: "", limit: PAGE, ...filtersOf(params.query) };
  let firstRequest = get("api/runs"); // sent before the page is drawn, to save time
  firstRequest.catch(() => {});
  const view = frame(state, redraw);
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
    ctx.setQuery(queryOf(state));
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

function frame(state, redraw) {
  const heading = h("span", { class: "muted", id: "runs-count" });
  const machine = machineStrip();
  const curves = sparklines();
  const body = h("div", {});
  const filters = filterFields(state, redraw);
  const selectionTools = h("div", { class: "end toolbar", id: "selection" });
  const feedback = h("div", { "aria-live": "polite" });
  const tools = h("div", { class: "toolbar runs-tools" }, filters.nodes, selectionTools);
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
    feedback,
    body,
  );
  const rows = new Map();
  const tbody = h("tbody", {});
  const table = runTable(tbody);

  function draw() {
    const runs = [...state.runs.values()];
    const live = runs.filter(isRunning).length;
    put(
      heading,
      t("runs.count", { n: runs.filter((run) => !run.archived || state.archived).length }),
      live ? ` · ${t("runs.live", { n: live })}` : "",
    );
    tools.hidden = runs.length === 0;
    filters.draw(runs);
    const matching = runs
      .filter((run) => matches(run, state))
      .sort((a, b) => isRunning(b) - isRunning(a) || SORTS[state.sort](a, b));
    drawSelection(matching);
    if (runs.length === 0) return void put(body, noRuns(state.folder));
    if (matching.length === 0) return void put(body, noMatchingRuns(runs.length, clear));
    fillRows(matching.slice(0, state.limit));
    const hiddenCount = matching.length - state.limit;
    if (table.parentNode !== body || hiddenCount > 0 || body.children.length > 1)
      put(body, table, hiddenCount > 0 ? h("p", {}, moreButton(hiddenCount)) : null);
    return undefined;
  }

  function clear() {
    state.archived ||= [...state.runs.values()].every((run) => run.archived);
    filters.clear();
  }

  const moreButton = (hiddenCount) =>
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
    );

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
          node: h("tr", { data: { id: run.id } }, rowCells(run, draw, curves.node)),
        });
      else if (row.run !== run) {
        row.run = run;
        const [selectionCell, ...otherCells] = rowCells(run, draw, curves.node);
        [...row.node.children]
          .slice(1)
          .forEach((cell, index) => replaceCell(cell, otherCells[index]));
        selectionCell.remove();
      }
      const node = rows.get(run.id).node;
      if (tbody.children[index] !== node) tbody.insertBefore(node, tbody.children[index] ?? null);
    });
    curves.show(runs);
  }

  function drawSelection(matching) {
    const selected = [...selectedIds].map((id) => state.runs.get(id)).filter(Boolean);
    const shownIds = matching.map((run) => run.id);
    const compared = Math.min(shownIds.length, MAX_COMPARED);
    put(
      selectionTools,
      selected.length
        ? h("button", { type: "button", class: "quiet", on: { click: clearSelection } }, [
            t("runs.clear"),
          ])
        : null,
      selected.length ? selectionButtons(selected, done) : null,
      selected.length >= 2
        ? compareLink("compare", [...selectedIds], t("runs.compare", { n: selected.length }), true)
        : shownIds.length >= 2 && !selected.length
          ? compareLink(
              "compare-all",
              shownIds,
              t(compared < shownIds.length ? "runs.compare.first" : "runs.compare.all", {
                n: compared,
              }),
            )
          : h("span", { class: "muted small" }, t("runs.compare.hint")),
    );
  }

  function clearSelection() {
    selectedIds.clear();
    for (const checkbox of tbody.querySelectorAll("input")) checkbox.checked = false;
    draw();
    filters.search.focus();
  }

  /** Show runs that were renamed, archived or deleted here, before the server reports it. */
  function done({ changed = [], removed = [], error = null }) {
    for (const run of changed) state.runs.set(run.id, run);
    for (const run of changed) if (run.archived && !state.archived) selectedIds.delete(run.id);
    for (const id of removed) {
      state.runs.delete(id);
      selectedIds.delete(id);
    }
    put(feedback, error ? errorState(error) : null);
    draw();
  }

  return {
    root,
    draw,
    end: () => {
      machine.end();
      curves.end();
    },
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

function runTable(tbody) {
  const columns = [
    [h("span", { class: "sr" }, t("runs.compare.hint"))],
    [t("runs.name")],
    [t("runs.progress")],
    [t("runs.epoch"), true],
    [t("runs.curve")],
    [termOf("runs.loss"), true],
    [termOf("runs.eval_loss"), true],
    [termOf("runs.rate"), true],
    [termOf("runs.duration"), true],
    [termOf("runs.strategy")],
    [t("runs.model")],
    [t("runs.started")],
  ];
  return h(
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
          columns.map(([label, isNumber]) =>
            h("th", { scope: "col", class: isNumber ? "number" : null }, label),
          ),
        ),
      ),
      tbody,
    ),
  );
}

const isRunning = (run) => (RUNNING.includes(run.status) ? 1 : 0);
