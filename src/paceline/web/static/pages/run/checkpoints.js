// The tab Checkpoints of a run.

import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { command, emptyState, icon, row, table, termOf } from "../../lib/ui.js";

export async function show(root, store) {
  let drawnKey = "";
  function draw() {
    const checkpoints = store.run.checkpoints ?? [];
    const newKey = JSON.stringify(checkpoints);
    if (newKey === drawnKey) return;
    drawnKey = newKey;
    if (!checkpoints.length)
      return void put(root, emptyState(t("checkpoints.none"), t("checkpoints.none.text")));
    const columns = [
      { label: t("marks.step"), number: false },
      { label: t("checkpoints.when") },
      { label: termOf("checkpoints.size"), number: true },
      { label: termOf("checkpoints.wall"), number: true },
      { label: termOf("checkpoints.blocked"), number: true },
      { label: t("checkpoints.state") },
    ];
    const rows = [...checkpoints]
      .reverse()
      .map((checkpoint) =>
        row(
          [
            format.count(checkpoint.step),
            format.time(checkpoint.time),
            format.bytes(checkpoint.size_bytes),
            format.duration(checkpoint.wall_s),
            format.duration(checkpoint.blocked_s),
            checkpoint.error
              ? h("span", { class: "mark-error" }, icon("failed"), " ", checkpoint.error)
              : checkpoint.exists === false
                ? h("span", { class: "muted" }, t("checkpoints.removed"))
                : h("span", { class: "nowrap" }, icon("done"), " ", t("checkpoints.complete")),
          ],
          columns,
        ),
      );
    put(
      root,
      h(
        "section",
        { class: "card flush" },
        h("div", { class: "card-head" }, h("h2", {}, t("tab.checkpoints"))),
        table(t("tab.checkpoints"), columns, rows),
      ),
      h(
        "section",
        { class: "card" },
        h("h2", {}, t("checkpoints.terminal")),
        h("p", { class: "muted" }, t("checkpoints.terminal.text")),
        command(
          `${store.run.shell.prefix}paceline inspect ${store.run.shell.folder}/checkpoints/step-${String(checkpoints.at(-1).step).padStart(8, "0")}`,
        ),
      ),
    );
    return undefined;
  }

  draw();
  return store.on("change", draw);
}
