// Formatting of numbers with units. Unknown values (null) become "–".

import { getLanguage, t } from "./i18n.js";

export const NONE = "–";
const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(Number(value));
const locale = () => (getLanguage() === "zh" ? "zh-CN" : "en-GB");

/** Format an integer: 12,345. */
export function count(value) {
  return isKnown(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

/** Format a large number with a suffix: 12.3k, 4.56M. */
export function short(value) {
  if (!isKnown(value)) return typeof value === "string" ? value : NONE;
  const size = Math.abs(value);
  for (const [unit, factor] of [
    ["T", 1e12],
    ["B", 1e9],
    ["M", 1e6],
    ["k", 1e3],
  ]) {
    if (size >= factor * 0.9995) return digits(value / factor) + unit;
  }
  return Number.isInteger(Number(value)) ? String(value) : digits(value);
}

/** Format a number with three significant digits. */
export function digits(value) {
  if (!isKnown(value)) return typeof value === "string" ? value : NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return Number(value).toExponential(1).replace("e+", "e");
  return String(
    Number(
      Number(value).toPrecision(size >= 100 ? Math.max(3, Math.ceil(Math.log10(size + 1))) : 3),
    ),
  );
}

/** Format a loss with four decimals. "nan" and "inf" are unchanged. */
export function loss(value) {
  if (!isKnown(value)) return typeof value === "string" && value ? value : NONE;
  return Math.abs(value) >= 1000 ? short(value) : Number(value).toFixed(4);
}

/** Format a number of bytes: 1.5 GiB. */
export function bytes(value) {
  if (!isKnown(value)) return NONE;
  const size = Math.abs(value);
  for (const [unit, power] of [
    ["TiB", 4],
    ["GiB", 3],
    ["MiB", 2],
    ["KiB", 1],
  ]) {
    const share = value / 1024 ** power;
    if (size >= 1024 ** power)
      return `${Number.isInteger(share) ? share : Math.abs(share) >= 999.5 ? Math.round(share) : share.toPrecision(3)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** Format a duration: 850 µs, 12 ms, 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h. */
export function duration(value_s) {
  if (!isKnown(value_s)) return NONE;
  const value = Math.abs(value_s);
  const sign = value_s < 0 ? "-" : "";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${sign}${digits(value * 1e6)} µs`;
  if (value < 1) return `${sign}${digits(value * 1e3)} ms`;
  if (value < 60) return `${sign}${digits(value)} s`;
  const units = [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ];
  const index = units.findIndex(([, factor]) => value >= factor);
  const [unit, factor] = units[index];
  const [nextUnit, nextFactor] = units[index + 1];
  const rest = Math.floor((value % factor) / nextFactor);
  return `${sign}${Math.floor(value / factor)} ${unit}${rest ? ` ${rest} ${nextUnit}` : ""}`;
}

/** Format an epoch with two decimals, and the number of epochs if it is known: 1.25 of 3. */
export function epoch(value, total = null) {
  if (!isKnown(value)) return NONE;
  const rounded = (number) => String(Number(Number(number).toFixed(2)));
  return isKnown(total)
    ? t("epoch.of", { epoch: rounded(value), epochs: rounded(total) })
    : rounded(value);
}

/** Format a throughput: 2.37k tokens/s. */
export const rate = (value) => (isKnown(value) ? `${short(value)} ${t("unit.tokens_s")}` : NONE);

/** Format FLOPs per second: 312 TFLOP/s. */
export function flops(value) {
  if (!isKnown(value)) return NONE;
  return value >= 1e11 ? `${digits(value / 1e12)} TFLOP/s` : `${digits(value / 1e9)} GFLOP/s`;
}

/** Format a share as a percentage: 12.5 %. */
export const percent = (share) => (isKnown(share) ? `${digits(share * 100)} %` : NONE);

/** Format the time since `time_s`: 3 min ago. */
export function ago(time_s, now_s = Date.now() / 1000) {
  if (!isKnown(time_s)) return NONE;
  const past_s = Math.max(0, now_s - time_s);
  const format = new Intl.RelativeTimeFormat(locale(), { numeric: "auto", style: "narrow" });
  for (const [unit, factor] of [
    ["day", 86400],
    ["hour", 3600],
    ["minute", 60],
  ]) {
    if (past_s >= factor) return format.format(-Math.floor(past_s / factor), unit);
  }
  return format.format(-Math.floor(past_s), "second");
}

/** Format a local date and time. `style` "short" omits the seconds. */
export function time(time_s, style = "medium") {
  if (!isKnown(time_s)) return NONE;
  return new Date(time_s * 1000).toLocaleString(locale(), {
    dateStyle: "medium",
    timeStyle: style,
  });
}

/** Format a time of day: 14:03:25. */
export function clock(time_s) {
  return isKnown(time_s) ? new Date(time_s * 1000).toLocaleTimeString("en-GB") : NONE;
}
