// The page that starts a run (`from=ID`: with the config of another), or resumes one with changes
// (`resume=ID`): a form and the YAML text, kept in sync, with checks and a plan.

import { get, post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { addTexts, t } from "../lib/i18n.js";
import { announce, errorState, icon } from "../lib/ui.js";
import { texts } from "../i18n/start.js";
import { changesCard } from "./start_changes.js";
import { datasetTools } from "./start_data.js";
import { readDraft, writeDraft } from "./start_draft.js";
import { makeForm } from "./start_form.js";
import { launchCard } from "./start_launch.js";
import { planCard } from "./start_plan.js";
import { makeEditor } from "./start_yaml.js";

addTexts(texts);

const CHECK_MS = 300;

export async function show(root, params, ctx) {
  const resume = params.query.get("resume");
  const original = resume ?? params.query.get("from");
  ctx.title(t(resume ? "start.resume.title" : "start.title"));
  if (!ctx.hasToken()) return void put(root, noToken());
  const [form, { presets }, run, old] = await Promise.all([
    get("api/schema"),
    get("api/presets"),
    original ? get(`api/runs/${original}`) : null,
    original ? get(`api/runs/${original}/resume`) : null,
  ]);
  const draft = original ? null : readDraft();
  const state = makeState(draft?.yaml ?? presets[0].yaml);
  if (original) state.yaml = resume ? old.yaml : await withoutFolder(old.yaml);

  const editor = makeEditor(state);
  const fields = makeForm(form, state);
  const data = datasetTools(state);
  fields.slot("data").append(data.node);
  const plan = planCard(state);
  const changes = resume ? changesCard(state, resume) : null;
  const prefix = run ? run.name : presets[0].id;
  const launch = launchCard(state, ctx, { resume, changes, prefix, draft });

  put(
    root,
    h(
      "div",
      { class: "page-head" },
      resume ? h("a", { href: `#/run/${resume}`, class: "button quiet" }, "‹ ", run.name) : null,
      h("h1", {}, resume ? t("start.resume.of", { name: run.name }) : t("start.title")),
    ),
    original && !resume ? h("p", { class: "muted" }, t("start.from", { name: run.name })) : null,
    resume ? h("p", { class: "muted" }, t("start.resume.what")) : presetRow(presets, state, launch),
    jumpLinks(),
    h(
      "div",
      { class: "start" },
      h("div", { class: "stack start-form" }, fields.node),
      h(
        "div",
        { class: "stack start-side" },
        editor.node,
        changes?.node ?? null,
        plan.node,
      ),
    ),
    launch.node,
  );
  if (!resume) state.on("text", () => writeDraft({ yaml: state.yaml, name: launch.name() }));
  state.check(0);
  return () => {
    state.end();
    plan.end();
    launch.end();
  };
}

/** Return the text of a config without `output_dir`: the new run gets a folder by its name. */
async function withoutFolder(yaml) {
  return (await post("api/yaml", { yaml, values: {}, remove: ["output_dir"] })).yaml;
}

/**
 * Return the state of the page: the config as text (`yaml`), from which everything else follows,
 * and the result of its latest check (`checkResult`). Events: `text` (the text has changed; called
 * with the source of the change), `busy` (the text has been changed and not been checked yet) and
 * `checked` (`checkResult` belongs to the current text).
 */
function makeState(yaml) {
  const listeners = { text: new Set(), checked: new Set(), busy: new Set() };
  const notify = (name, value) => {
    for (const listener of listeners[name]) listener(value);
  };
  let timer = null;
  let version = 0;
  let edits = Promise.resolve();
  const state = {
    yaml,
    checkResult: null,
    ended: false,
    on: (name, listener) => {
      listeners[name].add(listener);
    },
    setYaml(text, source) {
      if (text === state.yaml) return;
      state.yaml = text;
      version++;
      notify("busy");
      notify("text", source);
      state.check();
    },
    /**
     * Set keys and remove others. The server edits the text, so that comments are kept. Edits are
     * applied in sequence.
     */
    edit(values, remove = []) {
      notify("busy");
      edits = edits
        .then(async () => {
          for (;;) {
            const yaml = state.yaml;
            const response = await post("api/yaml", { yaml: yaml, values, remove });
            if (state.yaml !== yaml) continue;
            if (!response.kept) announce(t("start.comments_lost"));
            return state.setYaml(response.yaml, "form");
          }
        })
        .catch((error) => state.fail(error));
      return edits;
    },
    check(wait_ms = CHECK_MS) {
      clearTimeout(timer);
      const checkedVersion = version;
      timer = setTimeout(async () => {
        try {
          const result = await post("api/check", { yaml: state.yaml });
          if (checkedVersion !== version || state.ended) return;
          state.checkResult = result;
          notify("checked", result);
        } catch (error) {
          state.fail(error);
        }
      }, wait_ms);
    },
    fail(error) {
      if (state.ended) return;
      const { what, allowed = null, fix = null } = error;
      const message =
        what === "no-answer"
          ? { what: t("error.no_answer"), allowed: null, fix: t("error.no_answer.fix") }
          : { what: what ?? error.message, allowed, fix };
      const shownError = { ...message, key: null, line: null };
      state.checkResult = {
        ok: false,
        error: shownError,
        errors: [shownError],
        notices: [],
        values: state.checkResult?.values ?? {},
      };
      notify("checked", state.checkResult);
    },
    end() {
      state.ended = true;
      clearTimeout(timer);
    },
  };
  return state;
}

function presetRow(presets, state, launch) {
  return h(
    "div",
    { class: "presets", role: "group", "aria-label": t("start.presets") },
    presets.map((preset) =>
      h(
        "button",
        {
          type: "button",
          class: "preset",
          data: { preset: preset.id },
          on: {
            click: () => {
              state.setYaml(preset.yaml, "preset");
              launch.suggest(preset.id);
              announce(t("start.preset.loaded", { name: t(`preset.${preset.id}`) }));
            },
          },
        },
        h("strong", {}, t(`preset.${preset.id}`)),
        h("span", {}, t(`preset.${preset.id}.is`)),
      ),
    ),
  );
}

/** Return links to the text and the plan, which are below a long form on a narrow screen. */
function jumpLinks() {
  const jumpButton = (id, text) =>
    h(
      "button",
      {
        type: "button",
        on: {
          click: () => {
            const target = document.getElementById(id);
            target.scrollIntoView({ block: "start" });
            target.focus({ preventScroll: true });
          },
        },
      },
      text,
    );
  return h(
    "div",
    { class: "jump", role: "group", "aria-label": t("start.jump") },
    jumpButton("yaml", t("start.yaml")),
    jumpButton("plan", t("plan.title")),
  );
}

const noToken = () => errorState({ what: t("start.no_token"), fix: t("start.no_token.fix") });

/** Return a list of errors. The line number of an error is a button that calls `go(line)`. */
export function errorList(errors, go) {
  return h(
    "ul",
    { class: "error-list" },
    errors.map((error) =>
      h(
        "li",
        {},
        error.line
          ? h(
              "button",
              { type: "button", class: "quiet place", on: { click: () => go(error.line) } },
              t("start.line", { line: error.line }),
            )
          : null,
        h("span", {}, icon("failed"), error.what),
        error.allowed
          ? h("div", { class: "small" }, t("error.allowed", { allowed: error.allowed }))
          : null,
        error.fix ? h("div", { class: "small" }, t("error.fix", { fix: error.fix })) : null,
      ),
    ),
  );
}
