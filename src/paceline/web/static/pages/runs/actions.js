// What can be done with the runs that are selected in the list: compare, duplicate, rename, archive
// and delete.

import { del, hasToken, put as send } from "../../lib/api.js";
import { ask } from "../../lib/dialog.js";
import { h } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";
import { announce, icon } from "../../lib/ui.js";

export const MAX_COMPARED = 50;
const RUNNING = ["live", "waiting"];

/** Return the link that compares runs. */
export const compareLink = (id, ids, text, isMain = false) =>
  h(
    "a",
    {
      class: isMain ? "button main" : "button",
      id,
      href: `#/compare/${ids.slice(0, MAX_COMPARED).join(",")}`,
    },
    icon("compare"),
    text,
  );

/**
 * Return the buttons for the selected runs. `done({changed, removed})` is called with the runs that
 * have changed and the ids of those that were deleted.
 */
export function selectionButtons(runs, done) {
  const button = (id, symbol, text, click, isDanger = false) =>
    h(
      "button",
      { type: "button", id, class: isDanger ? "danger" : null, on: { click } },
      icon(symbol),
      text,
    );
  const canChange = hasToken();
  const isArchived = runs.every((run) => run.archived);
  return [
    runs.length === 1
      ? h(
          "a",
          { class: "button", id: "duplicate", href: `#/new?from=${runs[0].id}` },
          icon("copy"),
          t("runs.duplicate"),
        )
      : null,
    canChange && runs.length === 1
      ? button("rename", "edit", t("runs.rename"), () => rename(runs[0], done))
      : null,
    canChange
      ? button("archive", "archive", t(isArchived ? "runs.unarchive" : "runs.archive"), () =>
          archive(runs, !isArchived, done),
        )
      : null,
    canChange
      ? button("delete", "delete", t("runs.delete"), () => deleteRuns(runs, done), true)
      : null,
  ];
}

async function rename(run, done) {
  const name = h("input", {
    type: "text",
    id: "new-name",
    maxlength: 100,
    placeholder: run.folder_name,
    "aria-label": t("runs.rename.name"),
    prop: { value: run.name === run.folder_name ? "" : run.name },
  });
  const changed = [];
  await ask({
    title: t("runs.rename.ask", { name: run.name }),
    content: [
      h("p", {}, name),
      h("p", { class: "muted small" }, t("runs.rename.what", { path: run.path })),
    ],
    action: t("runs.rename"),
    confirm: async () => {
      const saved = await send(`api/runs/${run.id}/name`, { name: name.value });
      changed.push({ ...run, name: saved.name || run.folder_name });
    },
  });
  done({ changed });
}

async function archive(runs, archived, done) {
  const changed = [];
  try {
    for (const run of runs) {
      await send(`api/runs/${run.id}/archived`, { archived });
      changed.push({ ...run, archived });
    }
    announce(t(archived ? "runs.archived.done" : "runs.unarchived.done", { n: changed.length }));
    done({ changed });
  } catch (error) {
    done({ changed, error });
  }
}

async function deleteRuns(runs, done) {
  const running = runs.filter((run) => RUNNING.includes(run.status));
  const removed = [];
  const remaining = () => runs.filter((run) => !removed.includes(run.id));
  await ask({
    title: t("runs.delete.ask", { n: runs.length, name: runs[0].name }),
    content: [
      h("ul", { class: "dialog-list" }, runs.map((run) => h("li", { class: "mono" }, run.path))),
      h("p", {}, t("runs.delete.what")),
      running.length
        ? h(
            "p",
            { class: "bad" },
            icon("warning"),
            " ",
            t("runs.delete.running", { names: running.map((run) => run.name).join(", ") }),
          )
        : null,
    ],
    action: t("runs.delete"),
    isDanger: true,
    confirm: async () => {
      for (const run of remaining()) {
        await del(`api/runs/${run.id}`);
        removed.push(run.id);
      }
    },
  });
  if (removed.length) announce(t("runs.deleted.done", { n: removed.length }));
  done({ removed });
}
