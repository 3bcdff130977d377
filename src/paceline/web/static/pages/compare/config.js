// The config keys in which several runs differ.

import { h, put } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";
import { card, row, table } from "../../lib/ui.js";

const KEYS_SHOWN = 20;

/** `differences`: as in the response of `api/compare`. */
export function configCard(differences, runs, names) {
  const title = t("compare.config");
  if (!differences.length) return card(title, null, h("p", { class: "muted" }, t("compare.config.none")));
  const heads = [{ head: t("compare.key") }, ...names.map((head) => ({ head }))];
  const shown = (value) =>
    value === null || value === undefined
      ? h("span", { class: "muted" }, t("compare.absent"))
      : h("code", {}, typeof value === "object" ? JSON.stringify(value) : String(value));
  const rows = (some) =>
    some.map(({ key: name, values }) => row([h("code", {}, name), ...runs.map((run) => shown(values[run.id]))], heads));
  const place = h("div", {}, table(title, heads, rows(differences.slice(0, KEYS_SHOWN))));
  const all = h(
    "button",
    {
      type: "button",
      on: {
        click: () => {
          put(place, table(title, heads, rows(differences)));
          more.remove();
          place.firstChild.focus();
        },
      },
    },
    t("compare.config.all", { n: differences.length }),
  );
  const more = h("div", { class: "card-foot" }, all);
  return h(
    "section",
    { class: "card flush", id: "config-differences" },
    h(
      "div",
      { class: "card-head" },
      h("h2", {}, title),
      h("span", { class: "muted small" }, t("compare.config.n", { n: differences.length })),
    ),
    place,
    differences.length > KEYS_SHOWN ? more : null,
  );
}
