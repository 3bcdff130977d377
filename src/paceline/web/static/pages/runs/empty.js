// Empty states of the list of runs.

import { h } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";
import { command, emptyState, icon } from "../../lib/ui.js";

/** Return the empty state of a folder without runs. */
export function noRuns(folder) {
  return emptyState(
    t("runs.none", { folder }),
    t("runs.none.text"),
    command(
      "paceline sft model=builtin:qwen2-micro dataset=builtin:python-docs " +
      `output_dir=${quoted(`${folder}/first`)}`,
    ),
    h("a", { class: "button main", href: "#/new" }, icon("plus"), t("runs.none.start")),
  );
}

const quoted = (path) => (/^[\w./@:+-]+$/.test(path) ? path : `'${path.replaceAll("'", `'\\''`)}'`);

/** Return the empty state of a search without a match. */
export const noMatchingRuns = (n, clear) =>
  emptyState(
    t("runs.none.match"),
    t("runs.none.match.text", { n }),
    h("button", { type: "button", on: { click: clear } }, t("runs.none.match.clear")),
  );
