// The search, the filters and the order of the list of runs.

import { h, put } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";

const compareNumbers = (a, b) =>
  (Number.isFinite(a) ? a : Infinity) - (Number.isFinite(b) ? b : Infinity) || 0;
export const SORTS = {
  started: (a, b) => (b.started_at ?? b.updated_at ?? 0) - (a.started_at ?? a.updated_at ?? 0),
  name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
  loss: (a, b) => compareNumbers(a.loss, b.loss),
  eval_loss: (a, b) => compareNumbers(a.eval_loss, b.eval_loss),
  rate: (a, b) =>
    compareNumbers(-(a.tokens_per_second ?? -Infinity), -(b.tokens_per_second ?? -Infinity)),
  duration: (a, b) => compareNumbers(-(a.wall_s ?? -Infinity), -(b.wall_s ?? -Infinity)),
};

/** Return the filters that the address contains. */
export const filtersOf = (query) => ({
  query: query.get("q") ?? "",
  status: query.get("status") ?? "",
  tag: query.get("tag") ?? "",
  archived: query.get("archived") === "1",
  sort: query.get("sort") in SORTS ? query.get("sort") : "started",
});

/** Return the query parameters of the filters. */
export const queryOf = ({ query, status, tag, archived, sort }) => ({
  q: query,
  status,
  tag,
  archived: archived ? "1" : null,
  sort: sort === "started" ? null : sort,
});

/** Return whether the filters include a run. */
export function matches(run, { query, status, tag, archived }) {
  if (run.archived && !archived) return false;
  if (status && run.status !== status) return false;
  if (tag && !(run.tags ?? []).includes(tag)) return false;
  const text = [
    run.name,
    run.path,
    run.model,
    run.task,
    run.strategy,
    run.device,
    run.note,
    ...(run.tags ?? []),
  ]
    .join(" ")
    .toLowerCase();
  return query
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

/**
 * Return `{nodes, draw(runs), clear()}`: the fields, which set the filters in `state` and call
 * `changed`.
 */
export function filterFields(state, changed) {
  const set = (key) => (event) => {
    state[key] = event.target.value;
    changed();
  };
  const search = h("input", {
    type: "search",
    id: "search",
    placeholder: t("runs.search.hint"),
    "aria-label": t("runs.search"),
    prop: { value: state.query },
    on: { input: set("query") },
  });
  const status = h("select", { id: "status", on: { change: set("status") } });
  const tags = h("select", { id: "tag", on: { change: set("tag") } });
  const sort = h(
    "select",
    { id: "sort", on: { change: set("sort") } },
    Object.keys(SORTS).map((name) =>
      h("option", { value: name, prop: { selected: name === state.sort } }, t(`runs.${name}`)),
    ),
  );
  const archived = h("input", {
    type: "checkbox",
    id: "archived",
    prop: { checked: state.archived },
    on: {
      change: (event) => {
        state.archived = event.target.checked;
        changed();
      },
    },
  });
  const archivedCount = h("span", {});
  const tagField = h("label", { class: "field" }, t("runs.tags"), tags);
  const archivedField = h("label", { class: "field" }, archived, archivedCount);
  return {
    nodes: [
      search,
      h("label", { class: "field" }, t("runs.status"), status),
      tagField,
      h("label", { class: "field" }, t("runs.sort"), sort),
      archivedField,
    ],
    search,
    draw(runs) {
      const statuses = [...new Set(runs.map((run) => run.status))];
      setOptions(
        status,
        [["", t("runs.all")], ...statuses.map((name) => [name, t(`status.${name}`)])],
        state.status,
      );
      const knownTags = [...new Set(runs.flatMap((run) => run.tags ?? []))].sort();
      tagField.hidden = knownTags.length === 0 && !state.tag;
      setOptions(tags, [["", t("runs.all")], ...knownTags.map((tag) => [tag, tag])], state.tag);
      const count = runs.filter((run) => run.archived).length;
      archivedField.hidden = count === 0 && !state.archived;
      put(archivedCount, t("runs.show_archived", { n: count }));
    },
    clear() {
      Object.assign(state, { query: "", status: "", tag: "" });
      search.value = "";
      changed();
      search.focus();
    },
  };
}

function setOptions(select, choices, value) {
  const key = JSON.stringify([choices, value]);
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  if (!choices.some(([choice]) => choice === value)) choices = [...choices, [value, value]];
  put(
    select,
    choices.map(([choice, text]) =>
      h("option", { value: choice, prop: { selected: choice === value } }, text),
    ),
  );
}
