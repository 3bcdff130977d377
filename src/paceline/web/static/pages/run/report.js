// The tab Report of a run: report.html in a sandboxed frame.

import { h, put } from "../../lib/dom.js";
import { getLanguage, t } from "../../lib/i18n.js";
import { emptyState } from "../../lib/ui.js";

export async function show(root, store) {
  const url = `api/runs/${store.id}/report?language=${getLanguage()}`;
  if (!store.run.has?.report_html)
    put(
      root,
      emptyState(
        t("report.none"),
        t(
          store.run.status === "live" || store.run.status === "waiting"
            ? "report.none.live"
            : "report.none.ended",
        ),
      ),
    );
  else
    put(
      root,
      h("p", {}, h("a", { href: url, target: "_blank", rel: "noopener" }, t("report.open"))),
      h("iframe", {
        class: "report",
        src: url,
        title: t("report.title", { name: store.run.name }),
        sandbox: "allow-scripts",
      }),
    );
  return () => {};
}
