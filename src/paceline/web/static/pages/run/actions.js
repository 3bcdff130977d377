// What can be done with a run: stop, resume, chat with its model, train it longer, export it.

import { post } from "../../lib/api.js";
import { ask } from "../../lib/dialog.js";
import { h } from "../../lib/dom.js";
import { t } from "../../lib/i18n.js";
import { errorState, icon } from "../../lib/ui.js";
import { exportModel } from "../export.js";
import { askForSteps } from "./longer.js";

/**
 * Return `{buttons(isRunning), feedback}`: the buttons for the present state of the run, first the
 * button that most users want now, and a node that shows the result of an export.
 *
 * `watch()` shows the output of a command that was started here.
 */
export function runActions(store, ctx, watch) {
  const exporting = exportModel(store.id, t("export.title"));
  return {
    feedback: exporting.feedback,
    buttons(isRunning) {
      const { run } = store;
      if (isRunning) return [stopButton(store, ctx), duplicateLink(run)];
      const canResume = run.has?.config && run.status !== "done";
      const main = canResume ? "resume" : "chat";
      return [
        canResume ? link("resume", "play", `#/new?resume=${run.id}`, main) : null,
        run.has?.model ? link("chat", "chat", `#/run/${run.id}/chat`, main) : null,
        run.has?.config && run.status === "done" && ctx.hasToken()
          ? longerButton(store, ctx, watch)
          : null,
        run.has?.model ? exporting.button : null,
        duplicateLink(run),
      ];
    },
  };
}

const link = (id, symbol, href, main) =>
  h(
    "a",
    { class: id === main ? "button main" : "button", id, href },
    icon(symbol),
    t(`run.${id}`),
  );

const duplicateLink = (run) =>
  run.has?.config ? link("duplicate", "copy", `#/new?from=${run.id}`) : null;

const longerButton = (store, ctx, watch) =>
  h(
    "button",
    {
      type: "button",
      id: "longer",
      on: {
        click: async () => {
          if (!(await askForSteps(store.run))) return;
          ctx.announce(t("run.longer.started"));
          watch();
          store.renew().catch(() => {});
        },
      },
    },
    icon("plus"),
    t("run.longer"),
  );

function stopButton(store, ctx) {
  const isSecondRequest = store.isStopping; // the second request ends the run immediately
  const click = () => stop(store, ctx, isSecondRequest);
  return h(
    "button",
    { type: "button", id: "stop", on: { click } },
    icon("stopped"),
    t(isSecondRequest ? "run.end_now" : "run.stop"),
  );
}

async function stop(store, ctx, endsNow) {
  const name = endsNow ? "run.end_now" : "run.stop";
  const isConfirmed = await ask({
    title: t(`${name}.ask`, { name: store.run.name }),
    content: h("p", {}, t(`${name}.what`)),
    action: t(name),
    name: "stop",
  });
  document.getElementById("stop")?.focus();
  if (!isConfirmed) return;
  try {
    await post(`api/runs/${store.id}/stop`, { now: endsNow });
    store.isStopping = true;
    ctx.announce(t(`${name}.sent`));
    store.renew().catch(() => {});
  } catch (error) {
    // A stop has already been requested, perhaps on another page.
    if (error.status === 409) store.isStopping = true;
    await store.renew().catch(() => {});
    document.querySelector(".run-head")?.append(errorState(error));
  }
}

