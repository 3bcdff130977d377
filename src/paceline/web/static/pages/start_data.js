// Datasets: choose a file of the folder, upload one, and preview its first rows as the model gets them.

import { get, post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { announce, errorState, icon } from "../lib/ui.js";
import { coded } from "./start_form.js";

const DATA_KEYS = ["model", "tokenizer", "task", "dataset", "format", "system", "chat_template", "train_args.max_length", "train_args.truncation_strategy", "train_args.train_on_inputs", "train_args.train_on_turns", "ignore_columns"];

export function datasetTools(state) {
  const rows = h("div", { id: "preview", "aria-live": "polite" });
  const feedback = h("div", { "aria-live": "polite" });
  const look = h("button", { type: "button", id: "look", on: { click: () => preview() } }, icon("search"), t("data.look"));
  const number = h("select", { id: "rows", on: { change: () => shown !== null && preview() } }, [3, 5, 10, 25].map((one) => h("option", { value: one, prop: { selected: one === 5 } }, t("data.rows", { n: one }))));
  const choose = h("button", { type: "button", id: "choose-data", on: { click: chooseFile } }, t("data.choose"));
  const file = h("input", { type: "file", id: "upload", accept: ".json,.jsonl,.ndjson,.csv,.tsv,.parquet,.arrow,.txt,.md", class: "sr", on: { change: () => file.files[0] && upload(file.files[0]) } });
  const uploadButton = h("label", { for: "upload", class: "button file" }, icon("plus"), t("data.upload"));
  const node = h("div", { class: "data-tools" },
    h("div", { class: "toolbar" }, choose, h("span", { class: "file-wrap" }, file, uploadButton), h("span", { class: "toolbar end" }, h("label", { class: "sr", for: "rows" }, t("data.rows.label")), number, look)),
    feedback, rows);
  let shown = null; // the settings that the rows shown are of
  let control = null;

  node.addEventListener("dragover", (event) => { event.preventDefault(); node.classList.add("drop"); });
  node.addEventListener("dragleave", () => node.classList.remove("drop"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    node.classList.remove("drop");
    if (event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]);
  });
  state.on("checked", (found) => {
    if (shown !== null && found.ok && settings(found) !== shown) preview();
  });

  const settings = (found) => JSON.stringify(DATA_KEYS.map((key) => found.values[key]?.value));

  async function preview() {
    control?.abort();
    control = new AbortController();
    const { signal } = control;
    shown = state.found ? settings(state.found) : "";
    put(rows, h("p", { class: "muted" }, t("data.reading")));
    try {
      const found = await post("api/preview", { yaml: state.yaml, rows: Number(number.value) }, { signal });
      if (!signal.aborted) put(rows, drawRows(found));
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted) put(rows, errorState(error));
    }
  }

  async function upload(one) {
    const stop = new AbortController();
    const cancel = h("button", { type: "button", on: { click: () => stop.abort() } }, t("cancel"));
    put(feedback, h("p", {}, t("data.uploading", { name: one.name, size: format.bytes(one.size) }), " ", cancel));
    const body = new FormData();
    body.append("file", one);
    try {
      const found = await post("api/upload", body, { signal: stop.signal });
      put(feedback, h("p", { class: "good" }, icon("done"), t("data.uploaded", { path: found.path, size: format.bytes(found.size_bytes) })));
      await state.edit({ dataset: found.path });
    } catch (error) {
      put(feedback, error.name === "AbortError" ? h("p", { class: "muted" }, t("data.cancelled")) : errorState(error));
    } finally {
      file.value = "";
    }
  }

  async function chooseFile() {
    const list = h("div", { class: "data-list" }, h("p", { class: "muted" }, t("loading")));
    const dialog = h("dialog", { class: "dialog wide", "aria-labelledby": "choose-title" },
      h("h2", { id: "choose-title" }, t("data.choose")), h("p", { class: "muted small" }, t("data.choose.is")), list,
      h("form", { method: "dialog", class: "toolbar" }, h("button", { value: "" }, t("cancel"))));
    document.body.append(dialog);
    dialog.addEventListener("close", () => { dialog.remove(); choose.focus(); });
    dialog.showModal();
    const take = (path) => {
      dialog.close();
      state.edit({ dataset: path });
      announce(t("data.taken", { path }));
    };
    try {
      const found = await get("api/datasets");
      const item = (path, beside) => h("li", {}, h("button", { type: "button", class: "data-item", on: { click: () => take(path) } }, h("span", { class: "mono" }, path), h("span", { class: "muted small" }, beside)));
      put(list,
        h("h3", {}, t("data.here")),
        found.datasets.length ? h("ul", {}, found.datasets.map((one) => item(one.path, `${format.bytes(one.size_bytes)} · ${format.ago(one.modified_at)}`))) : h("p", { class: "muted" }, t("data.none")),
        found.left_out ? h("p", { class: "muted small" }, t("data.left_out", { n: found.left_out })) : null,
        h("h3", {}, t("data.builtin")), h("ul", {}, found.builtin.map((one) => item(one.path, t("data.for", { task: one.task })))));
    } catch (error) {
      put(list, errorState(error));
    }
  }
  return { node };
}

