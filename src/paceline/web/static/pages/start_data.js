// Datasets: upload a file, and preview the first rows as the model receives them.

import { post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { errorState, icon } from "../lib/ui.js";
import { renderCode } from "./start_field.js";

const DATA_KEYS = [
  "model",
  "tokenizer",
  "task",
  "dataset",
  "format",
  "system",
  "chat_template",
  "train_args.max_length",
  "train_args.truncation_strategy",
  "train_args.train_on_inputs",
  "train_args.train_on_turns",
  "ignore_columns",
];

export function datasetTools(state) {
  const rows = h("div", { id: "preview", "aria-live": "polite" });
  const feedback = h("div", { "aria-live": "polite" });
  const previewButton = h(
    "button",
    { type: "button", id: "preview-button", on: { click: () => preview() } },
    icon("search"),
    t("data.preview"),
  );
  const rowCount = h(
    "select",
    { id: "rows", on: { change: () => shownSettings !== null && preview() } },
    [3, 5, 10, 25].map((count) =>
      h("option", { value: count, prop: { selected: count === 5 } }, t("data.rows", { n: count })),
    ),
  );
  const file = h("input", {
    type: "file",
    id: "upload",
    accept: ".json,.jsonl,.ndjson,.csv,.tsv,.parquet,.arrow,.tar,.txt,.md",
    class: "sr",
    on: { change: () => file.files[0] && upload(file.files[0]) },
  });
  const uploadButton = h(
    "label",
    { for: "upload", class: "button file" },
    icon("plus"),
    t("data.upload"),
  );
  const node = h(
    "div",
    { class: "data-tools" },
    h(
      "div",
      { class: "toolbar" },
      h("span", { class: "file-wrap" }, file, uploadButton),
      h(
        "span",
        { class: "toolbar end" },
        h("label", { class: "sr", for: "rows" }, t("data.rows.label")),
        rowCount,
        previewButton,
      ),
    ),
    feedback,
    rows,
  );
  let shownSettings = null; // the settings with which the preview was made
  let controller = null;

  node.addEventListener("dragover", (event) => {
    event.preventDefault();
    node.classList.add("drop");
  });
  node.addEventListener("dragleave", () => node.classList.remove("drop"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    node.classList.remove("drop");
    if (event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]);
  });
  state.on("checked", (result) => {
    if (shownSettings !== null && result.ok && settings(result) !== shownSettings) preview();
  });

  const settings = (result) => JSON.stringify(DATA_KEYS.map((key) => result.values[key]?.value));

  async function preview() {
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    shownSettings = state.checkResult ? settings(state.checkResult) : "";
    put(rows, h("p", { class: "muted" }, t("data.reading")));
    try {
      const response = await post(
        "api/preview",
        { ...state.body(), rows: Number(rowCount.value) },
        { signal },
      );
      if (!signal.aborted) put(rows, drawRows(response));
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted) put(rows, errorState(error));
    }
  }

  async function upload(uploaded) {
    const controller = new AbortController();
    const cancel = h(
      "button",
      { type: "button", on: { click: () => controller.abort() } },
      t("cancel"),
    );
    put(
      feedback,
      h(
        "p",
        {},
        t("data.uploading", { name: uploaded.name, size: format.bytes(uploaded.size) }),
        " ",
        cancel,
      ),
    );
    const body = new FormData();
    body.append("file", uploaded);
    try {
      const stored = await post("api/upload", body, { signal: controller.signal });
      put(
        feedback,
        h(
          "p",
          { class: "good" },
          icon("done"),
          t("data.uploaded", { path: stored.path, size: format.bytes(stored.size_bytes) }),
        ),
      );
      await state.edit({ dataset: stored.path });
    } catch (error) {
      put(
        feedback,
        error.name === "AbortError"
          ? h("p", { class: "muted" }, t("data.cancelled"))
          : errorState(error),
      );
    } finally {
      file.value = "";
    }
  }
  return { node };
}

