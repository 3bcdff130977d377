// Smoothing for the eye; the raw values stay behind it.

/**
 * An exponential mean without the pull of its start (Kingma and Ba 2015, section 3, the same correction as Adam's).
 * `weight` 0 (as it is) to below 1; null and non-numbers are passed over and stay null.
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

/** Numbers as they are; "nan", "inf" and the like as null, which a chart leaves open. */
export const numbers = (values) => values.map((value) => (typeof value === "number" && Number.isFinite(value) ? value : null));
