// What the page Plan and the plan of the form share: the settings that a run would choose, and the
// memory by kind.

import { bars, fillLegend } from "../lib/bars.js";
import { h } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { addTexts, t } from "../lib/i18n.js";
import { icon } from "../lib/ui.js";
import { texts } from "../i18n/plan.js";

addTexts(texts);

const PARTS = ["parameters", "gradients", "optimizer", "activations"];
const SHOWN_MODES = ["single", "ddp", "zero1", "zero2", "zero3", "tensor", "pipeline", "context"];
const MODE_KEYS = /^parallel\.(mode|data|shard|context|tensor|pipeline)$/;

/** Return the settings that do not select the mode as `key=value`, as the terminal shows them. */
export const settingsText = (settings) =>
  Object.entries(settings)
    .filter(([key]) => !MODE_KEYS.test(key))
    .map(([key, value]) => `${key.replace("train_args.", "")}=${value}`);

/** Return the memory by kind of what runs and of the plain modes, with the limit of the device. */
export function memoryBars(plan) {
  const limit = plan.device_memory_bytes;
  const rows = [];
  const add = (name, memory, fits) =>
    rows.push({
      name: [icon(fits ? "done" : "failed"), " ", name],
      parts: PARTS.map((part, index) => ({
        name: t(`whatif.${part}`),
        value: memory[part],
        kind: index + 1,
        text: format.bytes(memory[part]),
      })),
      text: format.bytes(memory.total),
    });
  const { run } = plan;
  if (run.memory_bytes) add(t("whatif.run", { mode: run.mode }), run.memory_bytes, run.fits);
  for (const mode of plan.modes)
    if (SHOWN_MODES.includes(mode.mode) && mode.memory_bytes.total !== null)
      add(mode.mode, mode.memory_bytes, mode.fits);
  return h(
    "div",
    { class: "plan-bars" },
    fillLegend(PARTS.map((name, index) => [index + 1, t(`whatif.${name}`)])),
    bars(rows, { name: t("whatif.limit"), value: limit, text: format.bytes(limit) }),
  );
}
