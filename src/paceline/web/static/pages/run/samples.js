// The tab Samples of a run: what the model generated at each evaluation.

import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { has, t } from "../../lib/i18n.js";
import { turnsOf, withoutControls } from "../../lib/turns.js";
import { emptyState } from "../../lib/ui.js";

export async function show(root, store) {
  let selected = null; // the index of the evaluation shown; null: the newest
  function draw() {
    const evaluations = store.run.samples ?? [];
    if (!evaluations.length)
      return void put(
        root,
        emptyState(t("missing", { what: t("missing.samples") }), t("samples.none")),
      );
    const focusedId = document.activeElement?.id;
    const index = selected ?? evaluations.length - 1;
    const evaluation = evaluations[index];
    const select = h(
      "select",
      {
        id: "sample-step",
        on: {
          change: (event) => {
            selected =
              Number(event.target.value) === evaluations.length - 1
                ? null
                : Number(event.target.value);
            draw();
          },
        },
      },
      evaluations.map((option, optionIndex) =>
        h(
          "option",
          { value: optionIndex, prop: { selected: optionIndex === index } },
          t("run.at_step", { step: format.count(option.step) }),
        ),
      ),
    );
    const button = (id, target, text) =>
      h(
        "button",
        {
          type: "button",
          id,
          prop: { disabled: target < 0 || target >= evaluations.length },
          on: {
            click: () => {
              selected = target === evaluations.length - 1 ? null : target;
              draw();
            },
          },
        },
        text,
      );
    put(
      root,
      h(
        "div",
        { class: "toolbar" },
        h("label", { class: "field" }, t("samples.evaluation"), select),
        button("sample-before", index - 1, t("samples.before")),
        button("sample-after", index + 1, t("samples.after")),
      ),
      h(
        "div",
        { class: "stack" },
        (evaluation.samples ?? []).map((sample, sampleIndex) =>
          h(
            "section",
            { class: "card sample", "aria-label": t("samples.nth", { nth: sampleIndex + 1 }) },
            turnsOf(sample.prompt ?? "").map(bubble),
            h(
              "div",
              { class: sample.reference ? "answers sides-2" : "answers" },
              answer("samples.text", sample.text, "sample-text"),
              sample.reference ? answer("samples.reference", sample.reference, "", true) : null,
            ),
          ),
        ),
      ),
    );
    if (focusedId && focusedId.startsWith("sample-")) document.getElementById(focusedId)?.focus();
    return undefined;
  }
  draw();
  return store.on("change", () => (selected === null ? draw() : null));
}

// What comes before the answer. A prompt without a chat template is one turn of the user.
export const bubble = ({ role, text }) =>
  h(
    "div",
    { class: BUBBLES[role ?? "user"] ?? "instruction" },
    h("span", { class: "sr" }, `${roleName(role)}: `),
    text,
  );

const roleName = (role) =>
  has(`samples.role.${role}`) ? t(`samples.role.${role}`) : (role ?? t("samples.prompt"));

const BUBBLES = { user: "asked", assistant: "answer answer-past" };

const answer = (key, text, className = "", isReference = false) =>
  h(
    "div",
    { class: isReference ? "answer answer-base" : "answer" },
    h("div", { class: "answer-head" }, t(key)),
    h(
      "div",
      { class: `answer-text ${className}` },
      withoutControls(text ?? "") || t("samples.empty"),
    ),
  );
