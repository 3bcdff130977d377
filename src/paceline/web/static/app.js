// The frame of the panel: the top bar, routing, and the connection state.

import * as api from "./lib/api.js";
import { h, put } from "./lib/dom.js";
import { LANGUAGES, getLanguage, onLanguage, setLanguage, t } from "./lib/i18n.js";
import { THEMES, getTheme, setTheme } from "./lib/theme.js";
import { announce, emptyState, errorState, hideBubble, icon } from "./lib/ui.js";

api.takeToken();

// The first matching route is used. A page has `show(root, params, ctx)`, which returns a function that removes the page. If that
// function has an `update` and the address changes within the page, `update(params)` is called instead of a new `show`.
const ROUTES = [
  [/^\/?$/, [], () => import("./pages/runs.js"), "runs"],
  [/^\/new$/, [], () => import("./pages/start.js"), "new"],
  [/^\/compare\/([^/]+)$/, ["ids"], () => import("./pages/compare.js"), "runs"],
  [/^\/run\/([^/]+)\/chat$/, ["id"], () => import("./pages/chat.js"), "runs"],
  [/^\/run\/([^/]+)(?:\/([a-z]+))?$/, ["id", "tab"], () => import("./pages/run.js"), "runs"],
];

const main = h("main", { id: "main", tabindex: -1 });
const bar = h("header", { class: "bar" });
const banner = h("div", { class: "banner-place", role: "status", "aria-live": "polite" });
const skip = h("a", { href: "#main", class: "skip" });
skip.addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.body.append(
  skip,
  bar,
  banner,
  main,
  h("div", { id: "announcer", class: "sr", role: "status", "aria-live": "polite" }),
);

/** The `ctx` argument of a page. */
const ctx = {
  api,
  announce,
  hasToken: api.hasToken,
  /** Go to another page, such as `#/run/ID/overview`. */
  go: (hash) => (location.hash = hash),
  /** Set or (null) remove query parameters of the address, without a new entry in the browser's history. */
  setQuery(values) {
    const [path, query] = split();
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") query.delete(name);
      else query.set(name, value);
    }
    const rest = query.toString();
    history.replaceState(null, "", `#${path}${rest ? `?${rest}` : ""}`);
  },
  query: () => split()[1],
  title: (text) => (document.title = text ? `${text} · Paceline` : "Paceline"),
};

let shown = { page: null, down: null, key: null };
let turn = 0;

function split() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  return [path || "/", new URLSearchParams(query)];
}

async function route({ again = false } = {}) {
  const [path, query] = split();
  const found = ROUTES.map(([pattern, names, load, place]) => [path.match(pattern), names, load, place]).find(
    ([match]) => match,
  );
  const mine = ++turn;
  hideBubble();
  drawBar(found?.[3]);
  if (!found) {
    takeDown();
    ctx.title(t("page.none"));
    put(main, emptyState(t("page.none"), t("page.none.text"), h("p", {}, h("a", { href: "#/" }, t("nav.runs")))));
    return;
  }
  const [match, names, load] = found;
  const params = { query };
  names.forEach((name, at) => (params[name] = match[at + 1] === undefined ? undefined : decodeURIComponent(match[at + 1])));
  const key = `${load}${params.id ?? params.ids ?? ""}`;
  if (!again && shown.key === key && shown.down?.update) {
    shown.down.update(params);
    return;
  }
  takeDown();
  const root = h("div", { class: "page" });
  put(main, root);
  try {
    const page = await load();
    if (mine !== turn) return;
    const down = await page.show(root, params, ctx);
    if (mine !== turn) return void down?.();
    shown = { page, down, key };
  } catch (error) {
    if (error.name !== "ApiError") console.error(error); // what the server answers is said on the page
    if (mine === turn)
      put(
        root,
        errorState(loadError(error), () => route({ again: true })),
      );
  }
}

// If the module of a page cannot be fetched, the server is not reachable.
const loadError = (error) => (/dynamically imported|module/i.test(error.message) ? { what: "no-answer" } : error);

function takeDown() {
  try {
    shown.down?.();
  } finally {
    shown = { page: null, down: null, key: null };
  }
}

function drawBar(place) {
  const link = (name, href, text) => h("a", { href, class: "bar-link", "aria-current": place === name ? "page" : null }, text);
  const theme = getTheme();
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const other = Object.keys(LANGUAGES).find((name) => name !== getLanguage());
  skip.textContent = t("skip");
  put(
    bar,
    h("a", { href: "#/", class: "brand" }, h("img", { src: "icons/paceline.svg", alt: "", width: 24, height: 24 }), "Paceline"),
    h("nav", { "aria-label": t("nav") }, link("runs", "#/", t("nav.runs")), link("new", "#/new", [icon("plus"), t("nav.new")])),
    h(
      "div",
      { class: "bar-end" },
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          id: "language",
          lang: other === "zh" ? "zh-CN" : "en",
          title: t("language"),
          on: { click: () => setLanguage(other) },
        },
        LANGUAGES[other],
      ),
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          id: "theme",
          title: t("theme.next", { next: t(`theme.${next}`) }),
          on: {
            click: () => {
              setTheme(next);
              drawBar(place);
              document.getElementById("theme").focus();
            },
          },
        },
        icon({ system: "system", light: "sun", dark: "moon" }[theme]),
        h("span", { class: "wide" }, t(`theme.${theme}`)),
      ),
    ),
  );
}

let ticking = null;
api.onConnection(({ state, retryAt }) => {
  clearInterval(ticking);
  if (state === "there") {
    if (banner.firstChild) announce(t("server.back"));
    put(banner);
    return;
  }
  const left = h("span", { "aria-hidden": "true" });
  const tick = () => {
    const left_s = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
    left.textContent = left_s > 0 ? t("server.retry", { left_s }) : t("server.trying");
  };
  tick();
  ticking = setInterval(tick, 500);
  put(
    banner,
    h(
      "div",
      { class: "banner" },
      icon("warning"),
      h("span", {}, t("server.gone")),
      left,
      h(
        "button",
        {
          type: "button",
          on: {
            click: () => {
              api.tryNow();
              if (!shown.down) route({ again: true });
            },
          },
        },
        t("server.now"),
      ),
    ),
  );
});

addEventListener("hashchange", async () => {
  await route();
  if (!main.contains(document.activeElement) && document.activeElement === document.body) main.focus({ preventScroll: true });
});
onLanguage(() => route({ again: true }).then(() => document.getElementById("language")?.focus()));
route();