function drawRows(found) {
  const { rows, max_length: most, overlong, notices } = found;
  if (found.task === "classify" || found.task === "recommend") return drawSamples(found);
  return [
    h("p", { class: "legend small" }, h("mark", { class: "label" }, t("data.label")), t("data.label.is"), " · ", h("span", { class: "plain" }, t("data.plain")), " · ", h("del", { class: "cut" }, t("data.cut")), t("data.cut.is", { most: format.count(most) })),
    h("ol", { class: "rows" }, rows.map((one) => h("li", {},
      h("div", { class: "row-head small" }, h("span", { class: "muted" }, place(one.place)), h("span", {}, one.format ?? ""),
        h("span", {}, t("data.tokens", { n: format.count(one.num_tokens) })), h("span", {}, t("data.labels", { n: format.count(one.label_tokens) })),
        one.cut_tokens ? h("span", { class: "warn" }, icon("warning"), t("data.cuts", { n: format.count(one.cut_tokens) })) : null,
        one.parts > 1 ? h("span", {}, t("data.parts", { n: format.count(one.parts) })) : null),
      one.reason ? h("p", { class: "bad small" }, icon("failed"), t("data.dropped", { reason: one.reason }), one.reason.startsWith("longer") ? ` ${t("data.dropped.long", { overlong })}` : "") : null,
      h("div", { class: "row-text", tabindex: 0, role: "group", "aria-label": place(one.place) }, one.segments.map(segment)),
      one.hidden_tokens ? h("p", { class: "muted small" }, t("data.hidden", { n: format.count(one.hidden_tokens) })) : null))),
    notices.length ? h("ul", { class: "muted small" }, notices.map(([, text]) => h("li", {}, coded(text)))) : null,
  ];
}

/** Images as the model gets them, or rows of a click log. */
function drawSamples({ task, rows, notices }) {
  const label = (one) => h("mark", { class: "label" }, t("data.sample.label", { label: one.label }));
  const body =
    task === "classify"
      ? h("ul", { class: "pictures" }, rows.map((one) => h("li", {},
          h("img", { src: one.image, alt: t("data.sample.image", { label: one.label }) }), label(one), h("span", { class: "muted small" }, `${one.place} · ${one.shape.join(" × ")}`))))
      : h("ol", { class: "rows" }, rows.map((one) => h("li", {},
          h("div", { class: "row-head small" }, h("span", { class: "muted" }, one.place), label(one)),
          h("dl", { class: "facts" }, one.fields.map((field) => h("div", {}, h("dt", { class: "mono" }, field.name), h("dd", {}, field.value)))))));
  return [
    h("p", { class: "legend small" }, t(task === "classify" ? "data.sample.images" : "data.sample.clicks")),
    body,
    notices.length ? h("ul", { class: "muted small" }, notices.map(([, text]) => h("li", {}, coded(text)))) : null,
  ];
}

const place = (text) => text.replace(/ of (?:.*\/)?([^/]+)$/, " · $1");
const segment = (one) => (one.cut ? h("del", { class: `cut${one.label ? " label" : ""}` }, one.text) : one.label ? h("mark", { class: "label" }, one.text) : one.text);
