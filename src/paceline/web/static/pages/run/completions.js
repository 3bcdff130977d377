// The tab Completions of a run: what the model generated to be trained on, with the rewards.

import { get } from "../../lib/api.js";
import { h, put } from "../../lib/dom.js";
import * as format from "../../lib/format.js";
import { t } from "../../lib/i18n.js";
import { turnsOf, withoutControls } from "../../lib/turns.js";
import { emptyState } from "../../lib/ui.js";
import { bubble } from "./samples.js";

const PAGE = 20;
const ORDERS = ["file", "best", "worst"];

export async function show(root, store) {
  const state = { step: null, search: "", order: "file", offset: 0 };
  let request = null;
  const list = h("div", { class: "stack" });
  const note = h("p", { class: "muted small", role: "status" });
  const steps = h("select", {
    id: "completion-step",
    on: { change: ({ target }) => change({ step: target.selectedIndex ? target.value : null }) },
  });
  const orders = h(
    "select",
    { id: "completion-order", on: { change: ({ target }) => change({ order: target.value }) } },
    ORDERS.map((order) => h("option", { value: order }, t(`completions.order.${order}`))),
  );
  let typing = null;
  const search = h("input", {
    type: "search",
    "aria-label": t("completions.search"),
    placeholder: t("completions.search"),
    prop: { maxLength: 200 },
    on: {
      input: ({ target }) => {
        clearTimeout(typing);
        typing = setTimeout(() => change({ search: target.value }), 250);
      },
    },
  });
  const pageButton = (key, pages) =>
    h(
      "button",
      {
        type: "button",
        on: { click: () => change({ offset: Math.max(0, state.offset + pages * PAGE) }) },
      },
      t(key),
    );
  const earlier = pageButton("completions.earlier", -1);
  const later = pageButton("completions.later", 1);
  const toolbar = h(
    "div",
    { class: "toolbar" },
    h("label", { class: "field" }, t("completions.step"), steps),
    h("label", { class: "field" }, t("completions.order"), orders),
    search,
  );
  put(root, toolbar, note, list, h("div", { class: "toolbar" }, earlier, later));

  function change(values) {
    Object.assign(state, { offset: 0 }, values);
    load().catch((error) => (error.name === "AbortError" ? null : put(note, error.message)));
  }

  async function load() {
    request?.abort();
    request = new AbortController();
    const query = new URLSearchParams({
      search: state.search,
      order: state.order,
      offset: state.offset,
      limit: PAGE,
    });
    if (state.step !== null) query.set("step", state.step);
    draw(await get(`api/runs/${store.id}/completions?${query}`, { signal: request.signal }));
  }

  function draw(page) {
    put(
      steps,
      page.steps.map((step) =>
        h("option", { value: step, prop: { selected: step === page.step } }, format.count(step)),
      ),
    );
    const last = state.offset + page.completions.length;
    earlier.disabled = state.offset === 0;
    later.disabled = last >= page.num_matching;
    earlier.parentNode.hidden = earlier.disabled && later.disabled;
    const notes = [];
    if (page.completions.length)
      notes.push(
        t("completions.shown", {
          first: format.count(state.offset + 1),
          last: format.count(last),
          count: format.count(page.num_matching),
        }),
      );
    if (page.unreadable)
      notes.push(t("completions.unreadable", { count: format.count(page.unreadable) }));
    if (page.is_cut) notes.push(t("completions.cut"));
    put(note, notes.join(" · "));
    put(
      list,
      page.completions.length
        ? promptGroups(page.completions).map(groupCard)
        : h("p", { class: "muted" }, t("completions.no_match")),
    );
  }

  try {
    await load();
  } catch (error) {
    if (error.status !== 404) throw error;
    put(
      root,
      emptyState(t("missing", { what: t("missing.completions") }), t("completions.none")),
    );
    return undefined;
  }
  // A new rollout is shown if the latest one is.
  const stop = store.on("append", () => {
    clearTimeout(typing);
    if (state.step === null && !state.offset) typing = setTimeout(() => change({}), 1000);
  });
  return () => {
    clearTimeout(typing);
    request?.abort();
    stop();
  };
}

/** Divide completions into runs of neighbours with the same prompt. */
function promptGroups(completions) {
  const groups = [];
  for (const completion of completions)
    if (groups.at(-1)?.[0].prompt === completion.prompt) groups.at(-1).push(completion);
    else groups.push([completion]);
  return groups;
}

function groupCard(completions) {
  const [{ prompt, prompt_text }] = completions;
  return h(
    "section",
    { class: "card sample", "aria-label": t("completions.of", { prompt: prompt ?? format.NONE }) },
    turnsOf(prompt_text).map(bubble),
    completions.map((completion) =>
      h(
        "div",
        { class: "answer" },
        h("div", { class: "answer-head" }, facts(completion).join(" · ")),
        h(
          "div",
          { class: "answer-text sample-text" },
          withoutControls(completion.completion) || t("samples.empty"),
        ),
      ),
    ),
  );
}

function facts({ reward, rewards, advantage, tokens, truncated }) {
  const names = Object.keys(rewards);
  return [
    reward === null
      ? t("completions.no_reward")
      : t("completions.reward", { reward: format.digits(reward) }),
    ...(names.length > 1
      ? names.map((name) => `${name} ${rewards[name] === null ? format.NONE : format.digits(rewards[name])}`)
      : []),
    ...(advantage === null
      ? []
      : [t("completions.advantage", { advantage: format.digits(advantage) })]),
    t("completions.tokens", { tokens: format.count(tokens) }),
    ...(truncated ? [t("completions.truncated")] : []),
  ];
}
