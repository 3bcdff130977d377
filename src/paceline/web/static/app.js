// The frame of the panel: the top bar, routing, and the connection banner.

import * as api from "./lib/api.js";
import { h, put } from "./lib/dom.js";
import { LANGUAGES, getLanguage, onLanguage, setLanguage, t } from "./lib/i18n.js";
import { loadMessages } from "./lib/messages.js";
import { THEMES, getTheme, setTheme } from "./lib/theme.js";
import { announce, emptyState, errorState, hideBubble, icon } from "./lib/ui.js";

api.storeToken();

// The first matching route is used. A page has `show(root, params, ctx)`, which returns a function
// that removes the page. If that function has an `update` and the address changes within the page,
// `update(params)` is called instead of a new `show`.
const ROUTES = [
  [/^\/?$/, [], () => import("./pages/runs.js"), "runs"],
  [/^\/new$/, [], () => import("./pages/start.js"), "new"],
  [/^\/learn(?:\/([a-z-]+))?$/, ["topic"], () => import("./pages/learn.js"), "learn"],
  [/^\/plan$/, [], () => import("./pages/plan.js"), "plan"],
  [/^\/compare\/([^/]+)$/, ["ids"], () => import("./pages/compare.js"), "runs"],
  [/^\/run\/([^/]+)\/chat$/, ["id"], () => import("./pages/chat.js"), "runs"],
  [/^\/run\/([^/]+)(?:\/([a-z]+))?$/, ["id", "tab"], () => import("./pages/run.js"), "runs"],
];

const main = h("main", { id: "main", tabindex: -1 });
const bar = h("header", { class: "bar" });
const banner = h("div", { class: "banner-place", role: "status", "aria-live": "polite" });
const skipLink = h("a", { href: "#main", class: "skip" });
skipLink.addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.body.append(
  skipLink,
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
  /**
   * Set or (null) remove query parameters of the address, without a new entry in the browser's
   * history.
   */
  setQuery(values) {
    const [path, query] = parseHash();
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") query.delete(name);
      else query.set(name, value);
    }
    const rest = query.toString();
    history.replaceState(null, "", `#${path}${rest ? `?${rest}` : ""}`);
  },
  query: () => parseHash()[1],
  title: (text) => (document.title = text ? `${text} · Paceline` : "Paceline"),
};

let current = { page: null, remove: null, key: null };
let routeCount = 0;

function parseHash() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  return [path || "/", new URLSearchParams(query)];
}

async function route({ force = false } = {}) {
  const [path, query] = parseHash();
  const match = ROUTES.map(([pattern, names, load, section]) => [
    path.match(pattern),
    names,
    load,
    section,
  ]).find(([match]) => match);
  const thisRoute = ++routeCount;
  hideBubble();
  drawBar(match?.[3]);
  if (!match) {
    removePage();
    ctx.title(t("page.not_found"));
    put(
      main,
      emptyState(
        t("page.not_found"),
        t("page.not_found.text"),
        h("p", {}, h("a", { href: "#/" }, t("nav.runs"))),
      ),
    );
    return;
  }
  const [groups, names, load] = match;
  const params = { query };
  names.forEach((name, index) =>
    (params[name] =
      groups[index + 1] === undefined ? undefined : decodeURIComponent(groups[index + 1])),
  );
  const key = `${load}${params.id ?? params.ids ?? ""}`;
  if (!force && current.key === key && current.remove?.update) {
    current.remove.update(params);
    return;
  }
  removePage();
  const root = h("div", { class: "page" });
  put(main, root);
  try {
    const page = await load();
    if (thisRoute !== routeCount) return;
    const remove = await page.show(root, params, ctx);
    if (thisRoute !== routeCount) return void remove?.();
    current = { page, remove, key };
  } catch (error) {
    if (error.name !== "ApiError") console.error(error); // the page shows errors of the server
    if (thisRoute === routeCount)
      put(
        root,
        errorState(loadError(error), () => route({ force: true })),
      );
  }
}

// If the module of a page cannot be fetched, the server is not reachable.
const loadError = (error) =>
  /dynamically imported|module/i.test(error.message) ? { what: "no-answer" } : error;

function removePage() {
  try {
    current.remove?.();
  } finally {
    current = { page: null, remove: null, key: null };
  }
}

function drawBar(section) {
  const link = (name, href, text) =>
    h("a", { href, class: "bar-link", "aria-current": section === name ? "page" : null }, text);
  const theme = getTheme();
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const otherLanguage = Object.keys(LANGUAGES).find((name) => name !== getLanguage());
  skipLink.textContent = t("skip");
  put(
    bar,
    h(
      "a",
      { href: "#/", class: "brand" },
      h("img", { src: "icons/paceline.svg", alt: "", width: 24, height: 24 }),
      "Paceline",
    ),
    h(
      "nav",
      { "aria-label": t("nav") },
      link("runs", "#/", t("nav.runs")),
      link("new", "#/new", [icon("plus"), t("nav.new")]),
      link("plan", "#/plan", t("nav.plan")),
      link("learn", "#/learn", t("nav.learn")),
    ),
    h(
      "div",
      { class: "bar-end" },
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          id: "language",
          lang: otherLanguage === "zh" ? "zh-CN" : "en",
          title: t("language"),
          on: { click: () => setLanguage(otherLanguage) },
        },
        LANGUAGES[otherLanguage],
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
              drawBar(section);
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

let timer = null;
api.onConnection(({ state, retryAt }) => {
  clearInterval(timer);
  if (state === "connected") {
    if (banner.firstChild) announce(t("server.reconnected"));
    put(banner);
    return;
  }
  const countdown = h("span", { "aria-hidden": "true" });
  const tick = () => {
    const left_s = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
    countdown.textContent = left_s > 0 ? t("server.retry", { left_s }) : t("server.trying");
  };
  tick();
  timer = setInterval(tick, 500);
  put(
    banner,
    h(
      "div",
      { class: "banner" },
      icon("warning"),
      h("span", {}, t("server.lost")),
      countdown,
      h(
        "button",
        {
          type: "button",
          on: {
            click: () => {
              api.retryNow();
              if (!current.remove) route({ force: true });
            },
          },
        },
        t("server.retry_now"),
      ),
    ),
  );
});

addEventListener("hashchange", async () => {
  await route();
  if (!main.contains(document.activeElement) && document.activeElement === document.body)
    main.focus({ preventScroll: true });
});
onLanguage(async () => {
  await loadMessages(api.get);
  await route({ force: true });
  document.getElementById("language")?.focus();
});
loadMessages(api.get).then(() => route());
