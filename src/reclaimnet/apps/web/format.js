// Times, sizes and counts for people. Times are nanoseconds, as everywhere in ReclaimNet.

export const MS = 1e6;
export const SECOND = 1e9;
export const MINUTE = 60 * SECOND;
export const HOUR = 60 * MINUTE;
export const DAY = 24 * HOUR;

/** As the command line writes them: 250ms, 6.0s, 4m05s, 3h20m, 2d04h. */
export function duration(ns) {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  const sign = ns < 0 ? "−" : "";
  const n = Math.abs(ns);
  if (n === 0) return "0s";
  if (n < SECOND) return sign + Math.round(n / MS) + "ms";
  if (n < 10 * SECOND) return sign + (n / SECOND).toFixed(1) + "s";
  if (n < MINUTE) return sign + Math.floor(n / SECOND) + "s";
  if (n < HOUR) return `${sign}${Math.floor(n / MINUTE)}m${pad((n % MINUTE) / SECOND)}s`;
  if (n < DAY) return `${sign}${Math.floor(n / HOUR)}h${pad((n % HOUR) / MINUTE)}m`;
  return `${sign}${Math.floor(n / DAY)}d${pad((n % DAY) / HOUR)}h`;
}

function pad(n) {
  return String(Math.floor(n)).padStart(2, "0");
}

export function ago(ns) {
  if (ns < 2 * SECOND) return "just now";
  return duration(Math.floor(ns / SECOND) * SECOND).replace(".0", "") + " ago";
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let n = bytes;
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit++;
  }
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

export function rate(bytesPerSecond) {
  return bytesPerSecond ? size(bytesPerSecond) + "/s" : "–";
}

/** Networks are built in bits. */
export function bits(bytesPerSecond) {
  const units = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"];
  let n = 8 * bytesPerSecond;
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) {
    n /= 1000;
    unit++;
  }
  return `${n >= 10 || unit === 0 ? Math.round(n) : Number(n.toFixed(1))} ${units[unit]}`;
}

export function count(n, noun) {
  return `${n} ${noun}${n === 1 ? "" : "s"}`;
}

/** What a job has lost so far, in words. */
export function lost(record) {
  if (record.lost === "all") return "all before its last start lost: never saved";
  return record.steps_lost ? `${count(record.steps_lost, "step")} lost` : "no step lost";
}

export function clock(ns) {
  return new Date(ns / MS).toLocaleTimeString([], { hour12: false });
}

export function moment(ns) {
  return new Date(ns / MS).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
}

export function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}
