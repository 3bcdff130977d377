// The plan, updated while editing: whether the run fits in memory, its strategy and its duration.

import { post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { card, icon, term } from "../lib/ui.js";
import { coded } from "./start_form.js";

const WAIT_MS = 700;

export function planCard(state) {
  const body = h("div", { class: "plan", "aria-live": "polite" }, h("p", { class: "muted" }, t("plan.waits")));
  const busy = h("span", { class: "muted small", id: "plan-busy" });
  const node = card(t("plan.title"), busy, body);
  node.id = "plan";
  node.tabIndex = -1;
  let timer = null;
  let control = null;
  let made = null; // the text that the plan shown is of
  let derived = null;

  state.on("busy", () => { clearTimeout(timer); node.classList.add("old"); });
  state.on("checked", (found) => {
    clearTimeout(timer);
    if (!found.ok) return void put(busy, t("plan.first_mend"));
    if (made === state.yaml) return void done();
    put(busy, t("plan.making"));
    timer = setTimeout(make, WAIT_MS);
    return undefined;
  });

  async function make() {
    control?.abort();
    control = new AbortController();
    const { signal } = control;
    const yaml = state.yaml;
    try {
      const plan = await post("api/plan", { yaml }, { signal });
      if (signal.aborted || state.ended) return;
      made = yaml;
      if (derived?.yaml !== yaml) derived = null;
      done();
      draw(plan);
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted || state.ended || yaml !== state.yaml) return;
      made = yaml;
      done();
      put(body, h("p", { class: "verdict-line" }, icon("notice"), t("plan.cannot")), h("p", {}, coded(String(error.what))), error.fix ? h("p", { class: "small" }, t("error.fix", { fix: error.fix })) : null);
    }
  }

  function done() {
    node.classList.remove("old");
    put(busy);
  }

  function draw(plan) {
    const name = plan.configured ?? plan.chosen;
    const mode = plan.modes.find((one) => one.mode === name);
    const steps = derived?.derived.steps ?? plan.max_steps;
    const wrong = plan.layout_error;
    if (wrong) {
      put(body, h("p", { class: "verdict-line bad", id: "plan-verdict" }, icon("failed"), t("plan.layout_error")),
        h("p", {}, coded(wrong.what)),
        wrong.allowed ? h("p", { class: "small" }, coded(t("error.allowed", { allowed: wrong.allowed }))) : null,
        wrong.fix ? h("p", { class: "small" }, coded(t("error.fix", { fix: wrong.fix }))) : null,
        table(plan, plan.chosen));
      return;
    }
    put(body,
      mode
        ? h("p", { class: `verdict-line ${mode.fits ? "good" : "bad"}`, id: "plan-verdict", data: { mode: name } }, icon(mode.fits ? "done" : "failed"),
          t(mode.fits ? "plan.fits" : "plan.not", { mode: name, n: plan.world_size, device: plan.device }))
        : h("p", { class: "verdict-line bad", id: "plan-verdict" }, icon("failed"), t("plan.none")),
      h("p", { class: "small" }, coded(mode && !mode.fits ? mode.reason : plan.why)),
      mode ? h("dl", { class: "facts" },
        fact(t("plan.memory"), t("plan.memory.of", { used: format.bytes(mode.memory_bytes.total), all: format.bytes(plan.device_memory_bytes) }), t("plan.memory.is")),
        fact(t("plan.step"), mode.step_time_s === null ? t("plan.unknown") : `≈ ${format.duration(mode.step_time_s)}`, t("plan.step.is")),
        fact(t("plan.whole"), mode.step_time_s !== null && steps ? `≈ ${format.duration(mode.step_time_s * steps)}` : t("plan.unknown"), t("plan.whole.is"), steps ? t("plan.steps", { n: format.count(steps) }) : stepsButton(plan)),
        fact(t("plan.parameters"), format.short(plan.parameters), t("plan.parameters.is"), plan.trainable_parameters < plan.parameters ? t("plan.trained", { n: format.short(plan.trainable_parameters) }) : null),
        derived ? fact(t("plan.batch"), format.count(derived.derived.global_batch_size), t("plan.batch.is"), t("plan.epochs", { n: format.digits(derived.derived.epochs) })) : null) : null,
      table(plan, name),
      plan.notes.length ? h("ul", { class: "muted small" }, plan.notes.map((one) => h("li", {}, coded(one)))) : null);
  }

  function stepsButton(plan) {
    const feedback = h("span", { class: "small" });
    const button = h("button", { type: "button", id: "steps", on: { click: async () => {
      button.disabled = true;
      put(feedback, t("plan.reading"));
      const yaml = state.yaml;
      try {
        const found = await post("api/steps", { yaml });
        if (state.ended || yaml !== state.yaml) return;
        derived = { ...found, yaml };
        draw(plan);
      } catch (error) {
        button.disabled = false;
        put(feedback, String(error.what), error.fix ? ` ${t("error.fix", { fix: error.fix })}` : "");
      }
    } } }, t("plan.read"));
    return [button, feedback];
  }

  return { node, end: () => { clearTimeout(timer); control?.abort(); } };
}

const fact = (name, value, meaning, beside = null) =>
  h("div", {}, h("dt", {}, term(name, meaning)), h("dd", {}, h("strong", {}, value), beside === null ? null : [" ", h("span", { class: "muted small" }, beside)]));

function table(plan, chosen) {
  const limit = plan.device_memory_bytes;
  return h("details", {}, h("summary", {}, t("plan.modes", { n: plan.modes.length })),
    h("div", { class: "table-wrap", tabindex: 0, role: "region", "aria-label": t("plan.modes", { n: plan.modes.length }) }, h("table", { class: "plan-modes" },
      h("thead", {}, h("tr", {}, [t("plan.mode"), t("plan.memory"), t("plan.traffic"), t("plan.step")].map((one, at) => h("th", { scope: "col", class: at ? "number" : null }, one)))),
      h("tbody", {}, plan.modes.map((one) => h("tr", { class: one.mode === chosen ? "chosen" : null },
        h("th", { scope: "row" }, icon(one.fits ? "done" : "failed"), " ", one.mode, one.mode === chosen ? h("span", { class: "tag" }, t("plan.chosen")) : null,
          one.fits ? null : h("div", { class: "muted small" }, coded(one.reason))),
        h("td", { class: "number" }, format.bytes(one.memory_bytes.total),
          one.memory_bytes.total === null ? null : h("meter", { min: 0, max: 1, high: 0.9, value: Math.min(1, one.memory_bytes.total / limit), "aria-hidden": "true" })),
        h("td", { class: "number" }, format.bytes(one.traffic_bytes_per_step)),
        h("td", { class: "number" }, one.step_time_s === null ? format.NONE : format.duration(one.step_time_s))))))));
}
