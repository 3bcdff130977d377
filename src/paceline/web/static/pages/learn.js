// The page Learn: the topics of `paceline explain` in reading order, and a player of the recording.

import { get, post } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { addTexts, getLanguage, t } from "../lib/i18n.js";
import { announce, card, command, errorState } from "../lib/ui.js";
import { texts } from "../i18n/learn.js";

addTexts(texts);

export async function show(root, params, ctx) {
  const { topics } = await get("api/topics");
  const topic = topics.find(({ name }) => name === params.topic) ?? topics[0];
  ctx.title(t("learn.title"));
  const state = { ended: false };
  put(
    root,
    h("h1", {}, t("learn.title")),
    h("p", { class: "muted" }, t("learn.about")),
    h(
      "div",
      { class: "learn" },
      h(
        "nav",
        { class: "card learn-topics", "aria-label": t("learn.topics") },
        h(
          "ol",
          {},
          topics.map(({ name }) =>
            h(
              "li",
              {},
              h(
                "a",
                { href: `#/learn/${name}`, "aria-current": name === topic.name ? "page" : null },
                t(`learn.${name}`),
              ),
            ),
          ),
        ),
      ),
      topicCard(topic, ctx, state),
    ),
  );
  return () => (state.ended = true);
}

/** Return the card of a topic: its summary, the button that records it, and the player. */
function topicCard({ name, algorithms, ranks, recorded }, ctx, state) {
  const variant = h(
    "select",
    { id: "learn-variant" },
    algorithms.map((algorithm) =>
      h("option", { value: algorithm, selected: algorithm === recorded?.algorithm }, algorithm),
    ),
  );
  const count = h("input", {
    type: "number",
    id: "learn-ranks",
    min: ranks.min,
    max: ranks.max,
    step: ranks.step,
    value: recorded?.ranks ?? ranks.default,
  });
  const button = h("button", { type: "button", class: "primary" }, t("learn.record"));
  const place = h("div", { class: "learn-player", "aria-live": "polite" });
  const play = () => {
    button.textContent = t("learn.again");
    put(
      place,
      h("iframe", {
        src: `api/topics/${name}/page?language=${getLanguage()}`,
        title: t("learn.player", { topic: t(`learn.${name}`) }),
        sandbox: "allow-scripts",
      }),
    );
  };
  button.addEventListener("click", async () => {
    if (!count.reportValidity()) return;
    button.disabled = true;
    put(place, h("p", { role: "status" }, t("learn.recording")));
    try {
      await post(`api/topics/${name}/record`, {
        algorithm: variant.value,
        ranks: Number(count.value) || ranks.default,
      });
      if (state.ended) return;
      play();
      announce(t("learn.recorded"));
    } catch (error) {
      if (!state.ended) put(place, errorState(error));
    } finally {
      button.disabled = false;
    }
  });
  const inTerminal = h("div");
  const showCommand = () => {
    const isDefault = !algorithms.length || variant.value === algorithms[0];
    const option = isDefault ? "" : ` --algorithm ${variant.value}`;
    const isUsual = !count.value || Number(count.value) === ranks.default;
    const number = isUsual ? "" : ` --ranks ${count.value}`;
    put(inTerminal, command(`paceline explain ${name}${option}${number}`));
  };
  variant.addEventListener("change", showCommand);
  count.addEventListener("input", showCommand);
  showCommand();
  if (recorded !== null) play();
  return card(
    t(`learn.${name}`),
    null,
    h("p", {}, t(`learn.${name}.text`)),
    h(
      "div",
      { class: "toolbar" },
      algorithms.length
        ? h("label", { for: "learn-variant" }, t("learn.variant"), " ", variant)
        : null,
      ranks.min < ranks.max ? h("label", { for: "learn-ranks" }, t("learn.ranks"), " ", count) : null,
      ctx.hasToken() ? button : null,
    ),
    ctx.hasToken() ? null : h("p", {}, t("learn.no_token")),
    h("p", { class: "small muted" }, t("learn.command")),
    inTerminal,
    place,
  );
}
