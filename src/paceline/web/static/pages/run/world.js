// The tab Topology of a run: hosts, ranks, mesh axes and communication groups.

import { key } from "../../lib/chart.js";
import { h, put, svg } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";
import { card, choice, row, table, termOf } from "../../lib/ui.js";
import { notRecorded } from "./missing.js";
import { MESH_AXES, describeAxes, describeStrategy } from "./strategy.js";

const CHIP = { width: 88, height: 64, gapX: 30, gapY: 46 };
const LINE_STYLES = {
  data: ["--s1", null],
  shard: ["--s3", "7 4"],
  context: ["--s5", "7 2 2 2"],
  tensor: ["--s2", "2 4"],
  expert: ["--s6", "1 3"],
  pipeline: ["--s4", "10 3 2 3"],
};
const lineStyle = (axis) => LINE_STYLES[axis] ?? ["--s6", "4 4"];

export async function show(root, store) {
  const { run } = store;
  const mesh = run.mesh;
  const axes = mesh?.axes ?? run.axes ?? null;
  const strategyCard = card(
    t("world.strategy"),
    null,
    h("p", {}, h("b", {}, run.strategy ?? "–"), " – ", describeStrategy(run.strategy) ?? ""),
    h(
      "p",
      { class: "muted" },
      axes ? t("world.axes", { axes: describeAxes(axes) || t("world.axes.none") }) : "",
    ),
  );
  if (!mesh?.ranks?.length) {
    put(root, strategyCard, notRecorded("missing.mesh", run));
    return () => {};
  }
  const usedAxes = [
    ...MESH_AXES.filter((name) => axes[name] > 1),
    ...Object.keys(axes).filter((name) => !MESH_AXES.includes(name) && axes[name] > 1),
  ];
  let axis = usedAxes.length === 1 || mesh.ranks.length <= 16 ? "all" : usedAxes.at(-1);
  const meshNode = h("div", { class: "world" });
  const drawMesh = () =>
    put(
      meshNode,
      meshPicture(
        mesh,
        axis === "all" ? usedAxes : usedAxes.filter((name) => name === axis),
        countColumns(meshNode),
      ),
    );
  const axisPicker =
    usedAxes.length > 1
      ? choice(
          t("world.show"),
          [["all", t("world.all")], ...usedAxes.map((name) => [name, t(`axis.${name}`)])],
          axis,
          (selected) => {
            axis = selected;
            drawMesh();
          },
        )
      : null;
  put(
    root,
    strategyCard,
    card(termOf("world.mesh"), axisPicker, usedAxes.length ? legend(usedAxes) : null, meshNode),
    groupTable(mesh, usedAxes),
  );
  drawMesh();
  let width = meshNode.clientWidth;
  const sizing = new ResizeObserver(() => {
    if (meshNode.clientWidth === width) return;
    width = meshNode.clientWidth;
    drawMesh();
  });
  sizing.observe(meshNode);
  return () => sizing.disconnect();
}

const countColumns = (node) =>
  Math.max(
    2,
    Math.min(8, Math.floor((node.clientWidth - 32 + CHIP.gapX) / (CHIP.width + CHIP.gapX))),
  );

/**
 * Return the groups of ranks that differ only along `axis`: [[rank, …], …]. Experts are divided
 * among adjacent ranks.
 */
function groupsOf(mesh, axis) {
  if (axis === "expert") {
    const ranks = mesh.ranks.map((rank) => rank.rank).sort((a, b) => a - b);
    const size = mesh.axes.expert;
    return ranks
      .filter((_, index) => index % size === 0)
      .map((_, group) => ranks.slice(group * size, (group + 1) * size));
  }
  const groups = new Map();
  for (const rank of mesh.ranks) {
    const key = JSON.stringify(
      Object.entries(rank.coordinates ?? {})
        .filter(([name]) => name !== axis)
        .sort(),
    );
    groups.set(key, [...(groups.get(key) ?? []), rank]);
  }
  return [...groups.values()]
    .map((group) =>
      group
        .sort((a, b) => (a.coordinates?.[axis] ?? 0) - (b.coordinates?.[axis] ?? 0))
        .map((rank) => rank.rank),
    )
    .filter((group) => group.length > 1);
}

function meshPicture(mesh, axes, columns) {
  const hosts = new Map();
  for (const rank of mesh.ranks)
    hosts.set(rank.host ?? "", [...(hosts.get(rank.host ?? "") ?? []), rank]);
  const places = new Map();
  const boxes = [];
  let top = 0;
  let widest = 0;
  for (const [host, ranks] of hosts) {
    const perRow = Math.min(columns, ranks.length);
    const rows = Math.ceil(ranks.length / perRow);
    ranks.forEach((rank, index) =>
      places.set(rank.rank, {
        x: 16 + (index % perRow) * (CHIP.width + CHIP.gapX),
        y: top + 44 + Math.floor(index / perRow) * (CHIP.height + CHIP.gapY),
        line: `${host} ${Math.floor(index / perRow)}`,
        rank,
      }),
    );
    const width = Math.max(220, 32 + perRow * CHIP.width + (perRow - 1) * CHIP.gapX);
    const height = 44 + rows * CHIP.height + (rows - 1) * CHIP.gapY + 34;
    boxes.push({ host, top, width, height, n: ranks.length });
    top += height + 22;
    widest = Math.max(widest, width);
  }
  const links = axes.flatMap((axis, axisIndex) =>
    groupsOf(mesh, axis).flatMap((group) =>
      pairs(group, axis).map(([from, to]) =>
        link(places.get(from), places.get(to), axis, axisIndex),
      ),
    ),
  );
  const label = t("world.label", {
    n: mesh.ranks.length,
    hosts: hosts.size,
    axes:
      axes.map((axis) => `${t(`axis.${axis}`)} ${mesh.axes[axis]}`).join(", ") ||
      t("world.axes.none"),
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
        svg("rect", {
          x: 1,
          y: box.top + 1,
          width: box.width,
          height: box.height,
          rx: 8,
          class: "mesh-host",
        }),
        svg(
          "text",
          { x: 16, y: box.top + 25, class: "mesh-host-name" },
          `${box.host || t("world.host.none")} · ${t("runs.ranks", { n: box.n })}`,
        ),
      ),
    ),
    links,
    [...places.values()].map((place) => chip(place, mesh.axes)),
  );
}

