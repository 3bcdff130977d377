// Elements that pages share: terms with explanations, figures, badges, tabs, empty and error
// states.

import { h, newId, put, svg } from "./dom.js";
import { t, has } from "./i18n.js";

const ICONS = {
  live: "M4 12h4l2-6 4 12 2-6h4",
  done: "M5 12.5l4.5 4.5L19 7.5",
  stopped: "M7 7h10v10H7z",
  failed: "M7 7l10 10M17 7L7 17",
  lost: "M12 6v7M12 17v.5M12 3l10 18H2z",
  waiting: "M12 7v5l3 2M12 3a9 9 0 1 0 .01 0",
  empty: "M12 3a9 9 0 1 0 .01 0",
  restart: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  fault: "M12 6v7M12 17v.5M12 3l10 18H2z",
  checkpoint: "M6 4h12v16l-6-4-6 4z",
  notice: "M12 11v6M12 7v.5M12 3a9 9 0 1 0 .01 0",
  warning: "M12 6v7M12 17v.5M12 3l10 18H2z",
  eval: "M12 12m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
  sun:
    "M12 8a4 4 0 1 0 .01 0M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  moon: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  system: "M3 5h18v11H3zM9 20h6M12 16v4",
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 .01 0M16 16l4.5 4.5",
  compare: "M7 20V10M12 20V4M17 20v-7",
  close: "M6 6l12 12M18 6L6 18",
  up: "M6 14l6-6 6 6",
  down: "M6 10l6 6 6-6",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  link: "M10 14a4 4 0 0 0 6 0l3-3a4 4 0 0 0-6-6l-1 1M14 10a4 4 0 0 0-6 0l-3 3a4 4 0 0 0 6 6l1-1",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  play: "M8 5l11 7-11 7z",
  chat: "M4 5h16v11H9l-5 4z",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  archive: "M3 4h18v4H3zM5 8v12h14V8M10 12h4",
  delete: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13M10 11v6M14 11v6",
  expand: "M4 9V4h5M20 9V4h-5M4 15v5h5M20 15v5h-5",
};

/** Return an icon, which is hidden from screen readers because a text is next to it. */
export function icon(name) {
  const path = svg("path", { d: ICONS[name] ?? ICONS.notice });
  return svg(
    "svg",
    { viewBox: "0 0 24 24", class: `icon icon-${name}`, "aria-hidden": "true", focusable: "false" },
    path,
  );
}

/** Return the status of a run as an icon and a text. */
export const badge = (status) =>
  h("span", { class: `badge badge-${status}` }, icon(status), t(`status.${status}`));

// --- Terms ---------------------------------------------------------------------------------------

let bubble = null;

/**
 * Return `text`, underlined, with an explanation that is shown on hover, focus and touch and read
 * by screen readers.
 */
export function term(text, meaning) {
  const id = newId("meaning");
  const hidden = h("span", { id, class: "sr" }, meaning);
  const button = h("button", { type: "button", class: "term", "aria-describedby": id }, text);
  for (const event of ["mouseenter", "focus", "click"])
    button.addEventListener(event, () => showBubble(button, meaning));
  for (const event of ["mouseleave", "blur"]) button.addEventListener(event, hideBubble);
  button.addEventListener("keydown", (event) => event.key === "Escape" && hideBubble());
  return h("span", { class: "term-wrap" }, button, hidden);
}

/** Return the term of a key: the text of KEY, explained by the text of `KEY.is` if it exists. */
export const termOf = (key) =>
  has(`${key}.is`) ? term(t(key), t(`${key}.is`)) : h("span", {}, t(key));

function showBubble(anchor, meaning) {
  hideBubble();
  bubble = h("div", { class: "bubble", "aria-hidden": "true" }, meaning);
  document.body.append(bubble);
  const anchorBox = anchor.getBoundingClientRect();
  const size = bubble.getBoundingClientRect();
  const left = Math.max(
    8,
    Math.min(anchorBox.left, document.documentElement.clientWidth - size.width - 8),
  );
  const fitsBelow = anchorBox.bottom + size.height + 8 < innerHeight;
  bubble.style.left = `${left}px`;
  bubble.style.top = `${fitsBelow ? anchorBox.bottom + 6 : anchorBox.top - size.height - 6}px`;
}

export function hideBubble() {
  bubble?.remove();
  bubble = null;
}

// --- Figures -------------------------------------------------------------------------------------

/** Return a figure: its name (with an explanation), its value, and a note below. */
export function figure(key, value, note = null) {
  return h(
    "div",
    { class: "figure", data: { key } },
    h("div", { class: "figure-name" }, termOf(key)),
    h("div", { class: "figure-value" }, value),
    note === null ? null : h("div", { class: "figure-beside" }, note),
  );
}

export const figures = (...nodes) => h("div", { class: "figures" }, ...nodes);

