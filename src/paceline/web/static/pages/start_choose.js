// Dialogs that choose a dataset or a model: in the panel's two folders, in the hub's cache, on the
// hub, and built in.

import { post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { announce, errorState } from "../lib/ui.js";
import { renderCode } from "./start_field.js";

/** Return the button that chooses the dataset of the config. */
export const datasetButton = (state) =>
  chooseButton("choose-data", {
    title: t("data.choose"),
    about: t("data.choose.is"),
    load: async () => datasetSections(await post("api/datasets", {})),
    select: (path) => {
      state.edit({ dataset: path });
      announce(t("data.selected", { path }));
    },
  });

/** Return the button that chooses the model of the config. */
export const modelButton = (state) =>
  chooseButton("choose-model", {
    title: t("model.choose"),
    about: t("model.choose.is"),
    load: async () => modelSections(await post("api/models", {})),
    select: (path) => {
      state.edit({ model: path });
      announce(t("model.selected", { path }));
    },
  });

function datasetSections(response) {
  return [
    ...folderSections(
      response,
      response.datasets,
      (file) => `${format.bytes(file.size_bytes)} · ${format.ago(file.modified_at)}`,
      t("data.none"),
    ),
    builtinSection(response),
  ];
}

function modelSections(response) {
  const size = ({ parameters }) =>
    parameters ? t("choose.parameters", { n: format.short(parameters) }) : "";
  return [
    ...folderSections(
      response,
      response.models,
      (model) => format.ago(model.modified_at),
      t("model.none"),
    ),
    { title: t("model.cached"), items: response.cached.map((model) => [model.path, size(model)]) },
    { title: t("model.hub"), items: response.hub.map((model) => [model.path, size(model)]) },
    builtinSection(response),
  ];
}

const builtinSection = ({ builtin }) => ({
  title: t("data.builtin"),
  items: builtin.map(({ path, task }) => [path, t("data.for", { task })]),
});

/** Return a section for each of the two folders, which are one if they are the same. */
function folderSections({ folders, left_out: leftOut }, entries, note, none) {
  const kinds = Object.entries(folders);
  return kinds.map(([kind, folder], index) => ({
    title: t(`choose.${kind}`, { folder }),
    items: entries.filter((entry) => entry.folder === kind).map((entry) => [entry.path, note(entry)]),
    none: entries.length === 0 && index === 0 ? none : null,
    leftOut: index === kinds.length - 1 ? leftOut : 0,
  }));
}

function chooseButton(id, chooser) {
  const button = h(
    "button",
    {
      type: "button",
      id,
      "aria-label": chooser.title,
      on: { click: () => openDialog(button, chooser) },
    },
    t("start.choose"),
  );
  return button;
}

async function openDialog(button, { title, about, load, select }) {
  const list = h("div", { class: "data-list" }, h("p", { class: "muted" }, t("loading")));
  const filter = h("input", {
    type: "search",
    placeholder: t("choose.filter.hint"),
    "aria-label": t("choose.filter"),
    on: { input: () => draw() },
  });
  const dialog = openModal(button, title, [
    h("p", { class: "muted small" }, renderCode(about)),
    filter,
    list,
  ]);
  const choose = (path) => {
    dialog.close();
    select(path);
  };
  let sections = null;
  const draw = () => sections && put(list, drawSections(sections, filter.value, choose));
  try {
    sections = await load();
    draw();
  } catch (error) {
    put(list, errorState(error));
  }
}

/** Open a dialog with a button that closes it. When it closes, the focus returns to `opener`. */
export function openModal(opener, title, children, closeText = t("cancel")) {
  const dialog = h(
    "dialog",
    { class: "dialog large", "aria-label": title },
    h("h2", {}, title),
    children,
    h("form", { method: "dialog", class: "toolbar" }, h("button", { value: "" }, closeText)),
  );
  document.body.append(dialog);
  dialog.addEventListener("close", () => {
    dialog.remove();
    opener.focus();
  });
  dialog.showModal();
  return dialog;
}

function drawSections(sections, filterText, choose) {
  const searched = filterText.trim().toLowerCase();
  const shown = sections
    .map((section) => ({
      ...section,
      items: section.items.filter(([path]) => path.toLowerCase().includes(searched)),
    }))
    .filter(({ items, none, leftOut }) => items.length || (!searched && (none || leftOut)));
  if (!shown.length) return h("p", { class: "muted" }, t("choose.nothing"));
  return shown.map(({ title, items, none, leftOut }) => [
    h("h3", {}, title),
    items.length ? h("ul", {}, items.map(([path, note]) => drawItem(path, note, choose))) : null,
    none ? h("p", { class: "muted" }, none) : null,
    leftOut ? h("p", { class: "muted small" }, t("choose.left_out", { n: leftOut })) : null,
  ]);
}

const drawItem = (path, note, choose) =>
  h(
    "li",
    {},
    h(
      "button",
      { type: "button", class: "data-item", on: { click: () => choose(path) } },
      h("span", { class: "mono" }, path),
      h("span", { class: "muted small" }, note),
    ),
  );
