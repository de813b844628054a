// Figures over several tasks: intervals, profiles, curves and probabilities of improvement.

function startOverall(data) {
  const order = (name) => data.algorithms.indexOf(name);
  const on = (name) => !shown.off.has(name);
  document.querySelectorAll("[data-overall]").forEach((section) => {
    const found = data.aggregates[Number(section.dataset.overall)];
    section.querySelectorAll("[data-chart]").forEach((host) => {
      const make = { estimates, profiles, curves, improvements }[host.dataset.chart];
      redraws.push(make(host, found, order, on));
    });
  });
}

function withInterval({ value, low, high }) {
  const [text, from, to] = shares([value, low, high]);
  return isKnown(low) ? `${text} [${from}, ${to}]` : text;
}

function estimates(host, found, order, on) {
  const what = host.dataset.statistic;
  return intervalChart(host, () => ({
    title: what, range: null, line: null,
    rows: found.algorithms.filter(on).map((name) => {
      const one = found.estimates[name][what];
      return { ...one, name, order: order(name), text: withInterval(one) };
    }),
  }));
}

function improvements(host, found, order, on) {
  return intervalChart(host, () => ({
    title: "probability of improvement", range: [0, 1], line: 0.5,
    rows: found.improvements.filter(({ first, second }) => on(first) && on(second)).map((one) => ({
      ...one, name: `${one.first} > ${one.second}`, order: order(one.first), text: withInterval(one),
    })),
  }));
}

function overallSeries(found, kind, x, order, on) {
  return found.algorithms.filter((name) => on(name) && found[kind][name]).map((name) => ({
    ...found[kind][name], name, order: order(name), x, thin: [], runs: null,
  }));
}

function profiles(host, found, order, on) {
  return lineChart(host, () => ({
    title: "performance profile", series: overallSeries(found, "profiles", found.thresholds, order, on),
    references: [], log: false, range: [0, 1.02], xName: "normalized score", xTick: share, yTick: share,
    write: shares, xText: (x) => `share of runs above ${share(x)}`,
  }));
}

function curves(host, found, order, on) {
  return lineChart(host, () => ({
    title: "sample efficiency", series: overallSeries(found, "curves", found.share, order, on),
    references: [], log: false, range: null, xName: "share of each task's frames", xTick: percent, yTick: share,
    write: shares, xText: (x) => `after ${percent(x)} of the frames`,
  }));
}

function percent(value) {
  return `${Math.round(100 * value)} %`;
}
