// A run: its header, its tabs, and the event stream that they share.

import { get, post, stream } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { addWords, t } from "../lib/i18n.js";
import { badge, emptyState, errorState, figure, figures, icon, tabLinks } from "../lib/ui.js";
import { words } from "../i18n/watch.js";
import { axesInWords, inWords } from "./run/strategy.js";

addWords(words);

const TABS = ["overview", "ranks", "traffic", "memory", "world", "samples", "log", "config", "checkpoints", "report"];
// Events after which the details of a run are requested again.
const TOLD_ONCE = ["memory", "run_end", "sample", "checkpoint", "eval"];
const LOADED = {
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
  const head = h("div", { class: "stack run-head" });
  const tabs = h("div", {});
  const body = h("div", { class: "stack", id: "tab" });
  put(root, head, tabs, body);
  put(body, h("p", { class: "muted" }, t("loading")));
  const store = await makeStore(params.id, ctx);
  let tab = null;
  let turn = 0;

  const offChange = store.on("change", () => drawHead(head, store, ctx));
  const offGone = store.on("gone", () => put(body, gone()));
  const ticking = setInterval(() => drawHead(head, store, ctx), 5000);
  drawHead(head, store, ctx);

  async function open({ tab: wanted, query }) {
    const name = TABS.includes(wanted) ? wanted : "overview";
    ctx.title(`${store.run.name} · ${t(`tab.${name}`)}`);
    put(
      tabs,
      tabLinks(
        t("run.tabs"),
        TABS.map((one) => [one, t(`tab.${one}`), `#/run/${store.id}/${one}`]),
        name,
      ),
    );
    tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    const mine = ++turn;
    tab?.();
    tab = null;
    const place = h("div", { class: "stack" }, h("p", { class: "muted" }, t("loading")));
    put(body, place);
    try {
      const module = await LOADED[name]();
      const down = await module.show(place, store, { ...ctx, params: query });
      if (mine !== turn) down?.();
      else tab = down;
    } catch (error) {
      if (error.name !== "ApiError") console.error(error);
      if (mine === turn)
        put(place, error.status === 404 && store.isGone ? gone() : errorState(error, () => open({ tab: wanted, query })));
    }
  }
  await open(params);
  store.listen();

  const down = () => {
    turn++;
    clearInterval(ticking);
    offChange();
    offGone();
    tab?.();
    store.end();
  };
  down.update = (next) => open(next);
  return down;
}

const gone = () => emptyState(t("run.gone"), t("run.gone.text"), h("a", { class: "button", href: "#/" }, t("nav.runs")));

/**
 * The state of the run. `run`: the response of `api/runs/ID`, whose summary the stream updates. `on(name, listener)`: `change`
 * (the summary), `append` (an array of new events), `again` (everything may have changed: read it again), `gone` (deleted).
 * `bytes`: the byte up to which the log has been read, so that `listen()` misses nothing.
 */
async function makeStore(id) {
  const listeners = { change: new Set(), append: new Set(), again: new Set(), gone: new Set() };
  const tell = (name, value) => {
    for (const one of [...listeners[name]]) one(value);
  };
  const store = {
    id,
    run: await get(`api/runs/${id}`),
    isGone: false,
    isStopping: false,
    bytes: null,
    end: () => {},
    on: (name, listener) => {
      listeners[name].add(listener);
      return () => listeners[name].delete(listener);
    },
    async renew() {
      store.run = await get(`api/runs/${id}`);
      tell("change");
    },
    listen() {
      store.end = stream(() => `api/runs/${id}/stream${store.bytes === null ? "" : `?after=${store.bytes}`}`, handlers);
    },
  };
  const goneNow = () => {
    if (store.isGone) return;
    store.isGone = true;
    store.end();
    tell("gone");
  };
  let opened = false;
  const handlers = {
    open() {
      if (opened && store.bytes === null) tell("again");
      opened = true;
    },
    append({ events = [], bytes, dropped }) {
      store.bytes = bytes ?? store.bytes;
      const turned = dropped || events.some((one) => one.type === "resume" || one.type === "run_start");
      if (turned || events.some((one) => TOLD_ONCE.includes(one.type))) store.renew().catch(() => {});
      if (turned) tell("again");
      else tell("append", events);
    },
    status(summary) {
      const ended = store.run.status !== summary.status;
      Object.assign(store.run, summary);
      if (!["live", "waiting"].includes(summary.status)) store.isStopping = false;
      if (ended) store.renew().catch(() => {}); // with its end came a report
      tell("change");
    },
    gone: goneNow,
    problem: (error) => error.status === 404 && goneNow(),
  };
  return store;
}