// A group is drawn as a ring, and the stages of a pipeline as a line.
function pairs(group, axis) {
  const rankPairs = group.slice(1).map((rank, index) => [group[index], rank]);
  if (axis !== "pipeline" && group.length > 2) rankPairs.push([group.at(-1), group[0]]);
  return rankPairs;
}

function link(fromChip, toChip, axis, axisIndex) {
  const [color, dash] = lineStyle(axis);
  const shift = (axisIndex - 0.5) * 9;
  const from = { x: fromChip.x + CHIP.width / 2, y: fromChip.y + CHIP.height / 2 };
  const to = { x: toChip.x + CHIP.width / 2, y: toChip.y + CHIP.height / 2 };
  const distance = Math.abs(to.x - from.x) / (CHIP.width + CHIP.gapX);
  let path;
  if (fromChip.line === toChip.line && distance < 1.5)
    path = `M${from.x} ${from.y + shift}L${to.x} ${to.y + shift}`;
  else if (fromChip.line === toChip.line) {
    const [startX, endX] = [from.x + shift, to.x + shift];
    const [startY, endY] = [fromChip.y + CHIP.height, toChip.y + CHIP.height];
    const curveY = startY + 20 + 4 * Math.min(distance, 5);
    path = `M${startX} ${startY}C${startX} ${curveY} ${endX} ${curveY} ${endX} ${endY}`;
  } else path = `M${from.x + shift * 2} ${from.y}L${to.x + shift * 2} ${to.y}`;
  return svg("path", {
    d: path,
    class: "mesh-link",
    "stroke-dasharray": dash,
    style: { stroke: `var(${color})` },
  });
}

function chip({ x, y, rank }, sizes) {
  const coordinates = Object.entries(rank.coordinates ?? {})
    .filter(([name]) => sizes[name] > 1)
    .map(([name, value]) => `${t(`axis.${name}.short`)}${value}`)
    .join(" ");
  return svg(
    "g",
    {},
    svg("rect", { x, y, width: CHIP.width, height: CHIP.height, rx: 6, class: "mesh-rank" }),
    svg(
      "text",
      { x: x + 10, y: y + 20, class: "mesh-rank-name" },
      t("memory.rank", { rank: rank.rank }),
    ),
    svg(
      "text",
      { x: x + 10, y: y + 38, class: "mesh-rank-more" },
      String(rank.device ?? "").slice(0, 12),
    ),
    svg("text", { x: x + 10, y: y + 54, class: "mesh-rank-more" }, coordinates),
    svg(
      "title",
      {},
      [
        rank.host,
        rank.device,
        ...Object.entries(rank.coordinates ?? {}).map((
          [name, value],
        ) => `${t(`axis.${name}`)} ${value}`),
      ].join(" · "),
    ),
  );
}

const legend = (usedAxes) =>
  h(
    "ul",
    { class: "legend" },
    usedAxes.map((axis) =>
      h(
        "li",
        {},
        key({ color: lineStyle(axis)[0], dash: lineStyle(axis)[1]?.split(" ") ?? [], width: 2 }),
        t(`axis.${axis}`),
      ),
    ),
  );

function groupTable(mesh, usedAxes) {
  if (!usedAxes.length) return h("p", { class: "muted" }, t("world.no_groups"));
  const columns = [
    { label: t("world.axis") },
    { label: t("world.size"), number: true },
    { label: t("world.data") },
    { label: t("world.groups") },
  ];
  const text = (groups) =>
    groups
      .slice(0, 8)
      .map(
        (group) => `{${group.length > 8 ? `${group.slice(0, 6).join(", ")}, … ${group.at(-1)}` : group.join(", ")}}`,
      )
      .join("  ") +
    (groups.length > 8 ? t("world.more", { n: groups.length - 8 }) : "");
  return h(
    "section",
    { class: "card flush" },
    h("div", { class: "card-head" }, h("h2", {}, t("world.communication"))),
    table(
      t("world.communication"),
      columns,
      usedAxes.map((axis) =>
        row(
          [
            t(`axis.${axis}`),
            mesh.axes[axis],
            t(`axis.${axis}.sends`),
            h("span", { class: "mono" }, text(groupsOf(mesh, axis))),
          ],
          columns,
        ),
      ),
    ),
  );
}
