// The tab Ranks of a run: the timeline, the slowest rank, and the current state from heartbeats.

import { get } from "../../lib/api.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { has, t } from "../../lib/i18n.js";
import { timeline, PHASES } from "../../lib/timeline.js";
import { card, choice, icon, row, table, termOf } from "../../lib/ui.js";
import { notRecorded } from "./missing.js";

const RENEW_MS = 1500;
const HEARTBEAT_MS = 2000;
const STALLED_AFTER_S = 10; // a rank without progress for longer is marked

/** Return a sentence about how much slower the slowest rank is. */
const slowdown = ({ slower_by_s, slower_by_share, phase }) =>
  t(phase ? "ranks.slowest.in" : "ranks.slowest.by", {
    time: format.duration(slower_by_s),
    share: format.percent(slower_by_share),
    phase: phase && t(`phase.${phase}`),
  });

export async function show(root, store) {
  let times = await get(`api/runs/${store.id}/ranks?points=200`);
  if (!times.ranks?.length || !times.step?.length) {
    put(root, notRecorded("missing.ranks", store.run));
    return store.on(
      "append",
      (events) =>
        events.some((event) => event.type === "step") &&
        location.hash.includes("/ranks") &&
        store
          .renew()
          .then(() => show(root, store))
          .catch(() => {}),
    );
  }
  let asShares = true;
  let devices = byRank(times.devices);
  let heartbeats = new Map();
  const chart = timeline();
  const slowest = h("div", { "aria-live": "polite" });
  const figures = h("div", {});
  const note = h("p", { class: "muted small" });
  put(
    root,
    slowest,
    card(
      termOf("timeline"),
      choice(
        t("timeline.scale"),
        [
          ["share", t("timeline.share")],
          ["time", t("timeline.time")],
        ],
        "share",
        (selected) => {
          asShares = selected === "share";
          draw();
        },
      ),
      chart.node,
      note,
    ),
    figures,
  );

  function draw() {
    chart.set(times, asShares);
    put(
      slowest,
      times.slowest
        ? h(
            "div",
            { class: "callout callout-warn" },
            icon("warning"),
            h(
              "div",
              {},
              h("b", {}, t("ranks.slowest", { rank: times.slowest.rank })),
              " ",
              slowdown(times.slowest),
            ),
          )
        : h(
            "div",
            { class: "callout" },
            icon("done"),
            h("div", {}, t(times.ranks.length > 1 ? "ranks.even" : "ranks.one")),
          ),
    );
    put(note, hasPhases(times) ? null : t("ranks.no_phases"));
    note.hidden = hasPhases(times);
    drawTable();
  }
  function drawTable() {
    // Do not replace a table that is being read.
    if (figures.contains(document.activeElement)) return;
    put(figures, rankTable(times, store.run, devices, heartbeats));
  }
  draw();

  // The current state is requested regularly, because a hung run logs no steps that would trigger
  // an update.
  async function renewHeartbeats() {
    if (document.hidden || !["live", "lost"].includes(store.run.status)) return;
    try {
      heartbeats = byRank((await get(`api/runs/${store.id}/heartbeats`)).ranks);
      drawTable();
    } catch {
      // The banner reports the lost connection.
    }
  }
  renewHeartbeats();
  const heartbeatTimer = setInterval(renewHeartbeats, HEARTBEAT_MS);

  let timer = null;
  let isRenewalDue = false;
  async function renew() {
    try {
      times = await get(`api/runs/${store.id}/ranks?points=200`);
      draw();
    } catch {
      // The banner reports the lost connection, and the page stays unchanged.
    }
    timer = null;
    if (isRenewalDue) renewSoon();
  }
  function renewSoon() {
    isRenewalDue = timer !== null;
    // Many ranks are more expensive for the server.
    timer ??= setTimeout(renew, RENEW_MS * Math.max(1, times.ranks.length / 16));
  }
  const unsubscribers = [
    store.on("append", (events) => {
      for (const event of events) if (event.devices) devices = byRank(event.devices);
      if (events.some((event) => event.type === "step")) renewSoon();
    }),
    store.on("reload", renewSoon),
  ];
  return () => {
    clearTimeout(timer);
    clearInterval(heartbeatTimer);
    unsubscribers.forEach((unsubscribe) => unsubscribe());
    chart.end();
  };
}

