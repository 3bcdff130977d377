// The name of a run and the button that starts it, its output while it starts, and the error if it fails.

import { get, post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { t } from "../lib/i18n.js";
import { announce, card, errorState, icon } from "../lib/ui.js";

const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/;
const ASK_MS = 1000;

export function launchCard(state, ctx, { resume, changes, draft, presets }) {
  let ended = false;
  let going = false;
  let taken = new Set(); // names of runs; of what else lies in the folder the server tells
  if (!resume)
    get("api/runs").then(({ runs }) => {
      taken = new Set(runs.map((run) => run.path));
      draw();
    }, () => {});
  const feedback = h("div", { "aria-live": "polite" });
  const nameWrong = h("p", { class: "bad small", id: "name-wrong" });
  const name = h("input", {
    type: "text", id: "run-name", spellcheck: "false", autocapitalize: "off", autocomplete: "off", maxlength: 100,
    "aria-describedby": "name-wrong name-hint", prop: { value: draft?.name ?? proposed(presets[0].id) }, on: { input: () => { touched = true; draw(); } },
  });
  let touched = false;
  const button = h("button", { type: "submit", class: "main", id: "start" }, icon("play"), t(resume ? "start.resume" : "start.start"));
  const why = h("span", { class: "muted small", id: "start-why" });
  const form = h("form", { class: "launch", on: { submit: (event) => { event.preventDefault(); start(); } } },
    resume ? null : h("div", { class: "form-field" }, h("label", { for: "run-name" }, t("start.name")), name, nameWrong, h("p", { class: "muted small", id: "name-hint" }, t("start.name.is"))),
    h("div", { class: "toolbar" }, button, why));
  const node = card(t(resume ? "start.resume" : "start.start"), null, form, feedback);

  state.on("busy", draw);
  state.on("checked", draw);
  if (changes) changes.onChange = draw;

  function draw() {
    const isTaken = taken.has(name.value);
    const named = resume || (NAME.test(name.value) && !isTaken);
    put(nameWrong, named ? "" : t(isTaken ? "start.name.taken" : "start.name.wrong"));
    name.setAttribute("aria-invalid", String(!named));
    const sound = state.found?.ok;
    const allowed = !changes || changes.ready();
    button.disabled = going || !sound || !named || !allowed;
    put(why, going ? t("start.starting") : !state.found ? "" : !sound ? t("start.first_mend") : !named ? t("start.first_name") : !allowed && changes.changed() ? t("start.first_allow") : "");
  }

  async function start() {
    if (button.disabled) return;
    going = true;
    draw();
    put(feedback, h("p", { class: "muted" }, t("start.starting.is")));
    try {
      const answer = resume
        ? await post(`api/runs/${resume}/resume`, { yaml: changes.changed() ? state.yaml : null, allow_config_change: changes.allowed() })
        : await post("api/start", { yaml: state.yaml, name: name.value });
      if (!answer.shows) await until(answer.id);
      if (ended) return;
      sessionStorage.removeItem("paceline-draft");
      announce(t("start.started", { name: answer.name }));
      ctx.go(`#/run/${answer.id}`);
    } catch (error) {
      if (ended) return;
      put(feedback, errorState(error));
      feedback.scrollIntoView({ block: "nearest" });
    } finally {
      going = false;
      if (!ended) draw();
    }
  }

  // Show the output of a run that reads data or downloads a model.
  async function until(id) {
    const lines = h("pre", { class: "output", tabindex: 0 });
    put(feedback, h("p", {}, t("start.preparing")), lines);
    while (!ended) {
      const found = await get(`api/launches/${id}`);
      put(lines, found.output.trimEnd().split("\n").slice(-12).join("\n"));
      if (found.shows || found.ended) return;
      await new Promise((resolve) => setTimeout(resolve, ASK_MS));
    }
  }

  draw();
  return {
    node,
    name: () => name.value,
    suggest: (id) => { if (!touched) { name.value = proposed(id); draw(); } },
    end: () => (ended = true),
  };
}

/** A name such as `lora-0314-0915`: the kind and the date and time. */
function proposed(word) {
  const now = new Date();
  const two = (value) => String(value).padStart(2, "0");
  return `${word}-${two(now.getMonth() + 1)}${two(now.getDate())}-${two(now.getHours())}${two(now.getMinutes())}${two(now.getSeconds())}`;
}
