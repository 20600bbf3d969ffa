// Numbers, amounts and times as text.

const whole = new Intl.NumberFormat("en-US");
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const tenth = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });

export const count = (number) => whole.format(number).replace("-", "−");
export const brief = (number) => (Math.abs(number) < 10000 ? tenth.format(number) : short.format(number));

const digits = new Map();

/** How many digits a currency has after the point; 0 for pieces. */
export function digitsOf(asset) {
  if (!digits.has(asset)) {
    let found = 0;
    if (/^[A-Z]{3}$/.test(asset)) {
      try {
        found = new Intl.NumberFormat("en-US", { style: "currency", currency: asset }).resolvedOptions().maximumFractionDigits;
      } catch {
        found = 0; // not a currency: its amounts are whole
      }
    }
    digits.set(asset, found);
  }
  return digits.get(asset);
}

/** An amount in minor units or pieces, without its unit. Whole digits are kept, however large it is. */
export function amount(value, asset) {
  const places = digitsOf(asset);
  if (!places) return count(value);
  const big = BigInt(value);
  const text = (big < 0n ? -big : big).toString().padStart(places + 1, "0");
  return `${big < 0n ? "−" : ""}${whole.format(BigInt(text.slice(0, -places)))}.${text.slice(-places)}`;
}

/** The unit of an amount: the currency, or pieces. */
export const unit = (asset) => (asset.includes(":") ? "pieces" : asset);

const two = (number) => String(number).padStart(2, "0");

/** A time in UTC, with the date. */
export function moment(ms) {
  const at = new Date(ms);
  return `${at.getUTCFullYear()}-${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())} ${clock(ms)}`;
}

/** A time of day in UTC. */
export function clock(ms) {
  const at = new Date(ms);
  return `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}:${two(at.getUTCSeconds())}`;
}

const nearby = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const distant = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", timeZoneName: "short" });

/** A time as a reader's clock shows it; with the date, unless it is of the same day as `now`. */
export function local(ms, now) {
  const isToday = new Date(ms).toDateString() === new Date(now).toDateString();
  return (isToday ? nearby : distant).format(new Date(ms));
}

/** The time that is left, as a clock that runs down: 0:09, 12:00, 3:05:00, 2 d 03:05:00. */
export function remaining(ms) {
  const seconds = Math.max(0, Math.ceil(ms / 1000));
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  const end = `${two(minutes)}:${two(seconds % 60)}`;
  if (days) return `${days} d ${two(hours)}:${end}`;
  return hours ? `${hours}:${end}` : `${minutes}:${two(seconds % 60)}`;
}

/** A length of time, in the largest unit that fits. */
export function length(ms) {
  const size = Math.abs(ms);
  if (size < 1000) return `${Math.round(size)} ms`;
  if (size < 120000) return `${tenth.format(size / 1000)} s`;
  if (size < 7200000) return `${Math.round(size / 60000)} min`;
  if (size < 172800000) return `${Math.round(size / 3600000)} h`;
  return `${Math.round(size / 86400000)} d`;
}

/** How long ago. */
export const ago = (ms, now) => (now - ms < 1000 ? "now" : `${length(now - ms)} ago`);

/** `already_taken` as words. */
export const words = (name) => name.replaceAll("_", " ").replaceAll(".", " ");

/** A number with its noun: 1 hold, 2 holds. */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
