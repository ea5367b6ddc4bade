"use strict";
// Draws what /data.json says of runs, and asks again as long as one of them trains.

const WIDTH = 340, HEIGHT = 150, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20, PAINTS = 8;
const SVG = "http://www.w3.org/2000/svg";
const LONG_AFTER_THE_END = 15;  // times as long as between two looks at a run that trains

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const paint = (number) => `paint-${number % PAINTS}`;

// ---------------------------------------------------------------- numbers as people read them

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value % 1 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${trimmed(value / 1e9)}G`;
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)}k`;
  return trimmed(value);
}

const trimmed = (value) => String(Number(value.toPrecision(4)));

function written(value, shown, forAxis = false) {
  if (value === null || value === undefined) return "–";
  if (shown === "percent") return `${trimmed(Number((100 * value).toFixed(forAxis ? 2 : 1)))} %`;
  if (shown === "bytes") return bytes(value);
  if (shown === "count") return forAxis ? short(value) : Math.round(value).toLocaleString("en");
  if (forAxis) return short(value);
  const size = Math.abs(value);
  return size && (size < 1e-2 || size >= 100) ? trimmed(value) : value.toFixed(4);
}

function duration(seconds) {
  for (const [unit, size, smaller, rest] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ${Math.floor((seconds % size) / rest)} ${smaller}`;
  }
  return `${Math.round(seconds)} s`;
}

// Numbers that are easy to read, from about the lowest to about the highest.
function ticks(low, high, count, base = 10) {
  const rough = (high - low) / count || 1;
  const power = base ** Math.floor(Math.log(rough) / Math.log(base) + 1e-9);
  const factors = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  const step = power * factors.find((factor) => power * factor >= rough * 0.999);
  const made = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) made.push(at * step);
  return made;
}

// ---------------------------------------------------------------- plots

function extent(values, fromZero) {
  let low = Math.min(...values), high = Math.max(...values);
  if (fromZero) low = Math.min(low, 0);
  if (low === high) { const room = Math.abs(low) * 0.05 || 1; high += room; if (!fromZero) low -= room; }
  const room = (high - low) * 0.06;
  return [fromZero ? low : low - room, high + room];
}

// Draws lines and numbers; those of steps only where there is a scale for them.
function axes(x, y, shown, below) {
  const base = shown === "bytes" ? 1024 : 10;
  const drawn = shape("g");
  for (const value of ticks(y.low, y.high, 4, base)) {
    drawn.append(
      shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y.of(value), y2: y.of(value) }),
      shape("text", { x: LEFT - 6, y: y.of(value) + 3.5, "text-anchor": "end" }, written(value, shown, true)),
    );
  }
  const whole = x === null ? [] : ticks(x.low, x.high, 4).filter((value) => Number.isInteger(value));
  for (const value of whole) {
    drawn.append(shape("text", { x: x.of(value), y: HEIGHT - 5, "text-anchor": "middle" }, short(value)));
  }
  drawn.append(shape("text", { x: LEFT - 6, y: HEIGHT - 5, "text-anchor": "end" }, below));
  drawn.append(shape("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  return drawn;
}

function scales(xs, ys) {
  const [left, right] = xs, [low, high] = ys;
  return [
    { low: left, high: right, of: (v) => LEFT + ((v - left) / (right - left || 1)) * (WIDTH - LEFT - RIGHT) },
    { low, high, of: (v) => HEIGHT - BOTTOM - ((v - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM) },
  ];
}

function curvePlot(panel, runs) {
  const drawn = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${panel.title} over steps` });
  const all = runs.flatMap((run) => [...run.curves[panel.key].train, ...run.curves[panel.key].eval]);
  const steps = [...runs.map((run) => run.step), ...all.map(([step]) => step)];
  const [x, y] = scales([0, Math.max(...steps, 1)], extent(all.map(([, value]) => value), panel.from_zero));
  drawn.append(axes(x, y, panel.shown, "step"));
  runs.forEach((run, number) => {
    const { train, eval: evaluations } = run.curves[panel.key];
    const at = ([step, value]) => `${x.of(step).toFixed(1)},${y.of(value).toFixed(1)}`;
    if (train.length > 1) drawn.append(shape("polyline", { class: `line ${paint(number)}`, points: train.map(at).join(" ") }));
    if (train.length === 1) drawn.append(dot(train[0], 2.4));
    if (!train.length && evaluations.length > 1) {
      drawn.append(shape("polyline", { class: `line ${paint(number)}`, points: evaluations.map(at).join(" ") }));
    }
    evaluations.forEach((point) => drawn.append(dot(point, 3)));
    function dot([step, value], r) {
      return shape("circle", { class: `dot ${paint(number)}`, cx: x.of(step).toFixed(1), cy: y.of(value).toFixed(1), r });
    }
  });
  explain(drawn, x, panel, runs);
  return drawn;
}

