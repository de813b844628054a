// Curves of each task, and the controls that they share.

const COLUMNS = { frames: "frames", agent_frames: "agent frames", seconds: "seconds of training" };

// State of the controls: axes for all tasks, hidden algorithms by name, hidden runs by task.
const shown = { column: "frames", log: false, measured: null, single: false, off: new Set(), runsOff: new Set() };
const redraws = [];

function redrawAll() {
  for (const draw of redraws) draw();
}

// Curve of an algorithm: of the selected kind, or of the other kind if that is missing.
function lineOfTeam(team) {
  const wanted = shown.measured || team.measured;
  return team[wanted] ? { ...team[wanted], kind: wanted } : null;
}

function runKey(task, team, run) {
  return `${task.name}\n${team.algorithm}\n${run}`;
}

function seriesOf(task) {
  const series = [];
  for (const team of task.teams) {
    const line = lineOfTeam(team);
    if (!line || shown.off.has(team.algorithm)) continue;
    const kept = line.each[0].map((_, run) => run).filter((run) => !shown.runsOff.has(runKey(task, team, line.of[run])));
    if (!kept.length) continue;
    const all = kept.length === line.each[0].length;
    const estimated = all ? line : estimateLine(line.each, kept);
    const thin = shown.single ? kept.map((run) => line.each.map((row) => row[run])) : [];
    series.push({ ...estimated, name: team.algorithm, order: team.order, x: line[shown.column], thin });
  }
  return series;
}

function specificationOf(task) {
  const references = [];
  if (isKnown(task.random)) references.push({ value: task.random, name: "random policy" });
  if (isKnown(task.best)) references.push({ value: task.best, name: "best known" });
  return {
    title: `${task.name}: return over ${COLUMNS[shown.column]}`,
    series: seriesOf(task), references, log: shown.log, xName: COLUMNS[shown.column], range: null,
    empty: `no ${shown.measured || ""} returns over ${COLUMNS[shown.column]} are switched on`.replace("  ", " "),
    xTick: short, yTick: short, write: aligned,
    xText: (x) => `${figure(Math.round(x * 100) / 100)} ${COLUMNS[shown.column]}`,
  };
}

function startTasks(data) {
  document.querySelectorAll("[data-task]").forEach((card) => {
    const task = data.tasks[Number(card.dataset.task)];
    redraws.push(lineChart(card.querySelector(".chart"), () => specificationOf(task)));
    card.querySelectorAll("input[data-run]").forEach((box) => {
      const team = task.teams[Number(box.dataset.team)];
      box.addEventListener("change", () => {
        const key = runKey(task, team, Number(box.dataset.run));
        if (box.checked) shown.runsOff.delete(key);
        else shown.runsOff.add(key);
        redrawAll();
      });
    });
  });
  makeAlgorithmSwitches(data);
  makeControls(data);
}

function makeControls(data) {
  const host = document.getElementById("controls");
  const has = (kind) => data.tasks.some((task) => task.teams.some((team) => team[kind]));
  const known = (column) => data.tasks.some((task) => task.teams.some((team) =>
    ["evaluation", "training"].some((kind) => team[kind] && team[kind][column].some(isKnown))));
  const columns = Object.entries(COLUMNS).filter(([column]) => known(column));
  host.append(choice("x axis", columns, () => shown.column, (value) => { shown.column = value; }));
  host.append(choice("scale", [[false, "linear"], [true, "log"]], () => shown.log, (value) => { shown.log = value; }));
  if (has("evaluation") && has("training")) {
    const kinds = [[null, "automatic"], ["evaluation", "evaluations"], ["training", "training"]];
    host.append(choice("measured by", kinds, () => shown.measured, (value) => { shown.measured = value; }));
  }
  host.append(choice("runs", [[false, "together"], [true, "each"]], () => shown.single, (value) => { shown.single = value; }));
  host.hidden = false;
}

// Group of buttons, one of which is pressed.
function choice(name, options, read, write) {
  const group = element("div", { class: "choice", role: "group", "aria-label": name });
  group.append(element("span", {}, name));
  const buttons = options.map(([value, text]) => {
    const button = element("button", { type: "button", "aria-pressed": String(value === read()) }, text);
    button.addEventListener("click", () => {
      write(value);
      buttons.forEach((other, i) => other.setAttribute("aria-pressed", String(options[i][0] === read())));
      redrawAll();
    });
    return button;
  });
  group.append(...buttons);
  return group;
}

function makeAlgorithmSwitches(data) {
  const host = document.getElementById("algorithms");
  data.algorithms.forEach((name, order) => {
    const button = element("button", { type: "button", class: "algorithm", "aria-pressed": "true" });
    button.append(swatch(order), name);
    button.addEventListener("click", () => {
      if (!shown.off.delete(name)) shown.off.add(name);
      button.setAttribute("aria-pressed", String(!shown.off.has(name)));
      redrawAll();
    });
    host.append(button);
  });
  host.hidden = false;
}
