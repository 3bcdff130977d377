// Descriptions of strategies and meshes.

import { has, t } from "../../lib/i18n.js";

// The ranks of "expert" are ranks of data, shard and context.
export const MESH_AXES = ["pipeline", "data", "shard", "context", "tensor", "expert"];

/** Describe a strategy. null if the strategy is not known. */
export function describeStrategy(strategy) {
  if (!strategy) return null;
  return has(`strategy.${strategy}`) ? t(`strategy.${strategy}`) : t("strategy.custom");
}

/** Describe a mesh, such as "data 2 × tensor 2". Empty if no axis has more than one rank. */
export function describeAxes(axes) {
  return MESH_AXES.filter((name) => axes?.[name] > 1)
    .map((name) => `${t(`axis.${name}`)} ${axes[name]}`)
    .join(" × ");
}
