// The topology of a run: hosts, devices, the axes of the mesh, and the communication groups.

import { key } from "../../lib/chart.js";
import { h, put, svg } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";
import { card, choice, row, table, termOf } from "../../lib/ui.js";
import { notRecorded } from "./missing.js";
import { AXES, axesInWords, inWords } from "./strategy.js";

const CHIP = { width: 88, height: 64, across: 30, down: 46 };
const LOOKS = { data: ["--s1", null], shard: ["--s3", "7 4"], tensor: ["--s2", "2 4"], pipeline: ["--s4", "10 3 2 3"] };
const look = (axis) => LOOKS[axis] ?? ["--s6", "4 4"];

export async function show(root, store) {
  const { run } = store;
  const mesh = run.mesh;
  const axes = mesh?.axes ?? run.axes ?? null;
  const words = card(
    t("world.strategy"),
    null,
    h("p", {}, h("b", {}, run.strategy ?? "–"), " – ", inWords(run.strategy) ?? ""),
    h("p", { class: "muted" }, axes ? t("world.axes", { axes: axesInWords(axes) || t("world.axes.none") }) : ""),
  );
  if (!mesh?.ranks?.length) {
    put(root, words, notRecorded("missing.mesh", run));
    return () => {};
  }
  const used = [
    ...AXES.filter((name) => axes[name] > 1),
    ...Object.keys(axes).filter((name) => !AXES.includes(name) && axes[name] > 1),
  ];
  let axis = used.length === 1 || mesh.ranks.length <= 16 ? "all" : used.at(-1);
  const place = h("div", { class: "world" });
  const picture = () => put(place, drawing(mesh, axis === "all" ? used : used.filter((one) => one === axis), columnsIn(place)));
  const pick =
    used.length > 1
      ? choice(t("world.show"), [["all", t("world.all")], ...used.map((one) => [one, t(`axis.${one}`)])], axis, (one) => {
          axis = one;
          picture();
        })
      : null;
  put(root, words, card(termOf("world.mesh"), pick, used.length ? legend(used) : null, place), talkTable(mesh, used));
  picture();
  let width = place.clientWidth;
  const sizing = new ResizeObserver(() => {
    if (place.clientWidth === width) return;
    width = place.clientWidth;
    picture();
  });
  sizing.observe(place);
  return () => sizing.disconnect();
}

const columnsIn = (place) =>
  Math.max(2, Math.min(8, Math.floor((place.clientWidth - 32 + CHIP.across) / (CHIP.width + CHIP.across))));

