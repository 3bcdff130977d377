// Data that a run did not record is never shown as zero.

import { t } from "../../lib/i18n.js";
import { emptyState } from "../../lib/ui.js";

/** Return the empty state for data that the run did not record. `key`: the text key of its name. */
export function notRecorded(key, run) {
  const running = run.status === "live" || run.status === "waiting";
  return emptyState(
    t("missing", { what: t(key) }),
    t(running && !(run.step > 1) ? "missing.live" : "missing.ended"),
  );
}
