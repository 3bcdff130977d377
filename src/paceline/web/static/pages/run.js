// The page of a run: its header, its tabs, and the event stream that they share.

import { get, post, stream } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { addTexts, t } from "../lib/i18n.js";
import { badge, emptyState, errorState, figure, figures, icon, tabLinks } from "../lib/ui.js";
import { texts } from "../i18n/watch.js";
import { watchStart } from "./run/starting.js";
import { describeAxes, describeStrategy } from "./run/strategy.js";

addTexts(texts);

const TABS = [
  "overview",
  "ranks",
  "traffic",
  "memory",
  "world",
  "samples",
  "log",
  "config",
  "checkpoints",
  "report",
];
// After these events, the details of the run are requested again.
const DETAIL_EVENTS = ["memory", "run_end", "sample", "checkpoint", "eval"];
const TAB_MODULES = {
  overview: () => import("./run/overview.js"),
  ranks: () => import("./run/ranks.js"),
  traffic: () => import("./run/traffic.js"),
  memory: () => import("./run/memory.js"),
  world: () => import("./run/world.js"),
  samples: () => import("./run/samples.js"),
  log: () => import("./run/log.js"),
  config: () => import("./run/config.js"),
  checkpoints: () => import("./run/checkpoints.js"),
  report: () => import("./run/report.js"),
};

export async function show(root, params, ctx) {
  const header = h("div", { class: "stack run-head" });
  const starting = h("div", { class: "stack", "aria-live": "polite" });
  const tabs = h("div", {});
  const body = h("div", { class: "stack", id: "tab" });
  put(root, header, starting, tabs, body);
  put(body, h("p", { class: "muted" }, t("loading")));
  const store = await makeStore(params.id, ctx);
  let removeTab = null;
  let openCount = 0;

  const stopChange = store.on("change", () => drawHeader(header, store, ctx));
  const start =
    store.run.status === "waiting" && ctx.hasToken()
      ? watchStart(starting, store.id, {
          name: store.run.name,
          isNew: !store.run.has?.config,
          onFailure: () => put(body),
        })
      : null;
  const stopDeleted = store.on("deleted", () => {
    if (!start?.hasFailed()) put(body, deletedState());
  });
  const timer = setInterval(() => drawHeader(header, store, ctx), 5000);
  drawHeader(header, store, ctx);

  async function open({ tab: requestedTab, query }) {
    const name = TABS.includes(requestedTab) ? requestedTab : "overview";
    ctx.title(`${store.run.name} · ${t(`tab.${name}`)}`);
    put(
      tabs,
      tabLinks(
        t("run.tabs"),
        TABS.map((tabName) => [tabName, t(`tab.${tabName}`), `#/run/${store.id}/${tabName}`]),
        name,
      ),
    );
    tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    const thisOpen = ++openCount;
    removeTab?.();
    removeTab = null;
    const tabBody = h("div", { class: "stack" }, h("p", { class: "muted" }, t("loading")));
    put(body, tabBody);
    try {
      const module = await TAB_MODULES[name]();
      const remove = await module.show(tabBody, store, { ...ctx, params: query });
      if (thisOpen !== openCount) remove?.();
      else removeTab = remove;
    } catch (error) {
      if (error.name !== "ApiError") console.error(error);
      if (thisOpen === openCount)
        put(
          tabBody,
          error.status === 404 && store.isDeleted
            ? deletedState()
            : errorState(error, () => open({ tab: requestedTab, query })),
        );
    }
  }
  await open(params);
  store.listen();

  const remove = () => {
    openCount++;
    clearInterval(timer);
    start?.end();
    stopChange();
    stopDeleted();
    removeTab?.();
    store.end();
  };
  remove.update = (next) => open(next);
  return remove;
}

const deletedState = () =>
  emptyState(
    t("run.deleted"),
    t("run.deleted.text"),
    h("a", { class: "button", href: "#/" }, t("nav.runs")),
  );

