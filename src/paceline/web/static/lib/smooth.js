// Smoothing of curves. The raw values are drawn behind the smoothed line.

/**
 * Return the exponential moving average, with the bias correction of Adam (Kingma and Ba 2015,
 * section 3). `weight`: from 0 (no smoothing) to less than 1. Values that are not finite numbers
 * become null and do not affect the mean.
 */
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let initialWeight = 1;
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    initialWeight *= weight;
    return mean / (1 - initialWeight);
  });
}

/** Replace values that are not finite numbers by null, which is a gap in a chart. */
export const numbers = (values) =>
  values.map((value) => (typeof value === "number" && Number.isFinite(value) ? value : null));
