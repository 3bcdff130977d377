// The page that starts a run (`from=ID`: with the config of another), or resumes one with changes
// (`resume=ID`): a form and the YAML text, kept in sync, with checks and a plan.

import { get, post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { addTexts, t } from "../lib/i18n.js";
import { announce, errorState, icon } from "../lib/ui.js";
import { texts as formTexts } from "../i18n/form.js";
import { texts } from "../i18n/start.js";
import { changesCard } from "./start_changes.js";
import { datasetButton, modelButton } from "./start_choose.js";
import { datasetTools } from "./start_data.js";
import { readDraft, writeDraft } from "./start_draft.js";
import { describeError, renderCode } from "./start_field.js";
import { makeForm } from "./start_form.js";
import { launchCard } from "./start_launch.js";
import { pasteButton } from "./start_paste.js";
import { planCard } from "./start_plan.js";
import { makeEditor } from "./start_yaml.js";

addTexts(texts);
addTexts(formTexts);

const CHECK_MS = 150; // after the last key in the text

export async function show(root, params, ctx) {
  const resume = params.query.get("resume");
  const original = resume ?? params.query.get("from");
  ctx.title(t(resume ? "start.resume.title" : "start.title"));
  if (!ctx.hasToken()) return void put(root, noToken());
  post("api/planner", {}).catch(() => {}); // it takes seconds to start; a plan reports its error
  const [form, { presets, folders }, run, old] = await Promise.all([
    get("api/schema"),
    get("api/presets"),
    original ? get(`api/runs/${original}`) : null,
    original ? get(`api/runs/${original}/${resume ? "resume" : "duplicate"}`) : null,
  ]);
  const draft = original ? null : readDraft();
  const state = makeState(old?.yaml ?? draft?.yaml ?? presets[0].yaml, resume);

  const editor = makeEditor(state);
  const fields = makeForm(form, state, {
    folder: folders.start,
    actions: { model: modelButton(state), dataset: datasetButton(state) },
  });
  const data = datasetTools(state);
  fields.slot.append(data.node);
  const plan = planCard(state);
  const changes = resume ? changesCard(state, resume) : null;
  const prefix = run ? run.name : presets[0].id;
  const launch = launchCard(state, ctx, { resume, changes, prefix, draft, folders });

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
  // Files may have been added meanwhile.
  const checkAgain = () => state.checkResult?.errors.some(({ code }) => code) && state.check(0);
  addEventListener("focus", checkAgain);
  return () => {
    removeEventListener("focus", checkAgain);
    state.end();
    plan.end();
    launch.end();
  };
}

/**
 * Return the state of the page: the config as text (`yaml`), from which everything else follows,
 * and the result of its latest check (`checkResult`). Events: `text` (the text has changed; called
 * with the source of the change), `busy` (the text is being changed, and was not checked yet) and
 * `checked` (`checkResult` belongs to the current text).
 *
 * `resume`: the run that is resumed with the config, or null.
 */
function makeState(yaml, resume) {
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
    /** Return the body of a request about the config. */
    body: () => (resume ? { yaml: state.yaml, run: resume } : { yaml: state.yaml }),
    /** Tell that an edit has begun: results of the old text are outdated. */
    touch: () => notify("busy"),
    /** Wait until the edits of the form are in the text. */
    async settle() {
      await new Promise((resolve) => setTimeout(resolve)); // a field that has just lost the focus
      await edits;
    },
    setYaml(text, source) {
      if (text === state.yaml) return;
      state.yaml = text;
      version++;
      notify("busy");
      notify("text", source);
      state.check(source === "text" ? CHECK_MS : 0);
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
            if (response.yaml === yaml) return state.check(0); // ends what the edit has begun
            return state.setYaml(response.yaml, "form");
          }
        })
        .catch((error) => state.fail(error));
      return edits;
    },
    check(wait_ms) {
      clearTimeout(timer);
      const checkedVersion = version;
      timer = setTimeout(async () => {
        try {
          const result = await post("api/check", state.body());
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
        is_config: false,
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
  const buttons = h(
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
  return h("div", {}, buttons, h("div", { class: "preset-foot" }, pasteButton(state)));
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
    errors.map((error) => {
      const { what, fix } = describeError(error);
      return h(
        "li",
        {},
        error.line
          ? h(
              "button",
              { type: "button", class: "quiet place", on: { click: () => go(error.line) } },
              t("start.line", { line: error.line }),
            )
          : null,
        h("span", {}, icon("failed"), renderCode(what)),
        error.allowed
          ? h("div", { class: "small" }, renderCode(t("error.allowed", { allowed: error.allowed })))
          : null,
        fix ? h("div", { class: "small" }, renderCode(fix)) : null,
      );
    }),
  );
}
