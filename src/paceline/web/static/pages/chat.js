// Chat with the trained model and its base model, export, and the report.

import { get, stream } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { addWords, t } from "../lib/i18n.js";
import { announce, choice, errorState, icon } from "../lib/ui.js";
import { words } from "../i18n/start.js";
import { exportModel } from "./export.js";

addWords(words);

const SIDES = ["tuned", "base"];

export async function show(root, params, ctx) {
  const run = await get(`api/runs/${params.id}`);
  ctx.title(`${t("chat.title")} · ${run.name}`);
  const state = { turns: [], which: "tuned", ending: null, ended: false };
  const log = h("div", { class: "chat-log", role: "log", "aria-label": t("chat.title"), tabindex: 0 });
  const feedback = h("div", { "aria-live": "polite" });
  const system = h("input", { type: "text", id: "chat-system", placeholder: t("chat.system.hint"), prop: { value: run.config?.system ?? "" } });
  const most = h("input", { type: "number", id: "chat-most", min: 1, max: 4096, step: 1, prop: { value: 256 } });
  const heat = h("input", { type: "number", id: "chat-heat", min: 0, max: 5, step: 0.1, prop: { value: 0 } });
  const question = h("textarea", { id: "question", rows: 2, placeholder: t("chat.hint"), "aria-label": t("chat.question"), on: { keydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  } } });
  const send = h("button", { type: "submit", class: "main", id: "send" }, icon("chat"), t("chat.send"));
  const stop = h("button", { type: "button", id: "chat-stop", hidden: true, on: { click: () => state.stop?.() } }, icon("stopped"), t("chat.stop"));
  const clear = h("button", { type: "button", class: "quiet", on: { click: () => { state.turns = []; draw(); question.focus(); } } }, t("chat.clear"));
  const which = choice(t("chat.which"), [["tuned", t("chat.tuned")], ["base", t("chat.base")], ["both", t("chat.both")]], state.which, (one) => (state.which = one));
  put(root,
    h("div", { class: "page-head" }, h("a", { href: `#/run/${params.id}`, class: "button quiet" }, "‹ ", run.name), h("h1", {}, t("chat.title"))),
    ctx.hasToken() ? null : errorState({ what: t("start.no_token"), fix: t("start.no_token.fix") }),
    h("div", { class: "chat" },
      h("section", { class: "card chat-main" }, h("div", { class: "toolbar" }, which, clear), log, feedback,
        h("form", { class: "chat-form", on: { submit: (event) => { event.preventDefault(); ask(); } } }, question, h("div", { class: "toolbar" }, send, stop))),
      h("div", { class: "stack" },
        h("section", { class: "card" }, h("h2", {}, t("chat.settings")),
          setting("chat-system", t("chat.system"), system, t("chat.system.is")), setting("chat-most", t("chat.most"), most, t("chat.most.is")), setting("chat-heat", t("chat.heat"), heat, t("chat.heat.is"))),
        after(params.id, run))));
  draw();
  if (ctx.hasToken()) question.focus({ preventScroll: true });

  function draw() {
    put(log, state.turns.length ? state.turns.map((turn) => turn.node) : h("p", { class: "muted" }, t("chat.empty")));
    log.scrollTop = log.scrollHeight;
    clear.hidden = state.turns.length === 0;
  }

  async function ask() {
    const text = question.value.trim();
    if (!text || state.stop) return;
    question.value = "";
    const turn = makeTurn(text, state.which === "both" ? SIDES : [state.which]);
    state.turns.push(turn);
    draw();
    const control = { stopped: false, end: null };
    state.stop = () => { control.stopped = true; control.end?.(); };
    send.disabled = true;
    stop.hidden = false;
    for (const side of turn.sides) {
      if (control.stopped || state.ended) break;
      await answer(turn, side, control);
    }
    state.stop = null;
    if (state.ended) return;
    send.disabled = false;
    stop.hidden = true;
    question.focus({ preventScroll: true });
  }

  // Each model gets its own earlier answers, or those of the other model if it has none.
  function messages(side) {
    const all = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    for (const turn of state.turns) {
      all.push({ role: "user", content: turn.text });
      const given = turn.texts[side] ?? Object.values(turn.texts).find(Boolean);
      if (given && turn !== state.turns.at(-1)) all.push({ role: "assistant", content: given });
    }
    return all;
  }

  function answer(turn, side, control) {
    const body = { messages: messages(side), model: side, max_new_tokens: Math.round(bounded(most, 1, 4096, 256)), temperature: bounded(heat, 0, 5, 0) };
    turn.busy(side, t("chat.waits"));
    return new Promise((resolve) => {
      const finish = (words) => { turn.done(side, words); resolve(); };
      const close = stream(`api/runs/${params.id}/chat`, {
        state: ({ state: now, device, beside_run: beside }) => {
          put(feedback, beside ? h("p", { class: "muted small" }, t("chat.beside")) : "");
          turn.busy(side, now === "loading" ? t("chat.loading") : t("chat.answers", { device: device ?? "" }));
        },
        token: ({ text }) => {
          const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
          turn.add(side, text);
          if (low) log.scrollTop = log.scrollHeight;
        },
        end: ({ num_tokens: tokens, wall_s: wall }) => finish(t("chat.took", { n: format.count(tokens), wall: format.duration(wall), rate: format.digits(tokens / wall) })),
        error: (error) => { turn.fail(side, error); resolve(); },
        problem: (error) => { turn.fail(side, error); resolve(); },
        closed: () => resolve(),
      }, { body });
      control.end = () => { close(); finish(t("chat.stopped")); };
    });
  }

  return () => {
    state.ended = true;
    state.stop?.();
  };
}

const bounded = (input, low, high, otherwise) => {
  const value = Number(input.value);
  return input.value !== "" && Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : otherwise;
};

const setting = (id, name, input, meaning) =>
  h("div", { class: "form-field" }, h("label", { for: id }, name), (input.setAttribute("aria-describedby", `${id}-is`), input), h("p", { class: "muted small", id: `${id}-is` }, meaning));

/** A question with the answer of each model. */
function makeTurn(text, sides) {
  const places = {};
  const texts = {};
  for (const side of sides) {
    places[side] = { text: h("div", { class: "answer-text" }), about: h("p", { class: "muted small" }), node: null };
    places[side].node = h("div", { class: `answer answer-${side}`, data: { model: side } }, h("div", { class: "small answer-head" }, t(`chat.${side}`)), places[side].text, places[side].about);
  }
  const node = h("article", { class: "turn" }, h("div", { class: "asked" }, h("span", { class: "sr" }, `${t("chat.you")}: `), text), h("div", { class: `answers sides-${sides.length}` }, sides.map((side) => places[side].node)));
  return {
    text, sides, texts, node,
    busy: (side, words) => { places[side].node.classList.add("busy"); put(places[side].about, words); },
    add(side, more) {
      texts[side] = (texts[side] ?? "") + more;
      places[side].text.append(more);
    },
    done(side, words) {
      places[side].node.classList.remove("busy");
      put(places[side].about, words);
      announce(`${t(`chat.${side}`)}: ${texts[side] ?? ""}`);
    },
    fail(side, error) {
      places[side].node.classList.remove("busy");
      put(places[side].about);
      places[side].node.append(errorState(error));
    },
  };
}

/** Links to the export and the report. */
function after(id, run) {
  const { button, feedback } = exportModel(id);
  return h("section", { class: "card" }, h("h2", {}, t("export.title")), h("p", { class: "muted small" }, t("export.is")), button, feedback,
    run.report ? h("p", {}, h("a", { href: `#/run/${id}/report` }, t("export.report"))) : null);
}
