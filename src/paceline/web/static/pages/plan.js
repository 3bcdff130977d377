// The page Plan: sliders for devices, batch and sequence length, and the memory by kind.

import { get, pageId, post } from "../lib/api.js";
import { h, newId, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { card, command, icon, term } from "../lib/ui.js";
import { memoryBars, settingsText } from "./plan_parts.js";
import { renderCode } from "./start_field.js";

const DELAY_MS = 150;
const DEFAULTS = {
  model: "Qwen/Qwen2-7B-Instruct",
  method: "full",
  device: "H100-SXM",
  count: "8",
  batch: "4",
  length: "2048",
  recompute: "auto",
};
// Sliders move in powers of two: from 2^first to 2^last.
const SLIDERS = { count: [0, 14], batch: [0, 8], length: [7, 17] };

export async function show(root, params, ctx) {
  const known = await get("api/devices");
  ctx.title(t("whatif.title"));
  const query = ctx.query();
  const values = Object.fromEntries(
    Object.entries(DEFAULTS).map(([name, value]) => [name, query.get(name) ?? value]),
  );
  const result = resultCard();
  const request = requester(values, result);
  const changed = (name, value) => {
    values[name] = value;
    ctx.setQuery({ [name]: value === DEFAULTS[name] ? null : value });
    request.soon();
  };
  put(
    root,
    h("h1", {}, t("whatif.title")),
    h("p", { class: "muted" }, renderCode(t("whatif.about"))),
    h("div", { class: "whatif" }, settingsCard(values, known, changed), result.node),
  );
  request.now();
  return () => request.end();
}

function settingsCard(values, { devices, models }, changed) {
  const selected = (name, options) =>
    h(
      "select",
      { id: `whatif-${name}`, on: { change: (event) => changed(name, event.target.value) } },
      options.map(([value, text]) =>
        h("option", { value, selected: value === values[name] }, text),
      ),
    );
  const model = h("input", {
    type: "text",
    id: "whatif-model",
    value: values.model,
    spellcheck: "false",
    autocomplete: "off",
    list: "whatif-models",
    on: { input: (event) => changed("model", event.target.value.trim()) },
  });
  const labeled = (name, control) =>
    h("div", { class: "whatif-field" }, h("label", { for: `whatif-${name}` }, t(`whatif.${name}`)), control);
  return card(
    t("whatif.settings"),
    null,
    labeled("model", model),
    h("datalist", { id: "whatif-models" }, models.map((value) => h("option", { value }))),
    labeled(
      "method",
      selected("method", [
        ["full", t("whatif.full")],
        ["lora", t("whatif.lora")],
      ]),
    ),
    labeled(
      "device",
      selected(
        "device",
        devices.map(({ name, memory_bytes }) => [name, `${name} (${memory_bytes / 1e9} GB)`]),
      ),
    ),
    Object.keys(SLIDERS).map((name) => slider(name, values, changed)),
    labeled(
      "recompute",
      selected("recompute", [
        ["auto", t("whatif.auto")],
        ["none", t("whatif.none")],
        ["selective", t("whatif.selective")],
        ["full", t("whatif.recompute_full")],
      ]),
    ),
  );
}

function slider(name, values, changed) {
  const [first, last] = SLIDERS[name];
  const id = `whatif-${name}`;
  const shown = h("output", { class: "number", for: id }, format.count(Number(values[name])));
  const input = h("input", {
    type: "range",
    id,
    min: first,
    max: last,
    step: 1,
    "aria-valuetext": values[name],
    prop: { value: Math.round(Math.log2(Number(values[name]) || 1)) },
    on: {
      input: (event) => {
        const value = String(2 ** Number(event.target.value));
        shown.textContent = format.count(Number(value));
        event.target.setAttribute("aria-valuetext", value);
        changed(name, value);
      },
    },
  });
  return h(
    "div",
    { class: "whatif-field" },
    h("div", { class: "whatif-label" }, h("label", { for: id }, t(`whatif.${name}`)), shown),
    input,
  );
}

/** Return the config as YAML. The dataset is not read, so its file need not exist. */
function configOf(values) {
  const args = {
    per_device_train_batch_size: Number(values.batch),
    max_length: Number(values.length),
    ...(values.recompute === "auto" ? {} : { gradient_checkpointing: values.recompute }),
  };
  return JSON.stringify({
    model: values.model,
    dataset: "data.jsonl",
    lora: { enable: values.method === "lora" },
    train_args: args,
  });
}

const commandOf = (values) =>
  [
    `paceline plan model=${values.model} dataset=data.jsonl`,
    `per_device_train_batch_size=${values.batch} max_length=${values.length}`,
    values.method === "lora" ? "lora.enable=true" : null,
    values.recompute === "auto" ? null : `gradient_checkpointing=${values.recompute}`,
    `--device ${values.device} --world-size ${values.count}`,
  ]
    .filter(Boolean)
    .join(" ");

/** Return functions that request a plan, now or after a pause, and draw it. */
function requester(values, result) {
  let timer = null;
  let controller = null;
  async function now() {
    clearTimeout(timer);
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    result.wait();
    const body = {
      yaml: configOf(values),
      page: pageId,
      world_size: Number(values.count),
      device: values.device,
    };
    try {
      const plan = await post("api/plan", body, { signal });
      if (!signal.aborted) result.draw(plan, { ...values });
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted) result.fail(error);
    }
  }
  return {
    now,
    soon: () => {
      result.wait();
      clearTimeout(timer);
      timer = setTimeout(now, DELAY_MS);
    },
    end: () => {
      clearTimeout(timer);
      controller?.abort();
    },
  };
}

