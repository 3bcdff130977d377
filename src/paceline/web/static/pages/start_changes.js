// The config changes with which a run is resumed, and the permission that some of them require.

import { post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { card, icon } from "../lib/ui.js";
import { formatValue } from "./start_field.js";

/**
 * Return the card of the changes. `onChange` is called when `changed()`, `ready()` or `allowed()`
 * may return a new value.
 */
export function changesCard(state, id) {
  const body = h("div", { "aria-live": "polite" }, h("p", { class: "muted" }, t("loading")));
  const checkbox = h("input", {
    type: "checkbox",
    id: "allow",
    on: { change: () => changesView.onChange() },
  });
  let changes = null;
  let comparedYaml = null;
  const changesView = {
    node: card(t("changes.title"), null, body),
    onChange: () => {},
    changed: () => Boolean(changes?.length),
    ready: () => comparedYaml === state.yaml && (!needsPermission() || checkbox.checked),
    allowed: () => needsPermission() && checkbox.checked,
  };
  const needsPermission = () => Boolean(changes?.some((change) => change.needs_allow));

  state.on("checked", async (result) => {
    if (!result.ok) return;
    const yaml = state.yaml;
    try {
      const response = await post(`api/runs/${id}/diff`, { yaml });
      if (yaml !== state.yaml || state.ended) return;
      changes = response.changes;
      comparedYaml = yaml;
      draw();
    } catch (error) {
      changes = null;
      comparedYaml = null;
      put(
        body,
        h("p", { class: "bad" }, icon("failed"), String(error.what)),
        error.fix ? h("p", { class: "small" }, t("error.fix", { fix: error.fix })) : null,
      );
    }
    changesView.onChange();
  });

  function draw() {
    if (!changes.length)
      return void put(body, h("p", { class: "muted", id: "no-changes" }, t("changes.none")));
    if (!needsPermission()) checkbox.checked = false;
    put(
      body,
      h(
        "div",
        { class: "table-wrap", tabindex: 0, role: "region", "aria-label": t("changes.title") },
        h(
          "table",
          { id: "changes" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              [t("changes.key"), t("changes.old"), t("changes.new")].map((label) =>
                h("th", { scope: "col" }, label),
              ),
            ),
          ),
          h(
            "tbody",
            {},
            changes.map((change) =>
              h(
                "tr",
                {},
                h(
                  "th",
                  { scope: "row" },
                  h("code", {}, change.key),
                  change.needs_allow
                    ? h("div", { class: "small warn" }, icon("warning"), t("changes.needs"))
                    : null,
                ),
                h("td", {}, h("del", {}, formatValue(change.old))),
                h("td", {}, h("ins", {}, formatValue(change.new))),
              ),
            ),
          ),
        ),
      ),
      needsPermission()
        ? h("p", {}, h("label", { class: "check" }, checkbox, t("changes.allow")))
        : null,
    );
    return undefined;
  }
  return changesView;
}