function drawHead(head, store, ctx) {
  const { run } = store;
  const focused = head.contains(document.activeElement) ? document.activeElement.id : null;
  if (head.contains(document.activeElement) && !focused) return; // somebody reads a term: the next turn draws
  const running = ["live", "waiting"].includes(run.status);
  put(
    head,
    h(
      "div",
      { class: "page-head" },
      h("a", { href: "#/", class: "button quiet", id: "back", "aria-label": t("run.back") }, "‹ ", t("nav.runs")),
      h("h1", {}, run.name || run.path),
      badge(run.status),
      run.restarts
        ? h("span", { class: "badge badge-stopped" }, icon("restart"), t("runs.restarts", { n: run.restarts }))
        : null,
      (run.tags ?? []).map((one) => h("span", { class: "tag" }, one)),
      h("div", { class: "end" }, actions(store, running, ctx)),
    ),
    run.note ? h("p", { class: "muted run-note" }, run.note) : null,
    run.problem
      ? h(
          "div",
          { class: `callout ${run.status === "failed" || run.status === "lost" ? "callout-bad" : "callout-warn"}` },
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
            run.wall_s === null || run.wall_s === undefined ? null : t("run.running", { wall: format.duration(run.wall_s) }),
          )
        : figure("f.wall", format.duration(run.wall_s), run.started_at ? format.time(run.started_at, "short") : null),
      figure("f.loss", format.loss(run.loss), t("run.at_step", { step: format.count(run.step) })),
      figure(
        "f.eval_loss",
        format.loss(run.eval_loss),
        run.evals?.length ? t("run.at_step", { step: format.count(run.evals.at(-1).step) }) : t("run.no_eval"),
      ),
      figure("f.rate", format.short(run.tokens_per_second), t("unit.tokens_s")),
      figure(
        "f.world",
        run.world_size ? t("runs.ranks", { n: run.world_size }) : format.NONE,
        [run.device, run.host, axesInWords(run.mesh?.axes ?? run.axes)].filter(Boolean).join(" · ") || null,
      ),
      figure(
        "f.heard",
        h("span", { class: staleness(run) }, format.ago(run.updated_at)),
        running ? t("run.heard.live") : format.time(run.updated_at, "short"),
      ),
      h("div", { class: "figure-wide" }, figure("f.strategy", run.strategy ?? format.NONE, inWords(run.strategy))),
    ),
  );
  if (focused) document.getElementById(focused)?.focus();
}

const staleness = (run) => (run.status === "live" && Date.now() / 1000 - run.updated_at > 120 ? "stale" : null);

function bar(run) {
  const share = Math.min(1, (run.step ?? 0) / run.steps);
  return [
    h("div", { class: "progress", "aria-hidden": "true" }, h("span", { style: { width: `${share * 100}%` } })),
    h("div", {}, t("runs.step", { step: format.count(run.step), steps: format.count(run.steps) })),
  ];
}

function actions(store, running, ctx) {
  const { run } = store;
  const link = (id, name, href) => h("a", { class: "button", id, href }, icon(name), t(`run.${id}`));
  const all = [];
  if (running) all.push(stopButton(store, ctx));
  else if (run.has?.config) all.push(link("resume", "play", `#/new?resume=${store.id}`));
  if (run.has?.model) all.push(link("chat", "chat", `#/run/${store.id}/chat`));
  return all;
}

function stopButton(store, ctx) {
  const now = store.isStopping; // the second request ends the run at once
  const click = () => stop(store, ctx, now);
  return h("button", { type: "button", id: "stop", on: { click } }, icon("stopped"), t(now ? "run.end_now" : "run.stop"));
}

async function stop(store, ctx, now) {
  const name = now ? "run.end_now" : "run.stop";
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
    await post(`api/runs/${store.id}/stop`, { now });
    store.isStopping = true;
    ctx.announce(t(`${name}.sent`));
    store.renew().catch(() => {});
  } catch (error) {
    if (error.status === 409) store.isStopping = true; // a stop was requested before, perhaps on another page
    await store.renew().catch(() => {});
    document.querySelector(".run-head")?.append(errorState(error));
  }
}
