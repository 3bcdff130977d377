// The plan: whether the run fits in memory, its strategy and its duration. It is updated after each
// edit.

import { pageId, post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { card, icon, term } from "../lib/ui.js";
import { memoryBars, settingsText } from "./plan_parts.js";
import { renderCode } from "./start_field.js";

export function planCard(state) {
  const body = h(
    "div",
    { class: "plan", "aria-live": "polite" },
    h("p", { class: "muted" }, t("plan.intro")),
  );
  const busy = h("span", { class: "muted small", id: "plan-busy" });
  const node = card(t("plan.title"), busy, body);
  node.id = "plan";
  node.tabIndex = -1;
  let controller = null;
  let plannedYaml = null; // the text for which the plan was made
  let derived = null;

  state.on("busy", () => node.classList.add("old"));
  state.on("checked", (result) => {
    if (!result.is_config) return void put(busy, t("plan.needs_config"));
    if (plannedYaml === state.yaml) return void markCurrent();
    put(busy, t(plannedYaml === null ? "plan.starting" : "plan.making"));
    return void requestPlan();
  });

  async function requestPlan() {
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    const yaml = state.yaml;
    try {
      const plan = await post("api/plan", { ...state.body(), page: pageId }, { signal });
      if (signal.aborted || state.ended) return;
      plannedYaml = yaml;
      if (derived?.yaml !== yaml) derived = null;
      markCurrent();
      draw(plan);
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted || state.ended || yaml !== state.yaml)
        return;
      plannedYaml = yaml;
      markCurrent();
      put(
        body,
        h("p", { class: "verdict-line" }, icon("notice"), t("plan.cannot")),
        h("p", {}, renderCode(String(error.what))),
        error.fix ? h("p", { class: "small" }, t("error.fix", { fix: error.fix })) : null,
      );
    }
  }

  function markCurrent() {
    node.classList.remove("old");
    put(busy);
  }

  function draw(plan) {
    const { run } = plan;
    const name = run.mode;
    const mode = plan.modes.find((candidate) => candidate.mode === name);
    const steps = derived?.derived.steps ?? plan.max_steps;
    const error = plan.layout_error;
    if (error) {
      put(
        body,
        h(
          "p",
          { class: "verdict-line bad", id: "plan-verdict" },
          icon("failed"),
          t("plan.layout_error"),
        ),
        h("p", {}, renderCode(error.what)),
        error.allowed
          ? h("p", { class: "small" }, renderCode(t("error.allowed", { allowed: error.allowed })))
          : null,
        error.fix
          ? h("p", { class: "small" }, renderCode(t("error.fix", { fix: error.fix })))
          : null,
        table(plan, plan.chosen),
      );
      return;
    }
    put(
      body,
      name
        ? h(
            "p",
            {
              class: `verdict-line ${run.fits ? "good" : "bad"}`,
              id: "plan-verdict",
              data: { mode: name },
            },
            icon(run.fits ? "done" : "failed"),
            t(run.fits ? "plan.fits" : "plan.not", {
              mode: name,
              n: plan.world_size,
              device: plan.device,
            }),
          )
        : h("p", { class: "verdict-line bad", id: "plan-verdict" }, icon("failed"), t("plan.none")),
      chosenSettings(run.settings),
      h("p", { class: "small" }, renderCode(whyText(plan, mode))),
      name
        ? h(
            "dl",
            { class: "facts" },
            fact(
              t("plan.memory"),
              t("plan.memory.of", {
                used: format.bytes(run.memory_bytes?.total ?? null),
                all: format.bytes(plan.device_memory_bytes),
              }),
              t("plan.memory.is"),
            ),
            fact(
              t("plan.step"),
              run.step_time_s === null
                ? t("plan.unknown")
                : `≈ ${format.duration(run.step_time_s)}`,
              t("plan.step.is"),
            ),
            fact(
              t("plan.total"),
              run.step_time_s !== null && steps
                ? `≈ ${format.duration(run.step_time_s * steps)}`
                : t("plan.unknown"),
              t("plan.total.is"),
              steps ? t("plan.steps", { n: format.count(steps) }) : stepsButton(plan),
            ),
            fact(
              t("plan.parameters"),
              format.short(plan.parameters),
              t("plan.parameters.is"),
              plan.trainable_parameters < plan.parameters
                ? t("plan.trained", { n: format.short(plan.trainable_parameters) })
                : null,
            ),
            derived
              ? fact(
                  t("plan.batch"),
                  format.count(derived.derived.global_batch_size),
                  t("plan.batch.is"),
                  t("plan.epochs", { n: format.digits(derived.derived.epochs) }),
                )
              : null,
          )
        : null,
      plan.modes.length ? memoryBars(plan) : null,
      table(plan, name),
      plan.notes.length
        ? h(
            "ul",
            { class: "muted small" },
            plan.notes.map((note) => h("li", {}, renderCode(note))),
          )
        : null,
    );
  }

  function stepsButton(plan) {
    const feedback = h("span", { class: "small" });
    const button = h(
      "button",
      {
        type: "button",
        id: "steps",
        on: {
          click: async () => {
            button.disabled = true;
            put(feedback, t("plan.reading"));
            const yaml = state.yaml;
            try {
              const counted = await post("api/steps", state.body());
              if (state.ended || yaml !== state.yaml) return;
              derived = { ...counted, yaml };
              draw(plan);
            } catch (error) {
              button.disabled = false;
              put(
                feedback,
                String(error.what),
                error.fix ? ` ${t("error.fix", { fix: error.fix })}` : "",
              );
            }
          },
        },
      },
      t("plan.read"),
    );
    return [button, feedback];
  }

  return {
    node,
    end: () => controller?.abort(),
  };
}

