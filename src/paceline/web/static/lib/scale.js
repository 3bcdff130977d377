// The ranges and the ticks of the axes of charts.

// Tick distances of an axis: integers, times (seconds, minutes, hours, days) and bytes (powers of
// two).
export const INTEGER_TICKS = Array.from({ length: 15 }, (_, power) =>
  [1, 2, 5].map((factor) => factor * 10 ** power),
).flat();
export const TIME_TICKS = [
  ...[-6, -5, -4, -3, -2, -1].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power)),
  1,
  2,
  5,
  10,
  15,
  30,
  60,
  120,
  300,
  600,
  900,
  1800,
  3600,
  7200,
  10800,
  21600,
  43200,
  ...[1, 2, 5, 10, 20, 50, 100].map((days) => days * 86400),
];
export const BYTE_TICKS = [0, 1, 2, 3, 4].flatMap((power) =>
  [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map((factor) => factor * 1024 ** power),
);

/** Return the range of an axis around its values. `min`: a value that it includes. */
export function paddedRange(low, high, min) {
  if (
    low === null ||
    high === null ||
    low === undefined ||
    high === undefined ||
    !Number.isFinite(low)
  )
    return [0, 1];
  // Differences in the seventh digit are rounding errors.
  const isFlat = high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));
  const padding = (isFlat ? Math.abs(high) || 1 : high - low) * 0.08;
  const bottom = min === undefined ? low - padding : Math.min(low, min);
  return [bottom, high + padding];
}

/** Replace values that a logarithmic axis cannot show by gaps. */
export const positive = (values) => values.map((value) => (value > 0 ? value : null));

/** Return the range of a logarithmic axis around its values. */
export function logRange(low, high) {
  if (!(low > 0) || !(high > 0)) return [1, 10];
  const factor = high > low * 1.000001 ? (high / low) ** 0.06 : 1.1;
  return [low / factor, high * factor];
}

const round = (tick) => Number(tick.toPrecision(12));

/**
 * Return ticks at powers of ten (of bytes: of two); of a narrower range, at 1, 2 and 5 times them,
 * or round numbers.
 */
export function logTicks(low, high, isBytes) {
  const within = (ticks) => ticks.filter((tick) => tick >= low && tick <= high);
  const every = (ticks) => ticks.filter((_, index) => index % Math.ceil(ticks.length / 6) === 0);
  const first = Math.floor(Math.log10(low));
  const count = Math.ceil(Math.log10(high)) - first + 1;
  const decades = Array.from({ length: count }, (_, index) => Number(`1e${first + index}`));
  const multiples = (decade) => [1, 2, 5].map((factor) => round(factor * decade));
  const choices = isBytes ? [BYTE_TICKS] : [decades, decades.flatMap(multiples)];
  const ticks = choices.map(within).find((choice) => choice.length >= 3);
  if (ticks) return every(ticks);
  const about = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(about));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= about);
  const begin = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - begin + 1 }, (_, index) =>
    round((begin + index) * step),
  );
}
