// Number formats of the tables, and statistics of the selected runs.

function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size < 1e12 && (Number.isInteger(value) || size >= 1000)) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

function share(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  return (Math.abs(value) < 0.005 ? 0 : value).toFixed(2);
}

function shares(values) {
  return values.map(share);
}

// Formats a value and the ends of its interval, with as many decimals as the interval's width needs.
function aligned(values) {
  const width = values[2] - values[1];
  const digits = isKnown(values[1]) && width > 0 && width < 1e12 ? Math.max(0, 1 - Math.floor(Math.log10(width))) : 9;
  const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return values.map((value) => (digits > 6 || !isKnown(value) ? figure(value) : value.toLocaleString("en-US", options)));
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return Number((value / unit).toPrecision(3)) + name;
  }
  return String(Number(value.toPrecision(3)));
}

function isKnown(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

// Mean of the middle half, as in torchrl_marl.training.statistics.
function interquartileMean(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const cut = Math.floor(sorted.length / 4);
  const inner = sorted.slice(cut, sorted.length - cut);
  return inner.reduce((sum, value) => sum + value, 0) / inner.length;
}

// Seeded random numbers, the same each time the page is opened.
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

// Value, low and high of each point of some runs' curves: whole runs are resampled, as in Python.
function estimateLine(each, kept) {
  const random = generator(1);
  const draws = Array.from({ length: 1000 }, () => kept.map(() => random()));
  const line = { value: [], low: [], high: [], runs: [] };
  for (const row of each) {
    const values = kept.map((run) => row[run]).filter(isKnown);
    line.runs.push(values.length);
    line.value.push(values.length * 2 >= kept.length && values.length ? interquartileMean(values) : null);
    if (values.length < 2) {
      line.low.push(null);
      line.high.push(null);
      continue;
    }
    const means = draws.map((draw) =>
      interquartileMean(values.map((_, i) => values[Math.floor(draw[i] * values.length)])));
    means.sort((a, b) => a - b);
    line.low.push(quantile(means, 0.025));
    line.high.push(quantile(means, 0.975));
  }
  return line;
}

function quantile(sorted, level) {
  const place = level * (sorted.length - 1);
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of [1, 2, 5]) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  const whole = ticks.filter((tick) => Number.isInteger(Math.round(Math.log10(tick) * 1e6) / 1e6));
  return ticks.length > 6 && whole.length > 1 ? whole : ticks;
}
