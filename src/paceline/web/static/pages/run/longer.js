// The question for how many steps a run that is complete is to continue.

import { get, post } from "../../lib/api.js";
import { ask } from "../../lib/dialog.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";

/** Ask, and continue the run. Return whether it was continued. */
export function askForSteps(run) {
  const lastStep = run.step ?? run.steps ?? 0;
  const field = h("input", {
    type: "number",
    id: "longer-steps",
    min: 1,
    step: 1,
    required: true,
    prop: { value: Math.max(1, lastStep) },
    on: { input: describeSoon },
  });
  const rates = h("p", { class: "small", id: "longer-rate", "aria-live": "polite" });
  let timer = null;
  let requestCount = 0;
  function describeSoon() {
    clearTimeout(timer);
    timer = setTimeout(() => describe().catch((error) => put(rates, String(error.what))), 200);
  }
  async function describe() {
    const more = Number(field.value);
    const thisRequest = ++requestCount;
    if (!Number.isInteger(more) || more < 1) return void put(rates);
    const answer = await get(`api/runs/${run.id}/longer?steps=${lastStep + more}`);
    if (thisRequest === requestCount) put(rates, describeRates(answer));
    return undefined;
  }
  describe().catch(() => {});
  return ask({
    title: t("run.longer.ask", { name: run.name }),
    content: [
      h(
        "p",
        {},
        h("label", { class: "field", for: "longer-steps" }, t("run.longer.steps"), field),
      ),
      rates,
      h("p", { class: "muted small" }, t("run.longer.what", { step: format.count(lastStep) })),
    ],
    action: t("run.longer.start"),
    confirm: () => continueRun(run, lastStep + Number(field.value)),
  });
}

/** Describe what the learning rate does when the run continues. */
export function describeRates({ step, steps, schedule, before, after, end }) {
  const values = {
    step: format.count(step),
    steps: format.count(steps),
    schedule: schedule ?? "",
    before: format.digits(before),
    after: format.digits(after),
    end: format.digits(end),
  };
  if (!Number.isFinite(after) || !Number.isFinite(before))
    return t(schedule ? "run.longer.rate.schedule" : "run.longer.rate.unknown", values);
  const isSame = Math.abs(after - before) <= 0.05 * Math.max(after, before);
  if (isSame && Math.abs(end - after) <= 0.05 * after) return t("run.longer.rate.same", values);
  return t(
    isSame
      ? "run.longer.rate.continues"
      : after > before
        ? "run.longer.rate.rises"
        : "run.longer.rate.falls",
    values,
  );
}

// The steps belong to what must not change by accident when a run resumes, so this needs permission.
async function continueRun(run, steps) {
  const { yaml } = await get(`api/runs/${run.id}/resume`);
  const edited = await post("api/yaml", {
    yaml,
    values: { "train_args.max_steps": steps },
    remove: ["train_args.num_train_epochs"],
  });
  await post(`api/runs/${run.id}/resume`, { yaml: edited.yaml, allow_config_change: true });
}
