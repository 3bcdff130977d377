// The machine that the server runs on, and the utilization of its GPUs.

import { get } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { t } from "../lib/i18n.js";
import { term } from "../lib/ui.js";

/** Return `{node, end}`: a summary of the machine, which is updated every five seconds. */
export function machineStrip() {
  const node = h("div", {
    class: "machine muted small",
    role: "group",
    "aria-label": t("machine"),
  });
  let ended = false;
  let timer = null;

  async function renew() {
    try {
      const machine = await get("api/machine");
      if (!ended && !node.contains(document.activeElement)) put(node, line(machine));
    } catch {
      // The banner reports the lost connection, and the last figures stay visible.
    }
    if (!ended) timer = setTimeout(renew, 5000);
  }
  renew();
  return {
    node,
    end: () => {
      ended = true;
      clearTimeout(timer);
    },
  };
}

function line({ cpu_count, memory_bytes, gpus = [], gpus_problem }) {
  const parts = [
    h("span", {}, t("machine.cpu", { n: cpu_count })),
    h("span", {}, t("machine.memory", { memory: format.bytes(memory_bytes) })),
  ];
  if (!gpus?.length) parts.push(h("span", { title: gpus_problem ?? null }, t("machine.gpu.none")));
  for (const gpu of gpus ?? []) {
    parts.push(
      h(
        "span",
        { class: "gpu" },
        t("machine.gpu", { index: gpu.index, name: gpu.name }),
        " ",
        term(
          t("machine.utilisation", { value: format.percent(gpu.utilisation) }),
          t("machine.utilisation.is"),
        ),
        " ",
        [
          gpu.temperature_c === null ? null : `${format.digits(gpu.temperature_c)} °C`,
          gpu.power_w === null ? null : `${format.digits(gpu.power_w)} W`,
          `${format.bytes(gpu.memory_used_bytes)} / ${format.bytes(gpu.memory_bytes)}`,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    );
  }
  return parts;
}
