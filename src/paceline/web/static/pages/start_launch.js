// The name of the run, the button that starts it, and the error if it is refused: a footer that
// stays visible.

import { get, post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { announce, errorState, icon } from "../lib/ui.js";
import { writeDraft } from "./start_draft.js";

const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/;

export function launchCard(state, ctx, { resume, changes, draft, prefix, folders }) {
  let ended = false;
  let isStarting = false;
  // Names of existing runs; the server also rejects names of other files.
  let takenNames = new Set();
  if (!resume)
    get("api/runs").then(
      ({ runs }) => {
        takenNames = new Set(runs.map((run) => run.path));
        draw();
      },
      () => {},
    );
  const feedback = h("div", { "aria-live": "polite" });
  const nameError = h("p", { class: "bad small", id: "name-wrong" });
  const name = h("input", {
    type: "text",
    id: "run-name",
    spellcheck: "false",
    autocapitalize: "off",
    autocomplete: "off",
    maxlength: 100,
    "aria-label": t("start.name"),
    "aria-describedby": "name-wrong name-hint",
    prop: { value: draft?.name ?? proposeName(prefix) },
    on: {
      input: () => {
        isNameEdited = true;
        draw();
      },
    },
  });
  let isNameEdited = false;
  const button = h(
    "button",
    { type: "submit", class: "main", id: "start" },
    icon("play"),
    t(resume ? "start.resume" : "start.start"),
  );
  const blockedReason = h("span", { class: "muted small", id: "start-why" });
  const form = h(
    "form",
    {
      class: "launch",
      on: {
        submit: (event) => {
          event.preventDefault();
          start();
        },
      },
    },
    resume
      ? null
      : h(
          "div",
          { class: "form-field" },
          h("label", { for: "run-name" }, t("start.name")),
          name,
          nameError,
        ),
    button,
    blockedReason,
    resume ? null : h("p", { class: "muted small", id: "name-hint" }, t("start.name.is", { folder: folders.served })),
  );
  const node = h("footer", { class: "card start-footer" }, feedback, form);

  state.on("busy", draw);
  state.on("checked", draw);
  if (changes) changes.onChange = draw;

  function draw() {
    const isTaken = takenNames.has(name.value);
    const hasName = resume || (NAME.test(name.value) && !isTaken);
    put(nameError, hasName ? "" : t(isTaken ? "start.name.taken" : "start.name.invalid"));
    name.setAttribute("aria-invalid", String(!hasName));
    const isValid = state.checkResult?.ok;
    const isAllowed = !changes || changes.ready();
    button.disabled = isStarting || !isValid || !hasName || !isAllowed;
    put(
      blockedReason,
      isStarting
        ? t("start.starting")
        : !state.checkResult
          ? ""
          : !isValid
            ? t("start.fix_errors")
            : !hasName
              ? t("start.enter_name")
              : !isAllowed && changes.changed()
                ? t("start.allow_changes")
                : "",
    );
  }

  async function start() {
    if (button.disabled) return;
    isStarting = true;
    draw();
    put(feedback);
    try {
      await state.settle();
      // If the run fails before its first event, the form opens with this again.
      if (!resume) writeDraft({ yaml: state.yaml, name: name.value });
      const launched = resume
        ? await post(`api/runs/${resume}/resume`, {
            yaml: changes.changed() ? state.yaml : null,
            allow_config_change: changes.allowed(),
          })
        : await post("api/start", { yaml: state.yaml, name: name.value });
      if (ended) return;
      announce(t("start.started", { name: launched.name }));
      ctx.go(`#/run/${launched.id}`);
    } catch (error) {
      if (ended) return;
      put(feedback, errorState(error));
      feedback.scrollIntoView({ block: "nearest" });
    } finally {
      isStarting = false;
      if (!ended) draw();
    }
  }

  draw();
  return {
    node,
    name: () => name.value,
    suggest: (id) => {
      if (!isNameEdited) {
        name.value = proposeName(id);
        draw();
      }
    },
    end: () => (ended = true),
  };
}

/**
 * Return a name such as `lora-0314-091500`: a prefix, the date and the time. Of a prefix that is
 * such a name itself, the date and the time are replaced.
 */
function proposeName(prefix) {
  const start = prefix
    .replace(/-\d{4}-\d{6}$/, "")
    .replace(/[^A-Za-z0-9._-]/g, "-")
    .slice(0, 80);
  const now = new Date();
  const twoDigits = (value) => String(value).padStart(2, "0");
  const date = [now.getMonth() + 1, now.getDate()].map(twoDigits).join("");
  const time = [now.getHours(), now.getMinutes(), now.getSeconds()].map(twoDigits).join("");
  return `${start}-${date}-${time}`;
}
