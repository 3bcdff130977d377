// The small curve of the loss in each row of the list of runs.

import { get } from "../../lib/api.js";
import { svg } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";

const WIDTH = 96;
const HEIGHT = 26;
const RENEW_MS = 10_000;
const MAX_IDS = 200; // of a request

/**
 * Return `{node(id), show(runs), end()}`. `node` returns the curve of a run, which is drawn when its
 * values have arrived; `show` is called with the runs in the list whenever they have changed.
 */
export function sparklines() {
  const nodes = new Map();
  const values = new Map();
  let shownRuns = [];
  let isRequested = false;
  let ended = false;

  async function request(ids) {
    if (isRequested || !ids.length || document.hidden) return;
    isRequested = true;
    try {
      const answer = await get(`api/sparklines?ids=${ids.slice(0, MAX_IDS).join(",")}`);
      for (const id of ids) values.set(id, answer[id] ?? []);
      for (const id of ids) draw(id);
    } catch {
      // The banner reports a lost connection; the list is complete without the curves.
    }
    isRequested = false;
  }

  function draw(id) {
    const node = nodes.get(id);
    const losses = values.get(id) ?? [];
    if (!node || losses.length < 2) return;
    node.replaceChildren(svg("path", { d: pathOf(losses) }));
    node.setAttribute(
      "aria-label",
      t("runs.curve.from", { first: format.loss(losses[0]), last: format.loss(losses.at(-1)) }),
    );
    node.setAttribute("role", "img");
    node.removeAttribute("aria-hidden");
  }

  const isLive = (run) => run.status === "live";
  const timer = setInterval(
    () => request(shownRuns.filter(isLive).map((run) => run.id)),
    RENEW_MS,
  );
  return {
    node(id) {
      const node = svg("svg", {
        class: "sparkline",
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        "aria-hidden": "true",
      });
      nodes.set(id, node);
      draw(id);
      return node;
    },
    async show(runs) {
      shownRuns = runs;
      for (const id of nodes.keys()) if (!runs.some((run) => run.id === id)) nodes.delete(id);
      const missing = () => runs.map((run) => run.id).filter((id) => !values.has(id));
      if (!ended) await request(missing());
    },
    end() {
      ended = true;
      clearInterval(timer);
    },
  };
}

function pathOf(losses) {
  const low = Math.min(...losses);
  const high = Math.max(...losses);
  const span = high - low || 1;
  const points = losses.map((loss, index) => {
    const x = (index / (losses.length - 1)) * (WIDTH - 4) + 2;
    const y = 3 + (1 - (loss - low) / span) * (HEIGHT - 6);
    return `${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  return `M${points.join("L")}`;
}
