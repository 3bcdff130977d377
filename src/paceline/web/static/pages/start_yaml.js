// The editor of the config text, with line numbers and errors.

import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { copy, icon } from "../lib/ui.js";
import { errorList } from "./start.js";
import { noticeList } from "./start_paste.js";

export function makeEditor(state) {
  const verdict = h("div", { class: "verdict", id: "verdict", role: "status" });
  const lineNumbers = h("div", { class: "yaml-lines", "aria-hidden": "true" });
  const text = h("textarea", {
    id: "yaml",
    class: "yaml-text",
    spellcheck: "false",
    autocapitalize: "off",
    autocomplete: "off",
    wrap: "off",
    "aria-label": t("start.yaml"),
    "aria-describedby": "verdict yaml-hint",
    prop: { value: state.yaml },
    on: {
      input: () => state.setYaml(text.value, "text"),
      scroll: () => (lineNumbers.scrollTop = text.scrollTop),
      keydown: keepIndentation,
    },
  });
  const copyButton = h(
    "button",
    {
      type: "button",
      class: "quiet",
      on: {
        click: async () =>
          (copyButton.textContent = (await copy(text.value)) ? t("copied") : t("copy.failed")),
      },
    },
    t("copy"),
  );
  const node = h(
    "section",
    { class: "card yaml" },
    h("div", { class: "card-head" }, h("h2", {}, t("start.yaml")), copyButton),
    h("div", { class: "yaml-box" }, lineNumbers, text),
    h("p", { class: "sr", id: "yaml-hint" }, t("start.yaml.tab")),
    verdict,
  );

  // Enter keeps the indentation. Tab is not handled, because it moves to the next control.
  function keepIndentation(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    const start = text.value.lastIndexOf("\n", text.selectionStart - 1) + 1;
    const line = text.value.slice(start, text.selectionStart);
    const indent = line.match(/^\s*/)[0] + (/:\s*$/.test(line) ? "  " : "");
    if (!indent) return;
    event.preventDefault();
    text.setRangeText(`\n${indent}`, text.selectionStart, text.selectionEnd, "end");
    state.setYaml(text.value, "text");
  }

  function goToLine(line) {
    const lines = text.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    text.focus();
    text.setSelectionRange(start, start + (lines[line - 1]?.length ?? 0));
    text.scrollTop = Math.max(0, (line - 4) * (text.scrollHeight / lines.length));
  }

  function draw(errors = []) {
    const errorLines = new Set(errors.map((error) => error.line));
    const count = text.value.split("\n").length;
    put(
      lineNumbers,
      Array.from({ length: count }, (_, index) =>
        h("div", { class: errorLines.has(index + 1) ? "bad" : null }, index + 1),
      ),
    );
    lineNumbers.scrollTop = text.scrollTop;
    text.rows = Math.min(26, Math.max(12, count + 1));
  }

  state.on("text", (source) => {
    if (source !== "text") {
      const { scrollTop } = text;
      text.value = state.yaml;
      text.scrollTop = scrollTop;
    }
    draw();
  });
  state.on("busy", () => node.classList.add("busy"));
  state.on("checked", (result) => {
    node.classList.remove("busy");
    draw(result.errors);
    text.setAttribute("aria-invalid", String(!result.ok));
    put(
      verdict,
      result.ok
        ? h("p", { class: "good" }, icon("done"), t("start.valid"))
        : [
            h("p", { class: "bad" }, t("start.invalid", { n: result.errors.length })),
            errorList(result.errors, goToLine),
          ],
      noticeList(result.notices),
    );
  });
  draw();
  return { node };
}