/**
 * Return the state of the run.
 *
 * - `run`: the response of `api/runs/ID`; the event stream updates its summary.
 * - `on(name, listener)`: subscribe to `change` (the summary has changed), `append` (new events),
 *   `reload` (anything may have changed, so request the data again) or `deleted`. Returns a
 *   function that unsubscribes.
 * - `bytes`: the position in the log up to which it has been read; the stream starts there, so that
 *   no event is missed.
 */
async function makeStore(id) {
  const listeners = { change: new Set(), append: new Set(), reload: new Set(), deleted: new Set() };
  const notify = (name, value) => {
    for (const listener of [...listeners[name]]) listener(value);
  };
  const store = {
    id,
    run: await get(`api/runs/${id}`),
    isDeleted: false,
    isStopping: false,
    bytes: null,
    end: () => {},
    on: (name, listener) => {
      listeners[name].add(listener);
      return () => listeners[name].delete(listener);
    },
    async renew() {
      store.run = await get(`api/runs/${id}`);
      notify("change");
    },
    listen() {
      store.end = stream(
        () => `api/runs/${id}/stream${store.bytes === null ? "" : `?after=${store.bytes}`}`,
        handlers,
      );
    },
  };
  const markDeleted = () => {
    if (store.isDeleted) return;
    store.isDeleted = true;
    store.end();
    notify("deleted");
  };
  let wasOpened = false;
  const handlers = {
    open() {
      if (wasOpened && store.bytes === null) notify("reload");
      wasOpened = true;
    },
    append({ events = [], bytes, dropped }) {
      store.bytes = bytes ?? store.bytes;
      const wasResumed =
        dropped || events.some((event) => event.type === "resume" || event.type === "run_start");
      if (wasResumed || events.some((event) => DETAIL_EVENTS.includes(event.type)))
        store.renew().catch(() => {});
      if (wasResumed) notify("reload");
      else notify("append", events);
    },
    status(summary) {
      const statusChanged = store.run.status !== summary.status;
      Object.assign(store.run, summary);
      if (!["live", "waiting"].includes(summary.status)) store.isStopping = false;
      if (statusChanged) store.renew().catch(() => {}); // a run that has ended has a report
      notify("change");
    },
    gone: markDeleted,
    problem: (error) => error.status === 404 && markDeleted(),
  };
  return store;
}

function drawHeader(header, store, ctx) {
  const { run } = store;
  const focusedId = header.contains(document.activeElement) ? document.activeElement.id : null;
  // Do not remove an explanation that is being read.
  if (header.contains(document.activeElement) && !focusedId) return;
  const running = ["live", "waiting"].includes(run.status);
  put(
    header,
    h(
      "div",
      { class: "page-head" },
      h(
        "a",
        { href: "#/", class: "button quiet", id: "back", "aria-label": t("run.back") },
        "‹ ",
        t("nav.runs"),
      ),
      h("h1", {}, run.name || run.path),
      badge(run.status),
      run.restarts
        ? h(
            "span",
            { class: "badge badge-stopped" },
            icon("restart"),
            t("runs.restarts", { n: run.restarts }),
          )
        : null,
      (run.tags ?? []).map((tag) => h("span", { class: "tag" }, tag)),
      h("div", { class: "end" }, actions(store, running, ctx)),
    ),
    run.note ? h("p", { class: "muted run-note" }, run.note) : null,
    run.problem
      ? h(
          "div",
          {
            class: `callout ${run.status === "failed" || run.status === "lost" ? "callout-bad" : "callout-warn"}`,
          },
          icon("warning"),
          h("div", {}, run.problem),
        )
      : null,
    figures(
      figure(
        "f.progress",
        run.steps ? `${format.percent((run.step ?? 0) / run.steps)}` : format.count(run.step),
        run.steps ? bar(run) : null,
      ),
      running
        ? figure(
            "f.eta",
            format.duration(run.eta_s),
            run.wall_s === null || run.wall_s === undefined
              ? null
              : t("run.running", { wall: format.duration(run.wall_s) }),
          )
        : figure(
            "f.wall",
            format.duration(run.wall_s),
            run.started_at ? format.time(run.started_at, "short") : null,
          ),
      figure("f.loss", format.loss(run.loss), t("run.at_step", { step: format.count(run.step) })),
      figure(
        "f.eval_loss",
        format.loss(run.eval_loss),
        describeEvaluation(run.evals?.at(-1)),
      ),
      figure("f.rate", format.short(run.tokens_per_second), [
        t("unit.tokens_s"),
        run.mfu && `MFU ${format.percent(run.mfu)}`,
      ].filter(Boolean).join(" · ")),
      figure(
        "f.world",
        run.world_size ? t("runs.ranks", { n: run.world_size }) : format.NONE,
        [run.device, run.host, describeAxes(run.mesh?.axes ?? run.axes)]
          .filter(Boolean)
          .join(" · ") ||
        null,
      ),
      figure(
        "f.last_event",
        h("span", { class: staleness(run) }, format.ago(run.updated_at)),
        running ? t("run.last_event") : format.time(run.updated_at, "short"),
      ),
      h(
        "div",
        { class: "figure-wide" },
        figure("f.strategy", run.strategy ?? format.NONE, describeStrategy(run.strategy)),
      ),
    ),
  );
  if (focusedId) document.getElementById(focusedId)?.focus();
}

