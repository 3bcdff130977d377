// Descriptions of strategies.

import { has, t } from "../../lib/i18n.js";

export const AXES = ["pipeline", "data", "shard", "tensor"];

/** The description of a strategy; null if the strategy is unknown. */
export function inWords(strategy) {
  if (!strategy) return null;
  return has(`strategy.${strategy}`) ? t(`strategy.${strategy}`) : t("strategy.own");
}

/** "data 2 × tensor 2"; empty if no axis has more than one rank. */
export function axesInWords(axes) {
  return AXES.filter((name) => axes?.[name] > 1)
    .map((name) => `${t(`axis.${name}`)} ${axes[name]}`)
    .join(" × ");
}
