// The checkpoints of a run, and the export of its model.

import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { command, emptyState, icon, row, table, termOf } from "../../lib/ui.js";
import { exportModel } from "../export.js";

export async function show(root, store) {
  const { button, feedback } = exportModel(store.id);
  let key = "";
  function draw() {
    const all = store.run.checkpoints ?? [];
    const now = JSON.stringify(all) + store.run.status + store.run.has?.model;
    if (now === key) return;
    key = now;
    if (!all.length) return void put(root, emptyState(t("checkpoints.none"), t("checkpoints.none.text")));
    const heads = [
      { head: t("marks.step"), number: false },
      { head: t("checkpoints.when") },
      { head: termOf("checkpoints.size"), number: true },
      { head: termOf("checkpoints.wall"), number: true },
      { head: termOf("checkpoints.blocked"), number: true },
      { head: t("checkpoints.state") },
    ];
    const rows = [...all]
      .reverse()
      .map((one) =>
        row(
          [
            format.count(one.step),
            format.time(one.time),
            format.bytes(one.size_bytes),
            format.duration(one.wall_s),
            format.duration(one.blocked_s),
            one.error
              ? h("span", { class: "mark-error" }, icon("failed"), " ", one.error)
              : one.exists === false
                ? h("span", { class: "muted" }, t("checkpoints.removed"))
                : h("span", { class: "nowrap" }, icon("done"), " ", t("checkpoints.whole")),
          ],
          heads,
        ),
      );
    put(
      root,
      h(
        "section",
        { class: "card flush" },
        h("div", { class: "card-head" }, h("h2", {}, t("tab.checkpoints")), store.run.has?.model ? button : null),
        table(t("tab.checkpoints"), heads, rows),
      ),
      feedback,
      h(
        "section",
        { class: "card" },
        h("h2", {}, t("checkpoints.terminal")),
        h("p", { class: "muted" }, t("checkpoints.terminal.text")),
        command(`paceline inspect ${store.run.path}/checkpoints/step-${String(all.at(-1).step).padStart(8, "0")}`),
      ),
    );
    return undefined;
  }

  draw();
  return store.on("change", draw);
}
