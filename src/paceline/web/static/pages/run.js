// The page of a run: its header, its tabs, and the event stream that they share.

import { get, stream } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { addTexts, t } from "../lib/i18n.js";
import { command, emptyState, errorState, tabLinks } from "../lib/ui.js";
import { texts } from "../i18n/watch.js";
import { runActions } from "./run/actions.js";
import { drawHeader } from "./run/header.js";
import { watchStart } from "./run/starting.js";

addTexts(texts);

const TABS = [
  "overview",
  "ranks",
  "traffic",
  "memory",
  "world",
  "samples",
  "completions",
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
  completions: () => import("./run/completions.js"),
  log: () => import("./run/log.js"),
  config: () => import("./run/config.js"),
  checkpoints: () => import("./run/checkpoints.js"),
  report: () => import("./run/report.js"),
};

export async function show(root, params, ctx) {
  const header = h("div", { class: "stack run-head" });
  const place = h("div", { class: "run-place" });
  const starting = h("div", { class: "stack", "aria-live": "polite" });
  const tabs = h("div", {});
  const body = h("div", { class: "stack", id: "tab" });
  put(root, header, place, starting, tabs, body);
  put(body, h("p", { class: "muted" }, t("loading")));
  const store = await makeStore(params.id);
  const actions = runActions(store, ctx, watch);
  let removeTab = null;
  let openCount = 0;

  let start = null;
  function watch() {
    start?.end();
    start = watchStart(starting, store.id, {
      name: store.run.folder_name,
      isNew: !store.run.has?.config,
      onFailure: () => put(body),
    });
  }
  if (store.run.status === "waiting" && ctx.hasToken()) watch();
  const draw = () => {
    drawHeader(header, store, actions);
    drawPlace(place, store.run);
  };
  const stopChange = store.on("change", draw);
  const stopDeleted = store.on("deleted", () => {
    if (!start?.hasFailed()) put(body, deletedState());
  });
  const timer = setInterval(draw, 5000);
  draw();

  async function open({ tab: requestedTab, query }) {
    const name = TABS.includes(requestedTab) ? requestedTab : "overview";
    ctx.title(`${store.run.name} · ${t(`tab.${name}`)}`);
    put(
      tabs,
      tabLinks(
        t("run.tabs"),
        TABS.filter((tabName) => isShown(tabName, name)).map((tabName) => [tabName, t(`tab.${tabName}`), `#/run/${store.id}/${tabName}`]),
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
  // Only runs that generate completions have their tab.
  function isShown(tabName, current) {
    return tabName !== "completions" || tabName === current || store.run.has?.completions;
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

/** Draw the path of the model or, before there is one, of the run's folder. */
function drawPlace(node, run) {
  const path = run.has?.model ? run.model_folder : run.folder;
  if (!path || node.dataset.path === path) return;
  node.dataset.path = path;
  const label = t(run.has?.model ? "run.model_folder" : "run.folder");
  put(node, h("span", { class: "muted" }, label), command(path));
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
