// The comparison of several runs: curves, results, config differences and notes.

import { get } from "../lib/api.js";
import { AXES } from "../lib/axis.js";
import { COLORS, DASHES, key } from "../lib/chart.js";
import { axisChoice, smoothField } from "../lib/controls.js";
import { h, put } from "../lib/dom.js";
import { addTexts, t } from "../lib/i18n.js";
import { badge, choice, copy, download, emptyState, icon } from "../lib/ui.js";
import { texts } from "../i18n/watch.js";
import { texts as compareTexts } from "../i18n/compare.js";
import { configCard } from "./compare/config.js";
import { SERIES, curveGrid } from "./compare/curves.js";
import { figureTable } from "./compare/figures.js";
import { notesCard } from "./compare/notes.js";
import { curvesCsv } from "./compare/save.js";
import { sweepCards } from "./compare/sweep.js";
import { fetchSeries } from "./run/series.js";

addTexts(texts);
addTexts(compareTexts);

const RENEW_MS = 3000;
const MAX_RUNS = 50; // of a request

export async function show(root, params, ctx) {
  ctx.title(t("compare.title"));
  const { ids, total } = await requestedIds(params.ids);
  const query = ctx.query();
  const state = {
    x: AXES.includes(query.get("x")) ? query.get("x") : "step",
    isLog: query.get("scale") === "log",
    weight: Number(query.get("smooth") ?? 0.6),
    sort: query.get("sort") ?? "",
    runs: [],
    answers: new Map(),
    differences: [],
  };
  const { runs, missing, config_differences, sweep } = await runsOf(ids);
  if (runs.length === 0) {
    put(
      root,
      emptyState(
        t("compare.few"),
        missing.length ? t("compare.missing", { ids: missing.join(", ") }) : t("compare.few.text"),
        h("a", { class: "button", href: "#/" }, t("nav.runs")),
      ),
    );
    return () => {};
  }
  state.runs = runs;
  // Of many runs, fewer points are requested, so that the page stays fast.
  const points = Math.max(200, Math.min(800, Math.round(8000 / runs.length)));
  const curvesOf = (run) => fetchSeries(run.id, { names: SERIES, points });
  const answers = await Promise.all(runs.map(curvesOf));
  runs.forEach((run, index) => state.answers.set(run.id, answers[index]));

  const lineStyle = (index) => ({
    color: COLORS[index % COLORS.length],
    dash: DASHES[index % DASHES.length],
  });
  const names = namesOf(runs);
  const curves = curveGrid(runs, names, lineStyle, state, ctx);
  const figures = h("div", {});

  function redraw() {
    ctx.setQuery({
      x: state.x === "step" ? null : state.x,
      scale: state.isLog ? "log" : null,
      smooth: state.weight === 0.6 ? null : state.weight,
      sort: state.sort,
    });
    curves.build();
  }

  const sweepNode = h("div", {});
  let drawnSweep = "";
  function drawSweep(newSweep) {
    if (!newSweep || JSON.stringify(newSweep) === drawnSweep) return;
    if (sweepNode.contains(document.activeElement)) return;
    drawnSweep = JSON.stringify(newSweep);
    put(sweepNode, sweepCards(newSweep));
  }
  drawSweep(sweep);
  const drawFigures = () =>
    put(
      figures,
      figureTable(runs, names, state.sort, lineStyle, (sort) => {
        state.sort = sort;
        redraw();
        drawFigures();
        figures.querySelector(`[data-sort="${sort.replace("-", "")}"]`)?.focus();
      }),
    );
  put(
    root,
    header(runs, names, missing, lineStyle, ids),
    total > ids.length
      ? h("p", { class: "muted" }, t("compare.latest", { n: ids.length, total }))
      : null,
    sweep ? sweepNode : null,
    controls(state, redraw, ctx, () => curvesCsv(runs, names, state.answers)),
    curves.node,
    figures,
    notesCard(runs, names, ctx),
    configCard(config_differences, runs, names),
  );
  curves.build();
  curves.openRequested();
  drawFigures();

  const timer = setInterval(() => renew().catch(() => {}), RENEW_MS);
  async function renew() {
    const live = runs.filter((run) => ["live", "waiting"].includes(run.status));
    if (!live.length || document.hidden) return;
    const updated = await get(`api/compare?ids=${live.map((run) => run.id).join(",")}`);
    for (const updatedRun of updated.runs)
      Object.assign(
        runs.find((run) => run.id === updatedRun.id),
        updatedRun,
      );
    for (const run of live)
      state.answers.set(run.id, await curvesOf(run));
    curves.renew();
    drawSweep(updated.sweep);
    if (!figures.contains(document.activeElement)) drawFigures();
  }
  return () => {
    clearInterval(timer);
    curves.end();
  };
}

