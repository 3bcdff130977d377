// The tab Config of a run: the resolved config, derived values and versions.

import { getText } from "../../lib/api.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { command, copy, download, row, table } from "../../lib/ui.js";

export async function show(root, store) {
  const text = await getText(`api/runs/${store.id}/config`, { accept: "text/yaml" }).catch(
    (error) => {
      if (error.status === 404) return null;
      throw error;
    },
  );
  const { run } = store;
  const button = h(
    "button",
    {
      type: "button",
      on: {
        click: async () => (button.textContent = t((await copy(text)) ? "copied" : "copy.failed")),
      },
    },
    t("copy"),
  );
  put(
    root,
    text === null
      ? h("p", { class: "muted" }, t("config.none"))
      : h(
          "section",
          { class: "card" },
          h(
            "div",
            { class: "card-head" },
            h("h2", {}, "config.yaml"),
            h(
              "div",
              { class: "toolbar" },
              button,
              h(
                "button",
                {
                  type: "button",
                  on: { click: () => download(`${run.name}.yaml`, text, "text/yaml") },
                },
                t("config.download"),
              ),
              h("a", { class: "button", href: `#/new?from=${store.id}` }, t("config.new_run")),
            ),
          ),
          h("p", { class: "muted" }, t("config.what")),
          command(`${run.shell.prefix}paceline sft ${run.shell.folder}/config.yaml`),
          h(
            "pre",
            { class: "code", tabindex: 0, role: "region", "aria-label": "config.yaml" },
            text,
          ),
        ),
    h(
      "div",
      { class: "grid charts" },
      facts("config.derived", run.derived),
      h(
        "div",
        { class: "stack" },
        facts("config.model", run.model_info),
        facts("config.data", flat(run.data)),
        facts("config.versions", run.versions),
      ),
    ),
  );
  return () => {};
}

function flat(data, prefix = "") {
  const flattened = {};
  for (const [name, value] of Object.entries(data ?? {})) {
    if (value && typeof value === "object" && !Array.isArray(value))
      Object.assign(flattened, flat(value, `${prefix}${name}.`));
    else flattened[prefix + name] = value;
  }
  return flattened;
}

function facts(title, values) {
  const entries = Object.entries(values ?? {});
  if (!entries.length) return null;
  const columns = [{ label: t("config.key") }, { label: t("config.value") }];
  const showValue = (value) =>
    value === null
      ? format.NONE
      : typeof value === "number"
        ? Number.isInteger(value)
          ? format.count(value)
          : format.digits(value)
        : typeof value === "object"
          ? JSON.stringify(value)
          : String(value);
  return h(
    "section",
    { class: "card flush" },
    h("div", { class: "card-head" }, h("h2", {}, t(title))),
    table(
      t(title),
      columns,
      entries.map(([name, value]) => row([h("code", {}, name), showValue(value)], columns)),
    ),
  );
}
