// The ranks of a run: time breakdown, the slowest rank, and heartbeats.

import { get } from "../../lib/api.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { has, t } from "../../lib/i18n.js";
import { lanes, PHASES } from "../../lib/lanes.js";
import { card, choice, icon, row, table, termOf } from "../../lib/ui.js";
import { notRecorded } from "./missing.js";

const RENEW_MS = 1500;
const BEAT_MS = 2000;
const STILL_S = 10; // seconds without progress after which a rank is reported

/** By how much the slowest rank is slower, as a sentence. */
const slowdown = ({ slower_by_s, slower_by_share, phase }) =>
  t(phase ? "ranks.slowest.in" : "ranks.slowest.by", {
    time: format.duration(slower_by_s),
    share: format.percent(slower_by_share),
    phase: phase && t(`phase.${phase}`),
  });

export async function show(root, store) {
  let answer = await get(`api/runs/${store.id}/ranks?points=200`);
  if (!answer.ranks?.length || !answer.step?.length) {
    put(root, notRecorded("missing.ranks", store.run));
    return store.on(
      "append",
      (events) =>
        events.some((one) => one.type === "step") &&
        location.hash.includes("/ranks") &&
        store
          .renew()
          .then(() => show(root, store))
          .catch(() => {}),
    );
  }
  let share = true;
  let devices = byRank(answer.devices);
  let beats = new Map();
  const picture = lanes();
  const slowest = h("div", { "aria-live": "polite" });
  const figures = h("div", {});
  const note = h("p", { class: "muted small" });
  put(
    root,
    slowest,
    card(
      termOf("lanes"),
      choice(
        t("lanes.scale"),
        [
          ["share", t("lanes.share")],
          ["time", t("lanes.time")],
        ],
        "share",
        (one) => {
          share = one === "share";
          draw();
        },
      ),
      picture.node,
      note,
    ),
    figures,
  );

  function draw() {
    picture.set(answer, share);
    put(
      slowest,
      answer.slowest
        ? h(
            "div",
            { class: "callout callout-warn" },
            icon("warning"),
            h("div", {}, h("b", {}, t("ranks.slowest", { rank: answer.slowest.rank })), " ", slowdown(answer.slowest)),
          )
        : h("div", { class: "callout" }, icon("done"), h("div", {}, t(answer.ranks.length > 1 ? "ranks.even" : "ranks.one"))),
    );
    put(note, hasPhases(answer) ? null : t("ranks.old"));
    note.hidden = hasPhases(answer);
    drawTable();
  }
  function drawTable() {
    if (figures.contains(document.activeElement)) return; // somebody reads it: the next turn draws
    put(figures, rankTable(answer, store.run, devices, beats));
  }
  draw();

  // The current state of the ranks is requested regularly, because a hung run has no new steps.
  async function listen() {
    if (document.hidden || !["live", "lost"].includes(store.run.status)) return;
    try {
      beats = byRank((await get(`api/runs/${store.id}/heartbeats`)).ranks);
      drawTable();
    } catch {
      // The banner reports the lost connection.
    }
  }
  listen();
  const beating = setInterval(listen, BEAT_MS);

  let timer = null;
  let wanted = false;
  async function renew() {
    try {
      answer = await get(`api/runs/${store.id}/ranks?points=200`);
      draw();
    } catch {
      // The banner reports the lost connection; the page stays as it is.
    }
    timer = null;
    if (wanted) later();
  }
  function later() {
    wanted = timer !== null;
    timer ??= setTimeout(renew, RENEW_MS * Math.max(1, answer.ranks.length / 16)); // large worlds cost the server more
  }
  const offs = [
    store.on("append", (events) => {
      for (const event of events) if (event.devices) devices = byRank(event.devices);
      if (events.some((one) => one.type === "step")) later();
    }),
    store.on("again", later),
  ];
  return () => {
    clearTimeout(timer);
    clearInterval(beating);
    offs.forEach((off) => off());
    picture.end();
  };
}

const hasPhases = (answer) => answer.ranks.some((rank) => rank.forward_s?.some((one) => one !== null));

const byRank = (devices) => new Map((Array.isArray(devices) ? devices : []).map((one) => [one.rank, one]));

function mean(values) {
  const known = (values ?? []).filter(Number.isFinite);
  return known.length ? known.reduce((one, two) => one + two, 0) / known.length : null;
}

const STATES = { T: "T", t: "T", D: "D", Z: "gone", X: "gone", gone: "gone" };

/** What a rank is doing, and for how long it has made no progress. */
function doing(beat) {
  if (!beat) return format.NONE;
  const still_s = Date.now() / 1000 - beat.moved_at;
  const what = [has(`phase.${beat.phase}`) ? t(`phase.${beat.phase}`) : beat.phase, beat.step ? t("ranks.in_step", { step: format.count(beat.step) }) : null];
  if (beat.state in STATES) what.push(t(`ranks.state.${STATES[beat.state]}`));
  else if (beat.waits_for) what.push(t("ranks.waits", { what: beat.waits_for }));
  const text = what.filter(Boolean).join(", ");
  if (beat.phase === "ended" || (still_s < STILL_S && !(beat.state in STATES))) return text;
  return h("span", { class: "stale" }, icon("warning"), text, " · ", t("ranks.still", { since: format.duration(still_s) }));
}

function rankTable(answer, run, devices, beats) {
  const busy = devices.size > 0 || answer.ranks.some((rank) => rank.utilisation !== undefined && rank.utilisation !== null);
  const heads = [
    { head: t("ranks.rank") },
    { head: t("ranks.where") },
    ...(beats.size ? [{ head: termOf("ranks.now") }] : []),
    ...PHASES.map(({ name }) => ({ head: termOf(`phase.${name}`), number: true })),
    { head: termOf("m.memory_bytes"), number: true },
    ...(busy ? [{ head: termOf("ranks.gpu"), number: true }] : []),
    { head: termOf("ranks.heard"), number: true },
  ];
  const rows = answer.ranks.map((rank) => {
    const gpu = devices.get(rank.rank) ?? rank;
    const beat = beats.get(rank.rank);
    return row(
      [
        h(
          "span",
          {},
          String(rank.rank),
          rank.rank === answer.slowest?.rank ? h("span", { class: "tag" }, t("ranks.slow")) : null,
        ),
        [rank.host, rank.device].filter((one) => one !== null && one !== undefined).join(" · ") || format.NONE,
        ...(beats.size ? [doing(beat)] : []),
        ...PHASES.map(({ name }) => format.duration(mean(rank[`${name}_s`]))),
        format.bytes(newest(rank.memory_bytes)),
        ...(busy
          ? [
              [
                format.percent(gpu.utilisation),
                gpu.temperature_c === null || gpu.temperature_c === undefined ? null : `${format.digits(gpu.temperature_c)} °C`,
                gpu.power_w === null || gpu.power_w === undefined ? null : `${format.digits(gpu.power_w)} W`,
              ]
                .filter(Boolean)
                .join(" · "),
            ]
          : []),
        format.ago(beat?.heard_at ?? run.updated_at),
      ],
      heads,
    );
  });
  return h(
    "section",
    { class: "card flush" },
    h("div", { class: "card-head" }, h("h2", {}, t("ranks.table")), h("span", { class: "muted small" }, t("ranks.table.what"))),
    table(t("ranks.table"), heads, rows),
  );
}

const newest = (values) => (Array.isArray(values) ? (values.findLast(Number.isFinite) ?? null) : values);
