// The chat with the trained model and its base model, with links to the export and the report.

import { get, stream } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { addTexts, t } from "../lib/i18n.js";
import { announce, choice, errorState, icon } from "../lib/ui.js";
import { texts } from "../i18n/start.js";
import { imageField, picture } from "./chat_images.js";
import { exportModel } from "./export.js";

addTexts(texts);

const SIDES = ["tuned", "base"];

export async function show(root, params, ctx) {
  const run = await get(`api/runs/${params.id}`);
  ctx.title(`${t("chat.title")} · ${run.name}`);
  const state = { turns: [], model: "tuned", ending: null, ended: false };
  const log = h("div", {
    class: "chat-log",
    role: "log",
    "aria-label": t("chat.title"),
    tabindex: 0,
  });
  const feedback = h("div", { "aria-live": "polite" });
  const system = h("input", {
    type: "text",
    id: "chat-system",
    placeholder: t("chat.system.hint"),
    prop: { value: run.config?.system ?? "" },
  });
  const maxTokens = h("input", {
    type: "number",
    id: "chat-max-tokens",
    min: 1,
    max: 4096,
    step: 1,
    prop: { value: 256 },
  });
  const temperature = h("input", {
    type: "number",
    id: "chat-temperature",
    min: 0,
    max: 5,
    step: 0.1,
    prop: { value: 0 },
  });
  const question = h("textarea", {
    id: "question",
    rows: 2,
    placeholder: t("chat.hint"),
    "aria-label": t("chat.question"),
    on: {
      keydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          sendQuestion();
        }
      },
      paste: (event) => images?.paste(event),
    },
  });
  const images = run.has.image_processor ? imageField(sentCharacters) : null;
  const send = h(
    "button",
    { type: "submit", class: "main", id: "send" },
    icon("chat"),
    t("chat.send"),
  );
  const stop = h(
    "button",
    { type: "button", id: "chat-stop", hidden: true, on: { click: () => state.stop?.() } },
    icon("stopped"),
    t("chat.stop"),
  );
  const clear = h(
    "button",
    {
      type: "button",
      class: "quiet",
      on: {
        click: () => {
          state.turns = [];
          draw();
          question.focus();
        },
      },
    },
    t("chat.clear"),
  );
  const modelChoice = choice(
    t("chat.model"),
    [
      ["tuned", t("chat.tuned")],
      ["base", t("chat.base")],
      ["both", t("chat.both")],
    ],
    state.model,
    (model) => (state.model = model),
  );
  put(
    root,
    h(
      "div",
      { class: "page-head" },
      h("a", { href: `#/run/${params.id}`, class: "button quiet" }, "‹ ", run.name),
      h("h1", {}, t("chat.title")),
    ),
    ctx.hasToken() ? null : errorState({ what: t("start.no_token"), fix: t("start.no_token.fix") }),
    h(
      "div",
      { class: "chat" },
      h(
        "section",
        { class: "card chat-main" },
        h("div", { class: "toolbar" }, modelChoice, clear),
        log,
        feedback,
        h(
          "form",
          {
            class: "chat-form",
            on: {
              submit: (event) => {
                event.preventDefault();
                sendQuestion();
              },
            },
          },
          question,
          images?.list,
          h("div", { class: "toolbar" }, send, images?.button, stop),
        ),
      ),
      h(
        "div",
        { class: "stack" },
        h(
          "section",
          { class: "card" },
          h("h2", {}, t("chat.settings")),
          setting("chat-system", t("chat.system"), system, t("chat.system.is")),
          setting("chat-max-tokens", t("chat.max_tokens"), maxTokens, t("chat.max_tokens.is")),
          setting("chat-temperature", t("chat.temperature"), temperature, t("chat.temperature.is")),
        ),
        exportCard(params.id, run),
      ),
    ),
  );
  draw();
  if (ctx.hasToken()) question.focus({ preventScroll: true });

  function draw() {
    put(
      log,
      state.turns.length
        ? state.turns.map((turn) => turn.node)
        : h("p", { class: "muted" }, t("chat.empty")),
    );
    log.scrollTop = log.scrollHeight;
    clear.hidden = state.turns.length === 0;
  }

  async function sendQuestion() {
    const text = question.value.trim();
    if (!text || state.stop) return;
    question.value = "";
    const turn = makeTurn(text, images?.take() ?? [], state.model === "both" ? SIDES : [state.model]);
    state.turns.push(turn);
    draw();
    const control = { stopped: false, end: null };
    state.stop = () => {
      control.stopped = true;
      control.end?.();
    };
    send.disabled = true;
    stop.hidden = false;
    for (const side of turn.sides) {
      if (control.stopped || state.ended) break;
      await requestAnswer(turn, side, control);
    }
    state.stop = null;
    if (state.ended) return;
    send.disabled = false;
    stop.hidden = true;
    question.focus({ preventScroll: true });
  }

  function sentCharacters() {
    return state.turns.flatMap((turn) => turn.images).reduce((sum, url) => sum + url.length, 0);
  }

  // The history of a model contains its own answers, or the other model's answers if it has none.
  function messages(side) {
    const messages = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    for (const turn of state.turns) {
      messages.push({ role: "user", content: turn.text, images: turn.images });
      const reply = turn.texts[side] ?? Object.values(turn.texts).find(Boolean);
      if (reply && turn !== state.turns.at(-1))
        messages.push({ role: "assistant", content: reply });
    }
    return messages;
  }

  function requestAnswer(turn, side, control) {
    const body = {
      messages: messages(side),
      model: side,
      max_new_tokens: Math.round(bounded(maxTokens, 1, 4096, 256)),
      temperature: bounded(temperature, 0, 5, 0),
    };
    turn.busy(side, t("chat.waiting"));
    return new Promise((resolve) => {
      const finish = (summary) => {
        turn.done(side, summary);
        resolve();
      };
      const close = stream(
        `api/runs/${params.id}/chat`,
        {
          state: ({ state: chatState, device, beside_run: isBesideRun }) => {
            put(feedback, isBesideRun ? h("p", { class: "muted small" }, t("chat.on_cpu")) : "");
            turn.busy(
              side,
              chatState === "loading"
                ? t("chat.loading")
                : t("chat.generating", { device: device ?? "" }),
            );
          },
          token: ({ text }) => {
            const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
            turn.add(side, text);
            if (isAtEnd) log.scrollTop = log.scrollHeight;
          },
          end: ({ num_tokens: tokens, wall_s: wall }) =>
            finish(
              t("chat.took", {
                n: format.count(tokens),
                wall: format.duration(wall),
                rate: format.digits(tokens / wall),
              }),
            ),
          error: (error) => {
            turn.fail(side, error);
            resolve();
          },
          problem: (error) => {
            turn.fail(side, error);
            resolve();
          },
          closed: () => resolve(),
        },
        { body },
      );
      control.end = () => {
        close();
        finish(t("chat.stopped"));
      };
    });
  }

  return () => {
    state.ended = true;
    state.stop?.();
  };
}

