// Start a run, or resume one with changes: form and YAML side by side and synchronized, with checks and a plan while editing.

import { get, post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { addWords, t } from "../lib/i18n.js";
import { announce, errorState, icon } from "../lib/ui.js";
import { words } from "../i18n/start.js";
import { changesCard } from "./start_changes.js";
import { datasetTools } from "./start_data.js";
import { makeForm } from "./start_form.js";
import { launchCard } from "./start_launch.js";
import { planCard } from "./start_plan.js";
import { makeEditor } from "./start_yaml.js";

addWords(words);

const DRAFT = "paceline-draft";
const CHECK_MS = 300;

export async function show(root, params, ctx) {
  const resume = params.query.get("resume");
  ctx.title(t(resume ? "start.resume.title" : "start.title"));
  if (!ctx.hasToken()) return void put(root, noToken());
  const [form, { presets }, run, old] = await Promise.all([
    get("api/schema"), get("api/presets"), resume ? get(`api/runs/${resume}`) : null, resume ? get(`api/runs/${resume}/resume`) : null,
  ]);
  const draft = resume ? null : readDraft();
  const state = makeState(old?.yaml ?? draft?.yaml ?? presets[0].yaml);

  const editor = makeEditor(state);
  const fields = makeForm(form, state);
  const data = datasetTools(state);
  fields.slot("data").append(data.node);
  const plan = planCard(state);
  const changes = resume ? changesCard(state, resume) : null;
  const launch = launchCard(state, ctx, { resume, run, changes, presets, draft });

  put(root,
    h("div", { class: "page-head" }, resume ? h("a", { href: `#/run/${resume}`, class: "button quiet" }, "‹ ", run.name) : null,
      h("h1", {}, resume ? t("start.resume.of", { name: run.name }) : t("start.title"))),
    resume ? h("p", { class: "muted" }, t("start.resume.what")) : presetRow(presets, state, launch),
    jumps(),
    h("div", { class: "start" },
      h("div", { class: "stack start-form" }, fields.node),
      h("div", { class: "stack start-side" }, editor.node, changes?.node ?? null, plan.node, launch.node)));
  if (!resume) state.on("text", () => writeDraft({ yaml: state.yaml, name: launch.name() }));
  state.check(0);
  return () => {
    state.end();
    plan.end();
    launch.end();
  };
}

/**
 * The current config. `yaml`: its text, the single source of truth; `found`: the result of the last check. Listeners: `text` (the
 * text has changed; with its source), `checked` (`found` belongs to the current text), `busy` (it no longer does).
 */
function makeState(yaml) {
  const listeners = { text: new Set(), checked: new Set(), busy: new Set() };
  const tell = (name, value) => { for (const one of listeners[name]) one(value); };
  let timer = null;
  let turn = 0;
  let edits = Promise.resolve();
  const state = {
    yaml, found: null, ended: false,
    on: (name, listener) => { listeners[name].add(listener); },
    setYaml(text, by) {
      if (text === state.yaml) return;
      state.yaml = text;
      turn++;
      tell("busy");
      tell("text", by);
      state.check();
    },
    /** Set keys and remove others. The server does this and leaves the rest of the text unchanged. Edits are sequential. */
    edit(values, remove = []) {
      tell("busy");
      edits = edits.then(async () => {
        for (;;) { // anew where somebody has typed meanwhile
          const before = state.yaml;
          const answer = await post("api/yaml", { yaml: before, values, remove });
          if (state.yaml !== before) continue;
          if (!answer.kept) announce(t("start.comments_lost"));
          return state.setYaml(answer.yaml, "form");
        }
      }).catch((error) => state.fail(error));
      return edits;
    },
    check(wait_ms = CHECK_MS) {
      clearTimeout(timer);
      const mine = turn;
      timer = setTimeout(async () => {
        try {
          const found = await post("api/check", { yaml: state.yaml });
          if (mine !== turn || state.ended) return;
          state.found = found;
          tell("checked", found);
        } catch (error) {
          state.fail(error);
        }
      }, wait_ms);
    },
    fail(error) {
      if (state.ended) return;
      const { what, allowed = null, fix = null } = error;
      const known = what === "no-answer" ? { what: t("error.no_answer"), allowed: null, fix: t("error.no_answer.fix") } : { what: what ?? error.message, allowed, fix };
      const one = { ...known, key: null, line: null };
      state.found = { ok: false, error: one, errors: [one], notices: [], values: state.found?.values ?? {} };
      tell("checked", state.found);
    },
    end() {
      state.ended = true;
      clearTimeout(timer);
    },
  };
  return state;
}

function presetRow(presets, state, launch) {
  return h("div", { class: "presets", role: "group", "aria-label": t("start.presets") },
    presets.map((one) => h("button", {
      type: "button", class: "preset", data: { preset: one.id },
      on: { click: () => {
        state.setYaml(one.yaml, "preset");
        launch.suggest(one.id);
        announce(t("start.preset.taken", { name: t(`preset.${one.id}`) }));
      } },
    }, h("strong", {}, t(`preset.${one.id}`)), h("span", {}, t(`preset.${one.id}.is`)))));
}

/** Links to the text, the plan and the button, which are below a long form on a narrow screen. */
function jumps() {
  const to = (id, text) => h("button", { type: "button", on: { click: () => {
    const place = document.getElementById(id);
    place.scrollIntoView({ block: "start" });
    place.focus({ preventScroll: true });
  } } }, text);
  return h("div", { class: "jump", role: "group", "aria-label": t("start.jump") }, to("yaml", t("start.yaml")), to("plan", t("plan.title")), to("start", t("start.start")));
}

const noToken = () => errorState({ what: t("start.no_token"), fix: t("start.no_token.fix") });

function readDraft() {
  try {
    return JSON.parse(sessionStorage.getItem(DRAFT));
  } catch {
    return null;
  }
}

const writeDraft = (draft) => sessionStorage.setItem(DRAFT, JSON.stringify(draft));

/** The list of errors. The line of an error is a button that goes there. */
export function mistakes(errors, go) {
  return h("ul", { class: "mistakes" }, errors.map((one) => h("li", {},
    one.line ? h("button", { type: "button", class: "quiet place", on: { click: () => go(one.line) } }, t("start.line", { line: one.line })) : null,
    h("span", {}, icon("failed"), one.what),
    one.allowed ? h("div", { class: "small" }, t("error.allowed", { allowed: one.allowed })) : null,
    one.fix ? h("div", { class: "small" }, t("error.fix", { fix: one.fix })) : null)));
}
