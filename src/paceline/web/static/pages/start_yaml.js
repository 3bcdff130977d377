// The config as text, with line numbers and its errors.

import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { copy, icon } from "../lib/ui.js";
import { mistakes } from "./start.js";

export function makeEditor(state) {
  const verdict = h("div", { class: "verdict", id: "verdict", role: "status" });
  const numbers = h("div", { class: "yaml-lines", "aria-hidden": "true" });
  const text = h("textarea", {
    id: "yaml", class: "yaml-text", spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off",
    "aria-label": t("start.yaml"), "aria-describedby": "verdict yaml-hint", prop: { value: state.yaml },
    on: {
      input: () => state.setYaml(text.value, "text"),
      scroll: () => (numbers.scrollTop = text.scrollTop),
      keydown: tab,
    },
  });
  const copied = h("button", { type: "button", class: "quiet", on: { click: async () => (copied.textContent = (await copy(text.value)) ? t("copied") : t("copy.failed")) } }, t("copy"));
  const node = h("section", { class: "card yaml" }, h("div", { class: "card-head" }, h("h2", {}, t("start.yaml")), copied),
    h("div", { class: "yaml-box" }, numbers, text), h("p", { class: "sr", id: "yaml-hint" }, t("start.yaml.tab")), verdict);

  // Tab moves to the next control, as everywhere; Enter keeps the indentation.
  function tab(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    const start = text.value.lastIndexOf("\n", text.selectionStart - 1) + 1;
    const line = text.value.slice(start, text.selectionStart);
    const indent = line.match(/^\s*/)[0] + (/:\s*$/.test(line) ? "  " : "");
    if (!indent) return;
    event.preventDefault();
    text.setRangeText(`\n${indent}`, text.selectionStart, text.selectionEnd, "end");
    state.setYaml(text.value, "text");
  }

  function go(line) {
    const lines = text.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    text.focus();
    text.setSelectionRange(start, start + (lines[line - 1]?.length ?? 0));
    text.scrollTop = Math.max(0, (line - 4) * (text.scrollHeight / lines.length));
  }

  function draw(errors = []) {
    const bad = new Set(errors.map((one) => one.line));
    const count = text.value.split("\n").length;
    put(numbers, Array.from({ length: count }, (_, at) => h("div", { class: bad.has(at + 1) ? "bad" : null }, at + 1)));
    numbers.scrollTop = text.scrollTop;
    text.rows = Math.min(26, Math.max(12, count + 1));
  }

  state.on("text", (by) => {
    if (by !== "text") {
      const { scrollTop } = text;
      text.value = state.yaml;
      text.scrollTop = scrollTop;
    }
    draw();
  });
  state.on("busy", () => node.classList.add("busy"));
  state.on("checked", (found) => {
    node.classList.remove("busy");
    draw(found.errors);
    text.setAttribute("aria-invalid", String(!found.ok));
    put(verdict,
      found.ok ? h("p", { class: "good" }, icon("done"), t("start.sound")) : [h("p", { class: "bad" }, t("start.wrong", { n: found.errors.length })), mistakes(found.errors, go)],
      found.notices.length ? h("ul", { class: "notices" }, found.notices.map((one) => h("li", { class: one.level === "warning" ? "warn" : null }, icon(one.level === "warning" ? "warning" : "notice"), one.text))) : null);
  });
  draw();
  return { node };
}