function drawRows(preview) {
  const { rows, max_length: maxLength, overlong, notices } = preview;
  if (preview.task === "classify" || preview.task === "recommend") return drawSamples(preview);
  return [
    h(
      "p",
      { class: "legend small" },
      h("mark", { class: "label" }, t("data.label")),
      t("data.label.is"),
      " · ",
      h("span", { class: "plain" }, t("data.plain")),
      " · ",
      h("del", { class: "cut" }, t("data.cut")),
      t("data.cut.is", { most: format.count(maxLength) }),
    ),
    h(
      "ol",
      { class: "rows" },
      rows.map((row) =>
        h(
          "li",
          {},
          h(
            "div",
            { class: "row-head small" },
            h("span", { class: "muted" }, shortPlace(row.place)),
            h("span", {}, row.format ?? ""),
            row.answer ? h("span", {}, row.answer) : null,
            h("span", {}, t("data.tokens", { n: format.count(row.num_tokens) })),
            h("span", {}, t("data.labels", { n: format.count(row.label_tokens) })),
            row.cut_tokens
              ? h(
                  "span",
                  { class: "warn" },
                  icon("warning"),
                  t("data.cuts", { n: format.count(row.cut_tokens) }),
                )
              : null,
            row.parts > 1 ? h("span", {}, t("data.parts", { n: format.count(row.parts) })) : null,
          ),
          row.reason
            ? h(
                "p",
                { class: "bad small" },
                icon("failed"),
                t("data.dropped", { reason: row.reason }),
                row.translations.reason.code === "row-too-long" ? ` ${t("data.dropped.long", { overlong })}` : "",
              )
            : null,
          h(
            "div",
            { class: "row-text", tabindex: 0, role: "group", "aria-label": shortPlace(row.place) },
            row.segments.map(segment),
          ),
          row.hidden_tokens
            ? h(
                "p",
                { class: "muted small" },
                t("data.hidden", { n: format.count(row.hidden_tokens) }),
              )
            : null,
        ),
      ),
    ),
    notices.length
      ? h(
          "ul",
          { class: "muted small" },
          notices.map(({ text }) => h("li", {}, renderCode(text))),
        )
      : null,
  ];
}

/** Return a preview of images, as the model receives them, of labeled texts, or of a click log. */
function drawSamples({ task, rows, notices }) {
  const label = (row) =>
    h("mark", { class: "label" }, t("data.sample.label", { label: row.label }));
  const hasImages = rows.some((row) => row.image);
  const body = hasImages
    ? h(
        "ul",
        { class: "pictures" },
        rows.map((row) =>
          h(
            "li",
            {},
            h("img", { src: row.image, alt: t("data.sample.image", { label: row.label }) }),
            label(row),
            h("span", { class: "muted small" }, `${row.place} · ${row.shape.join(" × ")}`),
          ),
        ),
      )
    : h(
        "ol",
        { class: "rows" },
        rows.map((row) =>
          h(
            "li",
            {},
            h(
              "div",
              { class: "row-head small" },
              h("span", { class: "muted" }, row.place),
              label(row),
            ),
            h(
              "dl",
              { class: "facts" },
              (row.fields ?? []).map((field) =>
                h("div", {}, h("dt", { class: "mono" }, field.name), h("dd", {}, field.value)),
              ),
            ),
          ),
        ),
      );
  return [
    h(
      "p",
      { class: "legend small" },
      t(
        hasImages
          ? "data.sample.images"
          : task === "classify"
            ? "data.sample.texts"
            : "data.sample.clicks",
      ),
    ),
    body,
    notices.length
      ? h(
          "ul",
          { class: "muted small" },
          notices.map(({ text }) => h("li", {}, renderCode(text))),
        )
      : null,
  ];
}

const shortPlace = (text) => text.replace(/ of (?:.*\/)?([^/]+)$/, " · $1");
const segment = (part) =>
  part.cut
    ? h("del", { class: `cut${part.label ? " label" : ""}` }, part.text)
    : part.label
      ? h("mark", { class: "label" }, part.text)
      : part.text;