const fact = (name, value, meaning, note = null) =>
  h(
    "div",
    {},
    h("dt", {}, term(name, meaning)),
    h(
      "dd",
      {},
      h("strong", {}, value),
      note === null ? null : [" ", h("span", { class: "muted small" }, note)],
    ),
  );

/** Return the settings that the config leaves open and the run chooses; null if there are none. */
function chosenSettings(settings) {
  const texts = settingsText(settings);
  if (!texts.length) return null;
  const nodes = texts.map((text) => h("code", { class: "tag" }, text));
  return h("p", { class: "plan-chooses small", id: "plan-chooses" }, t("plan.chooses"), nodes);
}

const whyText = (plan, mode) =>
  plan.configured && mode && !plan.run.fits ? mode.reason : plan.why;

function table(plan, chosen) {
  return h(
    "details",
    {},
    h("summary", {}, t("plan.modes", { n: plan.modes.length })),
    h(
      "div",
      {
        class: "table-wrap",
        tabindex: 0,
        role: "region",
        "aria-label": t("plan.modes", { n: plan.modes.length }),
      },
      h(
        "table",
        { class: "plan-modes" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            [t("plan.mode"), t("plan.memory"), t("plan.traffic"), t("plan.step")].map((
              label,
              index,
            ) => h("th", { scope: "col", class: index ? "number" : null }, label)),
          ),
        ),
        h(
          "tbody",
          {},
          plan.modes.map((mode) =>
            h(
              "tr",
              { class: mode.mode === chosen ? "chosen" : null },
              h(
                "th",
                { scope: "row" },
                icon(mode.fits ? "done" : "failed"),
                " ",
                mode.mode,
                mode.mode === chosen ? h("span", { class: "tag" }, t("plan.chosen")) : null,
                mode.fits ? null : h("div", { class: "muted small" }, renderCode(mode.reason)),
              ),
              h(
                "td",
                { class: "number" },
                format.bytes(mode.memory_bytes.total),
              ),
              h("td", { class: "number" }, format.bytes(mode.traffic_bytes_per_step)),
              h(
                "td",
                { class: "number" },
                mode.step_time_s === null ? format.NONE : format.duration(mode.step_time_s),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}
