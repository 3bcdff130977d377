// Smoothing of curves. The raw values are drawn behind the smoothed line.

/**
 * Exponential moving average with the bias correction of Adam (Kingma and Ba 2015, section 3).
 * `weight`: from 0 (no smoothing) to below 1. null and non-numbers are skipped and stay null.
 */
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let left = 1;
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    left *= weight;
    return mean / (1 - left);
  });
}

/** Return numbers unchanged, and null for "nan", "inf" and other values: a gap in a chart. */
export const numbers = (values) => values.map((value) => (typeof value === "number" && Number.isFinite(value) ? value : null));