/** The groups of ranks that differ along one axis only: [[rank, …], …]. */
function groupsOf(mesh, axis) {
  const groups = new Map();
  for (const one of mesh.ranks) {
    const key = JSON.stringify(
      Object.entries(one.coordinates ?? {})
        .filter(([name]) => name !== axis)
        .sort(),
    );
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  return [...groups.values()]
    .map((group) =>
      group.sort((one, two) => (one.coordinates?.[axis] ?? 0) - (two.coordinates?.[axis] ?? 0)).map((one) => one.rank),
    )
    .filter((group) => group.length > 1);
}

function drawing(mesh, axes, columns) {
  const hosts = new Map();
  for (const one of mesh.ranks) hosts.set(one.host ?? "", [...(hosts.get(one.host ?? "") ?? []), one]);
  const at = new Map();
  const boxes = [];
  let top = 0;
  let widest = 0;
  for (const [host, ranks] of hosts) {
    const across = Math.min(columns, ranks.length);
    const rows = Math.ceil(ranks.length / across);
    ranks.forEach((one, index) =>
      at.set(one.rank, {
        x: 16 + (index % across) * (CHIP.width + CHIP.across),
        y: top + 44 + Math.floor(index / across) * (CHIP.height + CHIP.down),
        line: `${host} ${Math.floor(index / across)}`,
        one,
      }),
    );
    const width = Math.max(220, 32 + across * CHIP.width + (across - 1) * CHIP.across);
    const height = 44 + rows * CHIP.height + (rows - 1) * CHIP.down + 34;
    boxes.push({ host, top, width, height, n: ranks.length });
    top += height + 22;
    widest = Math.max(widest, width);
  }
  const links = axes.flatMap((axis, nth) =>
    groupsOf(mesh, axis).flatMap((group) => pairs(group, axis).map(([one, two]) => link(at.get(one), at.get(two), axis, nth))),
  );
  const label = t("world.label", {
    n: mesh.ranks.length,
    hosts: hosts.size,
    axes: axes.map((axis) => `${t(`axis.${axis}`)} ${mesh.axes[axis]}`).join(", ") || t("world.axes.none"),
  });
  return svg(
    "svg",
    {
      class: "mesh",
      role: "img",
      "aria-label": label,
      viewBox: `0 0 ${widest + 2} ${top - 20}`,
      width: widest + 2,
      height: top - 20,
    },
    boxes.map((box) =>
      svg(
        "g",
        {},
        svg("rect", { x: 1, y: box.top + 1, width: box.width, height: box.height, rx: 8, class: "mesh-host" }),
        svg(
          "text",
          { x: 16, y: box.top + 25, class: "mesh-host-name" },
          `${box.host || t("world.host.none")} · ${t("runs.ranks", { n: box.n })}`,
        ),
      ),
    ),
    links,
    [...at.values()].map((place) => chip(place, mesh.axes)),
  );
}

// A group is drawn as a ring; the stages of a pipeline as a line.
function pairs(group, axis) {
  const all = group.slice(1).map((rank, index) => [group[index], rank]);
  if (axis !== "pipeline" && group.length > 2) all.push([group.at(-1), group[0]]);
  return all;
}

function link(one, two, axis, nth) {
  const [colour, dash] = look(axis);
  const shift = (nth - 0.5) * 9;
  const from = { x: one.x + CHIP.width / 2, y: one.y + CHIP.height / 2 };
  const to = { x: two.x + CHIP.width / 2, y: two.y + CHIP.height / 2 };
  const far = Math.abs(to.x - from.x) / (CHIP.width + CHIP.across);
  let path;
  if (one.line === two.line && far < 1.5) path = `M${from.x} ${from.y + shift}L${to.x} ${to.y + shift}`;
  else if (one.line === two.line) {
    const deep = one.y + CHIP.height + 12 + 4 * Math.min(far, 5);
    path = `M${from.x + shift} ${one.y + CHIP.height}C${from.x + shift} ${deep + 8} ${to.x + shift} ${deep + 8} ${to.x + shift} ${two.y + CHIP.height}`;
  } else path = `M${from.x + shift * 2} ${from.y}L${to.x + shift * 2} ${to.y}`;
  return svg("path", { d: path, class: "mesh-link", "stroke-dasharray": dash, style: { stroke: `var(${colour})` } });
}

function chip({ x, y, one }, sizes) {
  const where = Object.entries(one.coordinates ?? {})
    .filter(([name]) => sizes[name] > 1)
    .map(([name, value]) => `${t(`axis.${name}.short`)}${value}`)
    .join(" ");
  return svg(
    "g",
    {},
    svg("rect", { x, y, width: CHIP.width, height: CHIP.height, rx: 6, class: "mesh-rank" }),
    svg("text", { x: x + 10, y: y + 20, class: "mesh-rank-name" }, t("memory.rank", { rank: one.rank })),
    svg("text", { x: x + 10, y: y + 38, class: "mesh-rank-more" }, String(one.device ?? "").slice(0, 12)),
    svg("text", { x: x + 10, y: y + 54, class: "mesh-rank-more" }, where),
    svg(
      "title",
      {},
      [
        one.host,
        one.device,
        ...Object.entries(one.coordinates ?? {}).map(([name, value]) => `${t(`axis.${name}`)} ${value}`),
      ].join(" · "),
    ),
  );
}

const legend = (used) =>
  h(
    "ul",
    { class: "legend" },
    used.map((axis) =>
      h(
        "li",
        {},
        key({ colour: look(axis)[0], dash: look(axis)[1]?.split(" ") ?? [], width: 2 }),
        t(`axis.${axis}`),
      ),
    ),
  );

function talkTable(mesh, used) {
  if (!used.length) return h("p", { class: "muted" }, t("world.alone"));
  const heads = [
    { head: t("world.axis") },
    { head: t("world.size"), number: true },
    { head: t("world.says") },
    { head: t("world.groups") },
  ];
  const text = (groups) =>
    groups
      .slice(0, 8)
      .map((group) => `{${group.length > 8 ? `${group.slice(0, 6).join(", ")}, … ${group.at(-1)}` : group.join(", ")}}`)
      .join("  ") + (groups.length > 8 ? t("world.more", { n: groups.length - 8 }) : "");
  return h(
    "section",
    { class: "card flush" },
    h("div", { class: "card-head" }, h("h2", {}, t("world.talk"))),
    table(
      t("world.talk"),
      heads,
      used.map((axis) =>
        row(
          [
            t(`axis.${axis}`),
            mesh.axes[axis],
            t(`axis.${axis}.says`),
            h("span", { class: "mono" }, text(groupsOf(mesh, axis))),
          ],
          heads,
        ),
      ),
    ),
  );
}
