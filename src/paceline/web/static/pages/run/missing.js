// Figures that a run has not recorded. They are never drawn as zero.

import { t } from "../../lib/i18n.js";
import { emptyState } from "../../lib/ui.js";

/** The empty state for figures that the events of a run do not contain. `key`: the key of their name. */
export function notRecorded(key, run) {
  const running = run.status === "live" || run.status === "waiting";
  return emptyState(t("missing", { what: t(key) }), t(running && !(run.step > 1) ? "missing.yet" : "missing.old"));
}