function resultCard() {
  const body = h("div", { class: "plan", id: newId("whatif-result"), "aria-live": "polite" });
  const busy = h("span", { class: "muted small", role: "status" });
  const node = card(t("whatif.result"), busy, body);
  const ready = () => {
    node.classList.remove("old");
    put(busy);
  };
  return {
    node,
    wait() {
      node.classList.add("old");
      put(busy, t("whatif.planning"));
    },
    fail(error) {
      ready();
      put(
        body,
        h("p", { class: "verdict-line bad", id: "whatif-verdict" }, icon("notice"), t("whatif.failed")),
        h("p", {}, renderCode(String(error.what))),
        error.fix ? h("p", { class: "small" }, renderCode(t("error.fix", { fix: error.fix }))) : null,
      );
    },
    draw(plan, values) {
      ready();
      put(body, ...content(plan, values));
    },
  };
}

/** Return a set-up as text: the mode, and the settings that do not select it. */
const setupText = ({ mode, settings }) => [mode, ...settingsText(settings)].join(" ");

function content(plan, values) {
  const { choice } = plan;
  return [
    h(
      "p",
      { class: `verdict-line ${choice ? "good" : "bad"}`, id: "whatif-verdict" },
      icon(choice ? "done" : "failed"),
      choice ? t("whatif.fits", { setup: setupText(choice) }) : t("whatif.fits_not"),
    ),
    choice ? facts(plan, choice) : null,
    h("h3", {}, t("whatif.bars")),
    memoryBars(plan),
    h("h3", {}, t("whatif.why")),
    h("p", { class: "small" }, renderCode(plan.why)),
    plan.runners_up.length || plan.notes.length
      ? h(
          "ul",
          { class: "muted small" },
          plan.remarks.map((text) => h("li", {}, renderCode(text))),
          plan.notes.map((text) => h("li", {}, renderCode(text))),
        )
      : null,
    h("p", { class: "small" }, t("whatif.command")),
    command(commandOf(values)),
  ];
}

function facts(plan, choice) {
  const range = choice.step_time_range_s;
  return h(
    "dl",
    { class: "facts" },
    fact("memory", [
      t("whatif.of", {
        used: format.bytes(choice.memory_bytes.total),
        all: format.bytes(plan.device_memory_bytes),
      }),
    ]),
    fact(
      "step",
      choice.step_time_s === null ? format.NONE : `≈ ${format.duration(choice.step_time_s)}`,
      range
        ? t("whatif.range", {
            low: format.duration(range[0]),
            high: format.duration(range[1]),
          })
        : null,
    ),
    fact("rate", format.short(choice.samples_per_second)),
    fact("global", format.count(choice.global_batch_size)),
  );
}

const fact = (name, value, note = null) =>
  h(
    "div",
    {},
    h("dt", {}, term(t(`whatif.${name}`), t(`whatif.${name}.is`))),
    h(
      "dd",
      {},
      h("strong", {}, value),
      note === null ? null : [" ", h("span", { class: "muted small" }, note)],
    ),
  );