const bounded = (input, low, high, fallback) => {
  const value = Number(input.value);
  return input.value !== "" && Number.isFinite(value)
    ? Math.min(high, Math.max(low, value))
    : fallback;
};

const setting = (id, name, input, meaning) =>
  h(
    "div",
    { class: "form-field" },
    h("label", { for: id }, name),
    (input.setAttribute("aria-describedby", `${id}-is`), input),
    h("p", { class: "muted small", id: `${id}-is` }, meaning),
  );

/** Return a turn of the chat: a question and the answer of each model. */
function makeTurn(text, images, sides) {
  const answers = {};
  const texts = {};
  for (const side of sides) {
    answers[side] = {
      text: h("div", { class: "answer-text" }),
      about: h("p", { class: "muted small" }),
      node: null,
    };
    answers[side].node = h(
      "div",
      { class: `answer answer-${side}`, data: { model: side } },
      h("div", { class: "small answer-head" }, t(`chat.${side}`)),
      answers[side].text,
      answers[side].about,
    );
  }
  const node = h(
    "article",
    { class: "turn" },
    h(
      "div",
      { class: "asked" },
      h("span", { class: "sr" }, `${t("chat.you")}: `),
      images.length ? h("div", { class: "chat-images" }, images.map(picture)) : null,
      text,
    ),
    h(
      "div",
      { class: `answers sides-${sides.length}` },
      sides.map((side) => answers[side].node),
    ),
  );
  return {
    text,
    images,
    sides,
    texts,
    node,
    busy: (side, status) => {
      answers[side].node.classList.add("busy");
      put(answers[side].about, status);
    },
    add(side, addition) {
      texts[side] = (texts[side] ?? "") + addition;
      answers[side].text.append(addition);
    },
    done(side, summary) {
      answers[side].node.classList.remove("busy");
      put(answers[side].about, summary);
      announce(`${t(`chat.${side}`)}: ${texts[side] ?? ""}`);
    },
    fail(side, error) {
      answers[side].node.classList.remove("busy");
      put(answers[side].about);
      answers[side].node.append(errorState(error));
    },
  };
}

/** Return the card with the export button and a link to the report. */
function exportCard(id, run) {
  const { button, feedback } = exportModel(id);
  return h(
    "section",
    { class: "card" },
    h("h2", {}, t("export.title")),
    h("p", { class: "muted small" }, t("export.is")),
    button,
    feedback,
    run.report ? h("p", {}, h("a", { href: `#/run/${id}/report` }, t("export.report"))) : null,
  );
}