const staleness = (run) =>
  run.status === "live" && Date.now() / 1000 - run.updated_at > 120 ? "stale" : null;

function bar(run) {
  const share = Math.min(1, (run.step ?? 0) / run.steps);
  return [
    h(
      "div",
      { class: "progress", "aria-hidden": "true" },
      h("span", { style: { width: `${share * 100}%` } }),
    ),
    h("div", {}, t("runs.step", { step: format.count(run.step), steps: format.count(run.steps) })),
  ];
}

function actions(store, running, ctx) {
  const { run } = store;
  const link = (id, name, href) =>
    h("a", { class: "button", id, href }, icon(name), t(`run.${id}`));
  const buttons = [];
  if (running) buttons.push(stopButton(store, ctx));
  else if (run.has?.config) buttons.push(link("resume", "play", `#/new?resume=${store.id}`));
  if (run.has?.config) buttons.push(link("duplicate", "copy", `#/new?from=${store.id}`));
  if (run.has?.model) buttons.push(link("chat", "chat", `#/run/${store.id}/chat`));
  return buttons;
}

function stopButton(store, ctx) {
  const isSecondRequest = store.isStopping; // the second request ends the run immediately
  const click = () => stop(store, ctx, isSecondRequest);
  return h(
    "button",
    { type: "button", id: "stop", on: { click } },
    icon("stopped"),
    t(isSecondRequest ? "run.end_now" : "run.stop"),
  );
}

async function stop(store, ctx, endsNow) {
  const name = endsNow ? "run.end_now" : "run.stop";
  const dialog = h(
    "dialog",
    { class: "dialog", "aria-labelledby": "stop-title" },
    h("h2", { id: "stop-title" }, t(`${name}.ask`, { name: store.run.name })),
    h("p", {}, t(`${name}.what`)),
    h(
      "form",
      { method: "dialog", class: "toolbar" },
      h("button", { value: "no" }, t("cancel")),
      h("button", { value: "yes", class: "main", id: "stop-yes" }, t(name)),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  dialog.remove();
  document.getElementById("stop")?.focus();
  if (dialog.returnValue !== "yes") return;
  try {
    await post(`api/runs/${store.id}/stop`, { now: endsNow });
    store.isStopping = true;
    ctx.announce(t(`${name}.sent`));
    store.renew().catch(() => {});
  } catch (error) {
    // A stop has already been requested, perhaps on another page.
    if (error.status === 409) store.isStopping = true;
    await store.renew().catch(() => {});
    document.querySelector(".run-head")?.append(errorState(error));
  }
}

/** The step of the latest evaluation, and the step of the best one if the run selects it. */
function describeEvaluation(evaluation) {
  if (!evaluation) return t("run.no_eval");
  const step = format.count(evaluation.step);
  if (evaluation.best_step === undefined) return t("run.at_step", { step });
  return t("run.at_step_best", { step, best: format.count(evaluation.best_step) });
}
