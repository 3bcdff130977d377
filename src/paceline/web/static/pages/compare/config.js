// The config keys in which several runs differ.

import { h, put } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";
import { card, row, table } from "../../lib/ui.js";

const KEYS_SHOWN = 20;

/** Return the card with the differing keys. `differences` is from the response of `api/compare`. */
export function configCard(differences, runs, names) {
  const title = t("compare.config");
  if (!differences.length)
    return card(title, null, h("p", { class: "muted" }, t("compare.config.none")));
  const columns = [{ label: t("compare.key") }, ...names.map((label) => ({ label }))];
  const showValue = (value) =>
    value === null || value === undefined
      ? h("span", { class: "muted" }, t("compare.absent"))
      : h("code", {}, typeof value === "object" ? JSON.stringify(value) : String(value));
  const rows = (shownDifferences) =>
    shownDifferences.map(({ key: name, values }) =>
      row([h("code", {}, name), ...runs.map((run) => showValue(values[run.id]))], columns),
    );
  const tableNode = h("div", {}, table(title, columns, rows(differences.slice(0, KEYS_SHOWN))));
  const showAllButton = h(
    "button",
    {
      type: "button",
      on: {
        click: () => {
          put(tableNode, table(title, columns, rows(differences)));
          footer.remove();
          tableNode.firstChild.focus();
        },
      },
    },
    t("compare.config.all", { n: differences.length }),
  );
  const footer = h("div", { class: "card-foot" }, showAllButton);
  return h(
    "section",
    { class: "card flush", id: "config-differences" },
    h(
      "div",
      { class: "card-head" },
      h("h2", {}, title),
      h("span", { class: "muted small" }, t("compare.config.n", { n: differences.length })),
    ),
    tableNode,
    differences.length > KEYS_SHOWN ? footer : null,
  );
}