// Says what runs were at, where the mouse is.
function explain(drawn, x, panel, runs) {
  const cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const area = shape("rect", { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM, fill: "transparent" });
  area.addEventListener("pointermove", (event) => {
    const box = drawn.getBoundingClientRect();
    const step = x.low + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x.high - x.low);
    const lines = [];
    let where = null;
    for (const run of runs) {
      for (const kind of ["train", "eval"]) {
        const point = nearest(run.curves[panel.key][kind], step);
        if (!point) continue;
        if (where === null) where = point[0];
        const kinds = kind === "eval" ? ", held-out" : "";
        lines.push(`${run.name}${kinds}, step ${point[0]}: ${written(point[1], panel.shown)}`);
      }
    }
    if (where === null) return;
    cursor.setAttribute("x1", x.of(where)); cursor.setAttribute("x2", x.of(where));
    cursor.setAttribute("visibility", "visible");
    tell(lines.join("\n"), event);
  });
  area.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tip().hidden = true; });
  drawn.append(cursor, area);
}

function nearest(points, step) {
  let best = null;
  for (const point of points) if (!best || Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
  return best;
}

function tip() {
  return document.getElementById("tip") || document.body.appendChild(element("div", { id: "tip", hidden: "" }));
}

function tell(text, event) {
  const shown = tip();
  shown.textContent = text;
  shown.hidden = false;
  const left = Math.min(event.clientX + 14, window.innerWidth - shown.offsetWidth - 8);
  shown.style.left = `${Math.max(left, 8)}px`;
  shown.style.top = `${event.clientY + 16}px`;
}

// Ranks side by side, as a step line: two of them are two columns, thousands a landscape.
function rankPlot(runs, key, shown, label) {
  const loaded = runs.map((run, number) => [run, number]).filter(([run]) => run[key].length);
  const most = Math.max(...loaded.map(([run]) => run[key].length));
  const drawn = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const [x, y] = scales([0, most], extent(loaded.flatMap(([run]) => run[key]), true));
  drawn.append(axes(null, y, shown, "rank"));
  const apart = Math.max(Math.ceil(most / 8), 1);
  for (let rank = 0; rank < most; rank += apart) {
    drawn.append(shape("text", { x: x.of(rank + 0.5), y: HEIGHT - 5, "text-anchor": "middle" }, String(rank)));
  }
  for (const [run, number] of loaded) {
    const loads = run[key], gap = loads.length <= 64 && loaded.length === 1 ? 0.12 : 0;
    const mean = loads.reduce((sum, load) => sum + load, 0) / loads.length;
    const ground = y.of(0);
    if (gap) {
      loads.forEach((load, rank) => drawn.append(shape("rect", {
        class: `area ${paint(number)}`, x: x.of(rank + gap), y: y.of(load),
        width: x.of(1 - 2 * gap) - x.of(0), height: Math.max(ground - y.of(load), 0),
      }, shape("title", {}, `rank ${rank}: ${written(load, shown)}`))));
    } else {
      const corners = loads.flatMap((load, rank) => [`${x.of(rank)},${y.of(load)}`, `${x.of(rank + 1)},${y.of(load)}`]);
      drawn.append(shape("polygon", {
        class: `area ${paint(number)}`, points: [`${x.of(0)},${ground}`, ...corners, `${x.of(loads.length)},${ground}`].join(" "),
      }));
    }
    if (loaded.length === 1) drawn.append(shape("line", { class: "mean", x1: LEFT, x2: WIDTH - RIGHT, y1: y.of(mean), y2: y.of(mean) }));
  }
  return drawn;
}

function barChart(runs, key, write) {
  // In the order of the run that has the most of them.
  const lists = runs.map((run) => Object.keys(run[key])).sort((one, other) => other.length - one.length);
  const names = [...new Set(lists.flat())];
  const most = Math.max(...runs.flatMap((run) => Object.values(run[key])), 0) || 1;
  const drawn = element("div", { class: "bars" });
  for (const name of names) {
    let label = name.replaceAll("_", " ");
    runs.forEach((run, number) => {
      if (!(name in run[key])) return;
      const fill = element("div", { class: `fill ${paint(number)}` });
      fill.style.width = `${(100 * run[key][name]) / most}%`;
      drawn.append(
        element("span", { class: "name" }, label),
        element("div", { class: "track" }, fill),
        element("span", { class: "value" }, write(run[key][name], run, name)),
      );
      label = "";
    });
  }
  return drawn;
}

// ---------------------------------------------------------------- the page

function card(id, title, unit, ...content) {
  return element("article", { id }, element("h2", {}, title, element("small", {}, unit)), ...content);
}

function runCard(run, number) {
  const facts = [run.steps ? `step ${run.step} of ${run.steps}` : `step ${run.step}`];
  if (run.remaining_seconds !== null) facts.push(`${duration(run.remaining_seconds)} left`);
  if (run.ranks) facts.push(`${run.ranks} ranks`);
  if (run.sharding) facts.push(run.sharding);
  if (run.batch_size) facts.push(`batch ${run.batch_size}`);
  facts.push(`skipped steps ${run.skipped_steps}`);
  const made = element("article", { class: `run ${paint(number)}`, "data-run": run.name, title: run.path },
    element("span", { class: "swatch" }),
    element("h2", {}, run.name),
    element("span", { class: `state ${run.state}` }, run.state),
  );
  if (run.steps) made.append(element("progress", { max: run.steps, value: run.step, "aria-label": "steps done" }));
  made.append(element("p", { class: "facts" }, facts.join(" · ")));
  if (!run.step) made.append(element("p", { class: "facts" }, "no records yet: the first comes after logging.log_every steps"));
  if (run.failed_saves) made.append(element("p", { class: "warning" }, `${run.failed_saves} checkpoints could not be saved`));
  if (run.damaged_lines) made.append(element("p", { class: "warning" }, `${run.damaged_lines} lines of metrics.jsonl are damaged`));
  return made;
}

function latest(panel, runs) {
  const made = element("div", { class: "latest" });
  runs.forEach((run, number) => {
    const values = run.latest[panel.key];
    if (!values) return;
    const one = element("span", { class: paint(number) });
    if ("train" in values) one.append(written(values.train, panel.shown));
    if ("eval" in values) {
      const text = written(values.eval, panel.shown);
      one.append("train" in values ? element("small", {}, `${text} held-out`) : text);
    }
    made.append(one);
  });
  return made;
}

function draw(data) {
  const runs = data.runs;
  document.title = `${runs.map((run) => run.name).join(", ")} · fusedrec watch`;
  document.getElementById("runs").replaceChildren(...runs.map(runCard));
  const panels = data.panels.map(
    (panel) => card(`panel-${panel.key}`, panel.title, panel.unit, latest(panel, runs), curvePlot(panel, runs)),
  );
  const bars = [];
  const mean = runs.length === 1 ? "; dashes: mean" : "";
  if (runs.some((run) => Object.keys(run.bytes_by_collective).length)) {
    const write = (value, run, name) => `${bytes(value)} in ${run.collectives_per_step[name]}`;
    bars.push(card("bytes", "Bytes by collective", "of a step, first rank; in how many",
      barChart(runs, "bytes_by_collective", write)));
  }
  if (runs.some((run) => run.rows_by_rank.length)) {
    bars.push(card("load", "Load of ranks", `rows looked up in a step${mean}`,
      rankPlot(runs, "rows_by_rank", "count", "Rows looked up by each rank")));
  }
  if (runs.some((run) => run.bytes_by_rank.length)) {
    bars.push(card("sent", "Sent by ranks", `bytes in a step${mean}`,
      rankPlot(runs, "bytes_by_rank", "bytes", "Bytes sent by each rank")));
  }
  if (runs.some((run) => Object.keys(run.stage_ms).length)) {
    const write = (value, run) => {
      const whole = Object.values(run.stage_ms).reduce((sum, ms) => sum + ms, 0);
      return `${value.toFixed(2)} ms  ${Math.round((100 * value) / whole)} %`;
    };
    bars.push(card("stages", "Stages of a step", "milliseconds, mean of ranks", barChart(runs, "stage_ms", write)));
  }
  document.getElementById("panels").replaceChildren(...panels, ...bars);
  const missing = data.panels.length && data.missing.length ? `Not recorded: ${data.missing.join(", ")}.` : "";
  document.getElementById("missing").textContent = missing;
}

async function refresh() {
  const status = document.getElementById("status");
  let again = 5;
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    const data = await answer.json();
    draw(data);
    const training = data.runs.some((run) => run.state === "running" || run.state === "waiting");
    again = data.every * (training ? 1 : LONG_AFTER_THE_END);
    status.className = "";
    status.textContent = training ? `live, every ${data.every} s` : "all runs have ended";
    document.body.dataset.drawn = "yes";
  } catch (error) {
    status.className = "lost";
    status.textContent = error instanceof TypeError ? "fusedrec watch does not answer any more" : String(error);
    document.body.dataset.error = String(error);
  }
  setTimeout(refresh, 1000 * again);
}

refresh();
