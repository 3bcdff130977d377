// Common elements of the pages: terms with explanations, figures, badges, tabs, empty and error states.

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
  sun: "M12 8a4 4 0 1 0 .01 0M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  moon: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  system: "M3 5h18v11H3zM9 20h6M12 16v4",
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 .01 0M16 16l4.5 4.5",
  compare: "M7 20V10M12 20V4M17 20v-7",
  close: "M6 6l12 12M18 6L6 18",
  up: "M6 14l6-6 6 6",
  down: "M6 10l6 6 6-6",
  link: "M10 14a4 4 0 0 0 6 0l3-3a4 4 0 0 0-6-6l-1 1M14 10a4 4 0 0 0-6 0l-3 3a4 4 0 0 0 6 6l1-1",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  play: "M8 5l11 7-11 7z",
  chat: "M4 5h16v11H9l-5 4z",
};

/** An icon next to a text. It is hidden from screen readers. */
export function icon(name) {
  const path = svg("path", { d: ICONS[name] ?? ICONS.notice });
  return svg("svg", { viewBox: "0 0 24 24", class: `icon icon-${name}`, "aria-hidden": "true", focusable: "false" }, path);
}

/** The status of a run: an icon and a text. */
export const badge = (status) => h("span", { class: `badge badge-${status}` }, icon(status), t(`status.${status}`));

// --- Terms: an underlined text with an explanation on hover, focus and touch ----------------------------------------------------

let bubble = null;

/** `text` with its explanation, which is shown on hover, focus and touch, and is the description for screen readers. */
export function term(text, meaning) {
  const id = newId("meaning");
  const hidden = h("span", { id, class: "sr" }, meaning);
  const word = h("button", { type: "button", class: "term", "aria-describedby": id }, text);
  for (const event of ["mouseenter", "focus", "click"]) word.addEventListener(event, () => showBubble(word, meaning));
  for (const event of ["mouseleave", "blur"]) word.addEventListener(event, hideBubble);
  word.addEventListener("keydown", (event) => event.key === "Escape" && hideBubble());
  return h("span", { class: "term-wrap" }, word, hidden);
}

/** The term of a key that has the texts `KEY` and `KEY.is`. */
export const termOf = (key) => (has(`${key}.is`) ? term(t(key), t(`${key}.is`)) : h("span", {}, t(key)));

function showBubble(at, meaning) {
  hideBubble();
  bubble = h("div", { class: "bubble", "aria-hidden": "true" }, meaning);
  document.body.append(bubble);
  const place = at.getBoundingClientRect();
  const size = bubble.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, document.documentElement.clientWidth - size.width - 8));
  const below = place.bottom + size.height + 8 < innerHeight;
  bubble.style.left = `${left}px`;
  bubble.style.top = `${below ? place.bottom + 6 : place.top - size.height - 6}px`;
}

export function hideBubble() {
  bubble?.remove();
  bubble = null;
}

// --- Figures ----------------------------------------------------------------------------------------------------

/** A figure: its name (with an explanation), its value and a note. */
export function figure(key, value, beside = null) {
  return h(
    "div",
    { class: "figure", data: { key } },
    h("div", { class: "figure-name" }, termOf(key)),
    h("div", { class: "figure-value" }, value),
    beside === null ? null : h("div", { class: "figure-beside" }, beside),
  );
}

export const figures = (...all) => h("div", { class: "figures" }, ...all);

/** A card with a heading. `beside`: a node to the right of the heading. */
export function card(title, beside, ...children) {
  return h(
    "section",
    { class: "card" },
    title === null ? null : h("div", { class: "card-head" }, h("h2", {}, title), beside),
    ...children,
  );
}

/** A table that scrolls horizontally on a narrow screen, also by keyboard. `columns`: [{text or node, number}]. */
export function table(caption, columns, rows, attrs = {}) {
  return h(
    "div",
    { class: "table-wrap", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      attrs,
      h("caption", { class: "sr" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((one) => h("th", { scope: "col", class: one.number ? "number" : null, "aria-sort": one.sort }, one.head)),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}

export const row = (cells, columns) =>
  h(
    "tr",
    {},
    cells.map((cell, at) =>
      h(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: columns[at]?.number ? "number" : null }, cell),
    ),
  );

// --- Empty and error states -------------------------------------------------------------------------------------

/** An empty state: why there is nothing to show, and what to do. */
export function emptyState(title, text, ...more) {
  return h("div", { class: "state" }, h("h2", {}, title), h("p", {}, text), ...more);
}

/** An error: what, allowed, fix. `again`: a listener for a Retry button. */
export function errorState(error, again = null) {
  const none = error.what === "no-answer";
  return h(
    "div",
    { class: "state state-error", role: "alert" },
    h("h2", {}, icon("warning"), none ? t("error.no_answer") : String(error.what ?? error.message ?? error)),
    error.allowed ? h("p", {}, t("error.allowed", { allowed: error.allowed })) : null,
    none || error.fix ? h("p", {}, t("error.fix", { fix: none ? t("error.no_answer.fix") : error.fix })) : null,
    again ? h("p", {}, h("button", { type: "button", on: { click: again } }, t("error.again"))) : null,
  );
}

/** A command to type, and a button that copies it. */
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
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A row of buttons of which one is selected. `choices`: [[value, text]]. Return the element; its `set(value)` selects. */
export function choice(label, choices, value, changed) {
  const name = newId("choice");
  const boxes = choices.map(([one, text]) => {
    const box = h("input", {
      type: "radio",
      name,
      value: one,
      prop: { checked: one === value },
      on: { change: () => changed(one) },
    });
    return [one, box, h("label", {}, box, h("span", {}, text))];
  });
  const node = h(
    "fieldset",
    { class: "choice" },
    h("legend", { class: "sr" }, label),
    boxes.map(([, , one]) => one),
  );
  node.set = (to) => boxes.forEach(([one, box]) => (box.checked = one === to));
  return node;
}

/** The tabs of a page, as links: the address contains the current tab. */
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
  const place = document.getElementById("announcer");
  if (place) put(place, text);
}
