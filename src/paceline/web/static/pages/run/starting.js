// A run that has not written an event yet: what its command prints, or the error that ended it.

import { get } from "../../lib/api.js";
import { h, put } from "../../lib/dom.js";
import { addTexts, t } from "../../lib/i18n.js";
import { card, errorState } from "../../lib/ui.js";
import { texts } from "../../i18n/start.js";
import { readDraft, removeDraft } from "../start_draft.js";

addTexts(texts);

const POLL_MS = 1000;
const SHOWN_LINES = 16;

/**
 * Show the output of the command until the run has events. Return `{hasFailed, end}`: whether
 * the command has failed, and a function that stops.
 *
 * If the command fails, the server removes the folder of a new run. What was typed stays in the
 * form, which the error links to.
 */
export function watchStart(root, id, { name, isNew, onFailure }) {
  const state = { failed: false, ended: false };
  const lines = h("pre", { class: "output", tabindex: 0, "aria-label": t("tab.log") });
  const watch = async () => {
    while (!state.ended) {
      const launch = await get(`api/launches/${id}`);
      if (state.ended) return;
      if (launch.shows || launch.ended) {
        if (readDraft()?.name === name) removeDraft();
        return put(root);
      }
      put(lines, launch.output.trimEnd().split("\n").slice(-SHOWN_LINES).join("\n"));
      if (!lines.isConnected)
        put(root, card(t("start.starting"), null, h("p", {}, t("start.preparing")), lines));
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  };
  watch().catch((error) => {
    if (state.ended) return;
    state.failed = true;
    onFailure();
    const href = isNew ? "#/new" : `#/new?resume=${id}`;
    put(
      root,
      errorState(error),
      h("p", {}, h("a", { class: "button main", id: "edit", href }, t("start.edit"))),
    );
  });
  return { hasFailed: () => state.failed, end: () => (state.ended = true) };
}