/** Return the ids in the address, or of `all` runs the latest ones, and how many there are. */
async function requestedIds(text) {
  let ids = [...new Set(text.split(","))].filter(Boolean);
  if (text === "all")
    ids = (await get("api/runs")).runs.filter((run) => !run.archived).map((run) => run.id);
  return { ids: text === "all" ? ids.slice(0, MAX_RUNS) : ids, total: ids.length };
}

// If one of the runs no longer exists, the request fails; then only the others are compared.
async function runsOf(ids) {
  try {
    return {
      ...(await get(`api/compare?ids=${ids.map(encodeURIComponent).join(",")}`)),
      missing: [],
    };
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  const { runs } = await get("api/runs");
  const available = ids.filter((id) => runs.some((run) => run.id === id));
  const missing = ids.filter((id) => !available.includes(id));
  if (!available.length) return { runs: [], missing, config_differences: [] };
  return { ...(await get(`api/compare?ids=${available.join(",")}`)), missing };
}

/** Return unique names: for runs with the same name, their paths. */
function namesOf(runs) {
  return runs.map((run) =>
    runs.filter((other) => other.name === run.name).length > 1 ? run.path : run.name,
  );
}

function header(runs, names, missing, lineStyle, ids) {
  const idsWithout = (id) => ids.filter((otherId) => otherId !== id && !missing.includes(otherId));
  return h(
    "div",
    { class: "stack" },
    h(
      "div",
      { class: "page-head" },
      h("h1", {}, t("compare.title")),
      h("span", { class: "muted" }, t("runs.count", { n: runs.length })),
    ),
    missing.length
      ? h(
          "div",
          { class: "callout callout-warn" },
          icon("warning"),
          h("div", {}, t("compare.missing", { ids: missing.join(", ") })),
        )
      : null,
    h(
      "ul",
      { class: "compare-runs" },
      runs.map((run, index) =>
        h(
          "li",
          {},
          key(lineStyle(index)),
          h("a", { href: `#/run/${run.id}` }, names[index]),
          badge(run.status),
          runs.length > 1
            ? h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": t("compare.remove", { name: names[index] }),
                  on: {
                    click: () => (location.hash = `#/compare/${idsWithout(run.id).join(",")}`),
                  },
                },
                icon("close"),
              )
            : null,
        ),
      ),
    ),
  );
}

function controls(state, redraw, ctx, csv) {
  const link = h(
    "button",
    {
      type: "button",
      id: "copy-link",
      on: {
        click: async () => {
          link.lastChild.textContent = t((await copy(location.href)) ? "copied" : "copy.failed");
          ctx.announce(link.textContent);
        },
      },
    },
    icon("link"),
    h("span", {}, t("compare.link")),
  );
  const csvButton = h(
    "button",
    {
      type: "button",
      id: "save-csv",
      on: { click: () => download("compare.csv", csv(), "text/csv") },
    },
    icon("save"),
    t("compare.csv"),
  );
  return h(
    "div",
    { class: "toolbar" },
    axisChoice(state.x, (kind) => {
      state.x = kind;
      redraw();
    }),
    choice(
      t("compare.scale"),
      [
        ["linear", t("compare.linear")],
        ["log", t("compare.log")],
      ],
      state.isLog ? "log" : "linear",
      (scale) => {
        state.isLog = scale === "log";
        redraw();
      },
    ),
    smoothField(state.weight, (weight) => {
      state.weight = weight;
      redraw();
    }),
    h("div", { class: "end toolbar" }, csvButton, link),
  );
}
