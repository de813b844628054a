// Charts as SVG: curves with bands and a readout, and points with intervals.

function element(name, attributes = {}, text = null) {
  const isSvg = ["svg", "g", "path", "line", "rect", "circle", "text", "title"].includes(name);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

const DASHES = ["", "7 4", "2 4", "9 3 2 3"];

// Color and, beyond eight algorithms, dash pattern.
function strokeOf(order) {
  return { color: `var(--c${order % 8})`, dash: DASHES[Math.floor(order / 8) % DASHES.length] };
}

function swatch(order) {
  const { color, dash } = strokeOf(order);
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.borderColor = color;
  made.style.borderTopStyle = dash ? "dashed" : "solid";
  return made;
}

// Draws curves into an element; `specification()` is called again after every change.
//
// It returns series [{name, order, x, value, low, high, runs, thin}], the names and formats of both
// axes, whether x is logarithmic, and references [{value, name}].
function lineChart(host, specification) {
  const state = { at: null };
  host.classList.add("curve");
  const tip = element("div", { class: "tip", role: "status", hidden: "" });
  const draw = () => {
    const spec = specification();
    const frame = layOut(host, spec);
    host.replaceChildren(frame.svg, tip);
    listen(frame, spec, state, tip);
    state.at = null;
    tip.hidden = true;
  };
  new ResizeObserver(() => {
    if (host.clientWidth !== host.drawnWidth) draw();
  }).observe(host);
  draw();
  return draw;
}

function layOut(host, spec) {
  const width = Math.max(host.clientWidth, 200);
  host.drawnWidth = host.clientWidth;
  const height = Math.round(Math.min(Math.max(width * 0.56, 230), 360));
  const box = { left: 54, right: width - 12, top: 12, bottom: height - 44 };
  const usable = (x) => isKnown(x) && (!spec.log || x > 0);
  const xs = spec.series.flatMap((one) => one.x.filter(usable));
  const ys = spec.series.flatMap((one) => one.x.flatMap((x, i) =>
    usable(x) ? [one.value[i], one.low[i], one.high[i], ...one.thin.map((run) => run[i])].filter(isKnown) : []));
  ys.push(...spec.references.map((one) => one.value));
  const x = scale(extent(xs, spec.log), box.left, box.right, spec.log);
  const y = scale(spec.range || padded(extent(ys, false)), box.bottom, box.top, false);
  const svg = element("svg", {
    viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "group",
    "aria-roledescription": "chart", "aria-label": `${spec.title}. Use the arrow keys to read values.`,
  });
  const frame = { svg, width, height, box, x, y, usable };
  drawAxes(frame, spec);
  for (const one of spec.references) drawReference(frame, one);
  for (const one of spec.series) drawBand(frame, one);
  for (const one of spec.series) drawLines(frame, one);
  if (!xs.length) {
    svg.append(element("text", { x: (box.left + box.right) / 2, y: height / 2, "text-anchor": "middle" }, spec.empty || "nothing is switched on"));
  }
  return frame;
}

function extent(values, log) {
  if (!values.length) return log ? [1, 10] : [0, 1];
  let low = values[0], high = values[0];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low === high) return log ? [low / 2, high * 2] : [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
  return [low, high];
}

function padded([low, high]) {
  const more = 0.05 * (high - low);
  return [low - more, high + more];
}

// Range of scores, at least 0.2 wide.
function roomy(values) {
  const [low, high] = extent(values, false);
  const more = Math.max(0.08 * (high - low), 0.1 - (high - low) / 2);
  return [low - more, high + more];
}

function scale([low, high], start, end, log) {
  const of = log ? Math.log10 : (value) => value;
  const size = of(high) - of(low);
  const made = (value) => start + ((of(value) - of(low)) / size) * (end - start);
  made.low = low;
  made.high = high;
  return made;
}

function drawAxes({ svg, box, x, y, width, height }, spec) {
  const across = Math.max(2, Math.floor((box.right - box.left) / 90));
  for (const tick of linearTicks(y.low, y.high, 5)) {
    svg.append(element("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
    svg.append(element("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, spec.yTick(tick)));
  }
  for (const tick of spec.log ? logTicks(x.low, x.high) : linearTicks(x.low, x.high, across)) {
    svg.append(element("line", { class: "axis", x1: x(tick), x2: x(tick), y1: box.bottom, y2: box.bottom + 5 }));
    svg.append(element("text", { class: "x-tick", x: x(tick), y: box.bottom + 18, "text-anchor": "middle" }, spec.xTick(tick)));
  }
  svg.append(element("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  svg.append(element("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.xName));
}

function drawReference({ svg, box, y }, { value, name }) {
  svg.append(element("line", { class: "reference", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
  const above = y(value) - box.top > 18;
  svg.append(element("text", { x: box.right - 2, y: y(value) + (above ? -5 : 14), "text-anchor": "end" }, name));
}

// Splits a path into pieces at missing numbers.
function pieces({ usable }, one, numbers) {
  const found = [[]];
  one.x.forEach((x, i) => {
    if (usable(x) && numbers.every((row) => isKnown(row[i]))) found[found.length - 1].push(i);
    else if (found[found.length - 1].length) found.push([]);
  });
  return found.filter((piece) => piece.length);
}

function pathOf({ x, y }, one, row, piece) {
  return piece.map((i) => `${x(one.x[i]).toFixed(1)} ${y(row[i]).toFixed(1)}`).join("L");
}

function drawBand(frame, one) {
  const { color } = strokeOf(one.order);
  for (const piece of pieces(frame, one, [one.low, one.high])) {
    const there = pathOf(frame, one, one.high, piece);
    const back = pathOf(frame, one, one.low, [...piece].reverse());
    frame.svg.append(element("path", { class: "band", fill: color, d: `M${there}L${back}Z` }));
  }
}

function drawLines(frame, one) {
  const { color, dash } = strokeOf(one.order);
  for (const row of one.thin) {
    for (const piece of pieces(frame, one, [row])) {
      frame.svg.append(element("path", { class: "thin", stroke: color, d: `M${pathOf(frame, one, row, piece)}` }));
    }
  }
  for (const piece of pieces(frame, one, [one.value])) {
    const d = `M${pathOf(frame, one, one.value, piece)}`;
    frame.svg.append(element("path", { class: "line", stroke: color, "stroke-dasharray": dash, d, "data-name": one.name }));
    if (piece.length > 3) continue;
    for (const i of piece) {
      frame.svg.append(element("circle", { class: "dot", r: 4, cx: frame.x(one.x[i]), cy: frame.y(one.value[i]), fill: color }));
    }
  }
}

function listen(frame, spec, state, tip) {
  const { svg, width } = frame;
  const stops = [...new Set(spec.series.flatMap((one) => one.x.filter((x, i) => frame.usable(x) && isKnown(one.value[i]))))];
  stops.sort((a, b) => a - b);
  const show = (at) => {
    state.at = at;
    readOff(frame, spec, stops[at], tip);
  };
  const hide = () => {
    tip.hidden = true;
    svg.querySelector(".marks")?.remove();
  };
  svg.addEventListener("pointermove", (event) => {
    const bounds = svg.getBoundingClientRect();
    const place = ((event.clientX - bounds.left) / bounds.width) * width;
    const near = (a, b) => (Math.abs(frame.x(stops[b]) - place) < Math.abs(frame.x(stops[a]) - place) ? b : a);
    if (stops.length) show(stops.reduce((best, _, i) => near(best, i), 0));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !stops.length) return;
    event.preventDefault();
    const from = state.at === null ? (step > 0 ? -1 : stops.length) : state.at;
    show(Math.min(Math.max(from + step, 0), stops.length - 1));
  });
}

// Shows the values of all curves near a place.
function readOff(frame, spec, at, tip) {
  const { svg, box, x, y } = frame;
  svg.querySelector(".marks")?.remove();
  const marks = element("g", { class: "marks" });
  marks.append(element("line", { class: "cross", x1: x(at), x2: x(at), y1: box.top, y2: box.bottom }));
  const table = element("table");
  const found = [];
  for (const one of spec.series) {
    let best = -1;
    one.x.forEach((place, i) => {
      if (!frame.usable(place) || !isKnown(one.value[i])) return;
      if (best < 0 || Math.abs(x(place) - x(at)) < Math.abs(x(one.x[best]) - x(at))) best = i;
    });
    if (best >= 0 && Math.abs(x(one.x[best]) - x(at)) < 24) found.push([one, best]);
  }
  found.sort(([a, i], [b, j]) => b.value[j] - a.value[i]);
  for (const [one, i] of found) {
    marks.append(element("circle", { class: "dot", r: 4.5, cx: x(one.x[i]), cy: y(one.value[i]), fill: strokeOf(one.order).color }));
    table.append(tipRow(one, i, spec));
  }
  svg.append(marks);
  tip.replaceChildren(element("div", { class: "soft" }, spec.xText(at)), table);
  tip.hidden = false;
  const room = svg.clientWidth - tip.offsetWidth;
  const left = x(at) + 14 > room ? x(at) - tip.offsetWidth - 14 : x(at) + 14;
  tip.style.left = `${Math.min(Math.max(left, 0), Math.max(room, 0))}px`;
  // On a phone above the chart, where it covers no curve.
  tip.style.top = `${svg.clientWidth < 480 ? box.top - tip.offsetHeight : box.top + 4}px`;
}

function tipRow(one, i, spec) {
  const row = element("tr");
  const name = element("td", { class: "name" });
  name.append(swatch(one.order), one.name);
  const has = isKnown(one.low[i]) && isKnown(one.high[i]);
  const [value, low, high] = spec.write([one.value[i], one.low[i], one.high[i]]);
  row.append(name, element("td", {}, value), element("td", { class: "soft" }, has ? `[${low}, ${high}]` : "no interval"),
    element("td", { class: "soft" }, one.runs ? `n=${one.runs[i]}` : ""));
  return row;
}

// Draws a row for each of [{name, order, value, low, high, text}]: a point on its interval.
function intervalChart(host, specification) {
  const draw = () => {
    const { rows, range, line, title } = specification();
    const width = Math.max(host.clientWidth, 200);
    host.drawnWidth = host.clientWidth;
    const height = rows.length * 46 + 26;
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title}: ${rows.map((row) => `${row.name} ${row.text}`).join("; ")}` });
    const found = rows.flatMap((row) => [row.value, row.low, row.high].filter(isKnown));
    const x = scale(range || roomy(found), 8, width - 8, false);
    for (const tick of linearTicks(x.low, x.high, Math.max(3, Math.floor(width / 70)))) {
      svg.append(element("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 4, y2: height - 20 }));
      svg.append(element("text", { x: x(tick), y: height - 5, "text-anchor": "middle" }, share(tick)));
    }
    if (line !== null) svg.append(element("line", { class: "reference", x1: x(line), x2: x(line), y1: 4, y2: height - 20 }));
    rows.forEach((row, i) => drawRow(svg, row, x, i * 46, width));
    host.replaceChildren(svg);
    svg.querySelectorAll(".row-name").forEach((name) => fit(name, width - 28 - name.nextSibling.getComputedTextLength()));
  };
  new ResizeObserver(() => {
    if (host.clientWidth !== host.drawnWidth) draw();
  }).observe(host);
  draw();
  return draw;
}

// Truncates a text that does not fit; pointing at it shows the whole text.
function fit(text, room) {
  const whole = text.textContent;
  for (let size = whole.length; size > 1 && text.getComputedTextLength() > room; size -= 1) {
    text.textContent = `${whole.slice(0, size - 1)}\u2026`;
  }
  if (text.textContent !== whole) text.append(element("title", {}, whole));
}

function drawRow(svg, row, x, top, width) {
  const { color } = strokeOf(row.order);
  svg.append(element("text", { class: "row-name", x: 8, y: top + 18 }, row.name));
  svg.append(element("text", { class: "row-value", x: width - 8, y: top + 18, "text-anchor": "end" }, row.text));
  if (isKnown(row.low)) {
    svg.append(element("line", { class: "whisker", stroke: color, x1: x(row.low), x2: x(row.high), y1: top + 32, y2: top + 32 }));
  }
  svg.append(element("rect", { class: "point", x: x(row.value) - 2, y: top + 23, width: 4, height: 18, rx: 1.5, fill: color }));
}
