// What a run has not recorded: said, never drawn as zero.

import { t } from "../../lib/i18n.js";
import { emptyState } from "../../lib/ui.js";

/** A state for something that this run's events do not hold. `key`: what it is, in the tables. */
export function notRecorded(key, run) {
  const running = run.status === "live" || run.status === "waiting";
  return emptyState(t("missing", { what: t(key) }), t(running && !(run.step > 1) ? "missing.yet" : "missing.old"));
}