const hasPhases = (times) =>
  times.ranks.some((rank) => rank.forward_s?.some((value) => value !== null));

const byRank = (entries) =>
  new Map((Array.isArray(entries) ? entries : []).map((entry) => [entry.rank, entry]));

function mean(values) {
  const finite = (values ?? []).filter(Number.isFinite);
  return finite.length ? finite.reduce((a, b) => a + b, 0) / finite.length : null;
}

const STATES = { T: "T", t: "T", D: "D", Z: "ended", X: "ended", gone: "ended" };

/** Describe what a rank is doing, and for how long it has made no progress. */
function describeState(heartbeat) {
  if (!heartbeat) return format.NONE;
  const stalled_s = Date.now() / 1000 - heartbeat.moved_at;
  const parts = [
    has(`phase.${heartbeat.phase}`) ? t(`phase.${heartbeat.phase}`) : heartbeat.phase,
    heartbeat.step ? t("ranks.in_step", { step: format.count(heartbeat.step) }) : null,
  ];
  if (heartbeat.state in STATES) parts.push(t(`ranks.state.${STATES[heartbeat.state]}`));
  else if (heartbeat.waits_for) parts.push(t("ranks.waits", { what: heartbeat.waits_for }));
  const text = parts.filter(Boolean).join(", ");
  if (heartbeat.phase === "ended" || (stalled_s < STALLED_AFTER_S && !(heartbeat.state in STATES)))
    return text;
  return h(
    "span",
    { class: "stale" },
    icon("warning"),
    text,
    " · ",
    t("ranks.stalled", { since: format.duration(stalled_s) }),
  );
}

function rankTable(times, run, devices, heartbeats) {
  const hasGpus =
    devices.size > 0 ||
    times.ranks.some((rank) => rank.utilisation !== undefined && rank.utilisation !== null);
  const columns = [
    { label: t("ranks.rank") },
    { label: t("ranks.location") },
    ...(heartbeats.size ? [{ label: termOf("ranks.current") }] : []),
    ...PHASES.map(({ name }) => ({ label: termOf(`phase.${name}`), number: true })),
    { label: termOf("m.memory_bytes"), number: true },
    ...(hasGpus ? [{ label: termOf("ranks.gpu"), number: true }] : []),
    { label: termOf("ranks.heartbeat"), number: true },
  ];
  const rows = times.ranks.map((rank) => {
    const gpu = devices.get(rank.rank) ?? rank;
    const heartbeat = heartbeats.get(rank.rank);
    return row(
      [
        h(
          "span",
          {},
          String(rank.rank),
          rank.rank === times.slowest?.rank ? h("span", { class: "tag" }, t("ranks.slow")) : null,
        ),
        [rank.host, rank.device]
          .filter((part) => part !== null && part !== undefined)
          .join(" · ") ||
        format.NONE,
        ...(heartbeats.size ? [describeState(heartbeat)] : []),
        ...PHASES.map(({ name }) => format.duration(mean(rank[`${name}_s`]))),
        format.bytes(newest(rank.memory_bytes)),
        ...(
          hasGpus
            ? [
                [
                  format.percent(gpu.utilisation),
                  gpu.temperature_c === null || gpu.temperature_c === undefined
                    ? null
                    : `${format.digits(gpu.temperature_c)} °C`,
                  gpu.power_w === null || gpu.power_w === undefined
                    ? null
                    : `${format.digits(gpu.power_w)} W`,
                ]
                  .filter(Boolean)
                  .join(" · "),
              ]
            : []
        ),
        format.ago(heartbeat?.heard_at ?? run.updated_at),
      ],
      columns,
    );
  });
  return h(
    "section",
    { class: "card flush" },
    h(
      "div",
      { class: "card-head" },
      h("h2", {}, t("ranks.table")),
      h("span", { class: "muted small" }, t("ranks.table.what")),
    ),
    table(t("ranks.table"), columns, rows),
  );
}

const newest = (values) =>
  Array.isArray(values) ? (values.findLast(Number.isFinite) ?? null) : values;