/** Return a card with a heading. `headerContent`: a node to the right of the heading. */
export function card(title, headerContent, ...children) {
  return h(
    "section",
    { class: "card" },
    title === null ? null : h("div", { class: "card-head" }, h("h2", {}, title), headerContent),
    ...children,
  );
}

/**
 * Return a table that scrolls horizontally if it is too wide, also by keyboard; on a phone, its rows
 * are cards. `columns`: [{label, number, sort}].
 */
export function table(caption, columns, rows, attrs = {}) {
  const names = columns.map(({ label }) => labelText(label));
  for (const each of rows.flat())
    [...each.children].forEach((cell, index) => {
      if (names[index] && !cell.hasAttribute("colspan")) cell.dataset.label = names[index];
      // In a card, the content of a cell is one box beside its label.
      if (cell.childNodes.length > 1) cell.replaceChildren(h("span", {}, ...cell.childNodes));
    });
  return h(
    "div",
    { class: "table-wrap", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      { ...attrs, class: ["cards", attrs.class].filter(Boolean).join(" ") },
      h("caption", { class: "sr" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((column) =>
            h(
              "th",
              { scope: "col", class: column.number ? "number" : null, "aria-sort": column.sort },
              column.label,
            ),
          ),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}

/** Return the text of a label without the explanation of its term. */
function labelText(label) {
  if (!(label instanceof Node)) return String(label ?? "");
  return (label.querySelector?.(".term") ?? label).textContent;
}

export const row = (cells, columns) =>
  h(
    "tr",
    {},
    cells.map((cell, index) =>
      h(
        index === 0 ? "th" : "td",
        { scope: index === 0 ? "row" : null, class: columns[index]?.number ? "number" : null },
        cell,
      ),
    ),
  );

// --- Empty and error states ----------------------------------------------------------------------

/** Return an empty state: why there is nothing to show, and what to do. */
export function emptyState(title, text, ...children) {
  return h("div", { class: "state" }, h("h2", {}, title), h("p", {}, text), ...children);
}

/**
 * Return a description of an error: `what`, `allowed` and `fix`. `retry`: the listener of a Retry
 * button.
 */
export function errorState(error, retry = null) {
  const isNoResponse = error.what === "no-answer";
  return h(
    "div",
    { class: "state state-error", role: "alert" },
    h(
      "h2",
      {},
      icon("warning"),
      isNoResponse ? t("error.no_answer") : String(error.what ?? error.message ?? error),
    ),
    error.allowed ? h("p", {}, t("error.allowed", { allowed: error.allowed })) : null,
    isNoResponse || error.fix
      ? h("p", {}, t("error.fix", { fix: isNoResponse ? t("error.no_answer.fix") : error.fix }))
      : null,
    retry
      ? h("p", {}, h("button", { type: "button", on: { click: retry } }, t("error.retry")))
      : null,
  );
}

/** Return a command to type in a terminal, with a button that copies it. */
export function command(text) {
  const button = h("button", { type: "button", class: "quiet" }, t("copy"));
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text)) ? t("copied") : t("copy.failed");
    setTimeout(() => (button.textContent = t("copy")), 2000);
  });
  return h("div", { class: "command" }, h("code", { tabindex: 0 }, text), button);
}

/** Copy `text` to the clipboard. Return false if the browser does not allow it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** Download a file. `content`: text or a Blob. */
export function download(name, content, type = "text/plain") {
  const url = URL.createObjectURL(
    content instanceof Blob ? content : new Blob([content], { type }),
  );
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/**
 * Return a row of radio buttons. `choices`: [[value, text]]. The method `set(value)` of the element
 * selects one.
 */
export function choice(label, choices, value, changed) {
  const name = newId("choice");
  const inputs = choices.map(([choiceValue, text]) => {
    const input = h("input", {
      type: "radio",
      name,
      value: choiceValue,
      prop: { checked: choiceValue === value },
      on: { change: () => changed(choiceValue) },
    });
    return [choiceValue, input, h("label", {}, input, h("span", {}, text))];
  });
  const node = h(
    "fieldset",
    { class: "choice" },
    h("legend", { class: "sr" }, label),
    inputs.map(([, , label]) => label),
  );
  node.set = (selected) =>
    inputs.forEach(([choiceValue, input]) => (input.checked = choiceValue === selected));
  return node;
}

/** Return the tabs of a page. They are links, because the address contains the current tab. */
export function tabLinks(label, tabs, current) {
  return h(
    "nav",
    { class: "tabs", "aria-label": label },
    tabs.map(([name, text, href]) =>
      h("a", { href, data: { tab: name }, "aria-current": name === current ? "page" : null }, text),
    ),
  );
}

/** Announce a text to screen readers without moving the focus. */
export function announce(text) {
  const announcer = document.getElementById("announcer");
  if (announcer) put(announcer, text);
}
