// Look and behaviour of every chart: numbers, colours, axes, zoom, pan. charts.js defines their contents. The <html>
// element gets data-drawn (number of charts drawn), data-overflow (the page is wider than its window) and
// data-errors, which tests read.

const root = document.documentElement;
const fail = (what) => { root.dataset.errors = [root.dataset.errors, what].filter(Boolean).join("; "); };
addEventListener("error", (event) => fail(event.message));

// ---- numbers, by the rules of number.rs ---------------------------------------------------------------------------

function digits(value) {
  // Halves round up, although 12.35 is slightly less in binary.
  value *= 1 + 1e-12;
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

function duration(ns) {
  if (!(ns > 0)) return "0";
  for (const unit of ["ns", "us", "ms"]) {
    if (ns < 999.5) return (unit === "ns" ? Math.round(ns) : digits(ns)) + unit;
    ns /= 1000;
  }
  if (ns < 119.5) return digits(ns) + "s";
  const seconds = Math.round(ns);
  return Math.floor(seconds / 60) + "m" + String(seconds % 60).padStart(2, "0") + "s";
}

// Labels of axes: 10us, 1.5s and 2m, not 10.0us, 1.50s and 2m00s; a power of ten stays one.
function tick(ns) {
  const seconds = Math.round(ns / 1e9);
  if (seconds >= 120 && /^10+$/.test(seconds)) return seconds + "s";
  if (seconds >= 3600 && seconds % 3600 === 0) return seconds / 3600 + "h";
  return duration(ns).replace(/\.\d+/, (digits) => (digits > 0 ? digits.replace(/0+$/, "") : "")).replace("m00s", "m");
}
const count = (value) => Math.round(value).toLocaleString("en-US");
const percent = (share) => +(share * 100).toPrecision(3) + "%";
const or = (format) => (u, value) => (value == null || Number.isNaN(value) ? "–" : format(value));

// ---- look ---------------------------------------------------------------------------------------------------------

const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const SERIES = 8;

// The second four colours repeat the hues of the first four with dashes, so that colour is never the only difference.
const line = (label, index, more) => ({
  label,
  stroke: css("--series-" + (index % SERIES)),
  width: 2,
  dash: index % SERIES >= 4 ? [7, 3] : undefined,
  points: { show: false },
  ...more,
});

// A limit line: thin and dotted.
const limit = (label, format) => ({
  label,
  stroke: css("--text"),
  width: 1,
  dash: [3, 4],
  points: { show: false },
  value: or(format),
});

// Distances of ticks: uPlot would take 2.5 too, with labels such as 12.5.
const ROUND = [];
for (let power = -9; power < 16; power++) for (const digit of [1, 2, 5]) ROUND.push(Number(`${digit}e${power}`));
const WHOLE = { incrs: ROUND.filter((distance) => distance >= 1) };
// From 20 s on, parts of minutes and hours.
const SECONDS = [...ROUND.filter((distance) => distance < 15), ...[1 / 3, 0.5, 1, 2, 5, 10, 20, 30].map((minutes) => minutes * 60),
  ...ROUND.filter((distance) => distance >= 1).map((hours) => hours * 3600)];
const IN_SECONDS = { incrs: SECONDS }, IN_NANOSECONDS = { incrs: SECONDS.map((distance) => Math.round(distance * 1e9)).filter(Boolean) };

const axis = (label, values, more) => ({
  label,
  incrs: ROUND,
  space: 70,
  size: 34,
  labelSize: 20,
  labelGap: 0,
  labelFont: "12px system-ui, sans-serif",
  font: "12px system-ui, sans-serif",
  stroke: css("--dim"),
  grid: { stroke: css("--grid"), width: 1 },
  ticks: { stroke: css("--grid"), width: 1, size: 5 },
  values: (u, splits) => splits.map((value) => (value == null ? "" : values(value))),
  ...more,
});

// Ticks: 1 2 5 in every decade, 1 alone for many decades, even steps for less than one. uPlot would start at the low
// end of the scale, with labels such as 10.2us and 102us.
function logSplits(u, index, low, high) {
  const decades = Math.log10(high / low);
  const splits = [];
  if (decades < 0.7) {
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    for (let value = Math.ceil(low / step) * step; value <= high; value += step) splits.push(value);
    return splits;
  }
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    for (const factor of decades > 2.5 ? [1] : [1, 2, 5]) {
      const value = power * factor;
      if (value >= low * 0.9999 && value <= high * 1.0001) splits.push(value);
    }
  }
  return splits;
}
const log = { splits: logSplits, filter: (u, splits) => splits };

// Whole decades around the values, for axes that several lines share.
function decades(low, high) {
  const range = [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))];
  return range[0] < range[1] ? range : [range[0], range[0] * 10];
}

const upright = (label, values, more) => axis(label, values, { size: 58, space: 30, ...more });

// A scale that starts at `full`, keeps the user's zoom, and never exceeds `full`.
const horizontal = (full, log) => ({
  time: false,
  distr: log ? 3 : 1,
  range: (u, min, max) => (u.status ? [Math.max(min, full[0]), Math.min(max, full[1])] : full),
});
const vertical = (full, log) => ({ distr: log ? 3 : 1, auto: false, range: () => full });

// ---- zoom and pan -------------------------------------------------------------------------------------------------

const LEAST_ZOOM = 1e-4;

// Zooms every scale to the rectangle between two corners, given in pixels of the plot.
function show(u, full, left, top, right, bottom) {
  u.batch(() => {
    for (const [key, [low, high]] of Object.entries(full)) {
      const [from, to] = key === "x" ? [left, right] : [bottom, top];
      const log = u.scales[key].distr === 3;
      const forth = log ? Math.log : Number, back = log ? Math.exp : Number;
      let min = forth(u.posToVal(from, key)), max = forth(u.posToVal(to, key));
      const bounds = [forth(low), forth(high)], all = bounds[1] - bounds[0];
      const span = Math.min(Math.max(max - min, all * LEAST_ZOOM), all);
      min = Math.min(Math.max(min, bounds[0]), bounds[1] - span);
      u.setScale(key, { min: Math.max(back(min), low), max: Math.min(back(min + span), high) });
    }
  });
}

function zoom(u, full, x, y, factor) {
  const { clientWidth: width, clientHeight: height } = u.over;
  show(u, full, x - x * factor, y - y * factor, x + (width - x) * factor, y + (height - y) * factor);
}

function pan(u, full, dx, dy) {
  show(u, full, -dx, -dy, u.over.clientWidth - dx, u.over.clientHeight - dy);
}

function reset(u, full) {
  u.batch(() => {
    for (const [key, [min, max]] of Object.entries(full)) u.setScale(key, { min, max });
  });
}

function listen(u, full) {
  const over = u.over;
  const at = ({ clientX, clientY }) => {
    const box = over.getBoundingClientRect();
    return [clientX - box.left, clientY - box.top];
  };
  over.addEventListener("mousedown", (down) => {
    if (!pans(down)) return;
    down.preventDefault();
    let last = at(down);
    const move = (event) => {
      const now = at(event);
      pan(u, full, now[0] - last[0], now[1] - last[1]);
      last = now;
    };
    const up = () => {
      removeEventListener("mousemove", move);
      removeEventListener("mouseup", up);
    };
    addEventListener("mousemove", move);
    addEventListener("mouseup", up);
  });
  over.addEventListener("wheel", (event) => {
    // The wheel without ctrl scrolls the page.
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    zoom(u, full, ...at(event), Math.exp((event.deltaY || event.deltaX) * 0.002));
  }, { passive: false });
  let pinch = null;
  const fingers = ({ touches: [a, b] }) => {
    const [[ax, ay], [bx, by]] = [at(a), at(b)];
    return { x: (ax + bx) / 2, y: (ay + by) / 2, apart: Math.max(10, Math.hypot(ax - bx, ay - by)) };
  };
  over.addEventListener("touchstart", (event) => { pinch = event.touches.length === 2 ? fingers(event) : null; });
  over.addEventListener("touchmove", (event) => {
    if (!pinch || event.touches.length !== 2) return;
    event.preventDefault();
    const now = fingers(event);
    pan(u, full, now.x - pinch.x, now.y - pinch.y);
    zoom(u, full, now.x, now.y, pinch.apart / now.apart);
    pinch = now;
  }, { passive: false });
}

// Moves the cursor to the next point, zooms and pans by keys. The chosen point is read aloud.
function obey(figure, u, full) {
  const chart = u.root.querySelector(".u-wrap"), said = figure.querySelector(".spoken") ?? document.createElement("p");
  said.className = "spoken";
  said.setAttribute("role", "status");
  figure.append(said);
  chart.addEventListener("keydown", (event) => {
    const { clientWidth: width, clientHeight: height } = u.over, [xs] = u.data, step = width / 8;
    const go = (from, by) => {
      let index = from;
      while (index >= 0 && index < xs.length && !(xs[index] >= u.scales.x.min && xs[index] <= u.scales.x.max)) index += by;
      if (index < 0 || index >= xs.length) return;
      u.setCursor({ left: u.valToPos(xs[index], "x"), top: height / 2 });
      said.textContent = [...u.root.querySelectorAll(".u-series")].map(({ children: [name, value] }) => `${name.textContent}: ${value.textContent}`).join(", ");
    };
    const at = u.cursor.idx;
    const keys = {
      ArrowRight: () => (event.shiftKey ? pan(u, full, -step, 0) : go(at == null ? 0 : at + 1, 1)),
      ArrowLeft: () => (event.shiftKey ? pan(u, full, step, 0) : go(at == null ? xs.length - 1 : at - 1, -1)),
      Home: () => go(0, 1),
      End: () => go(xs.length - 1, -1),
      "+": () => zoom(u, full, width / 2, height / 2, 0.7),
      "-": () => zoom(u, full, width / 2, height / 2, 1 / 0.7),
      0: () => reset(u, full),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

// Names the chart, and makes the names of its legend buttons.
function describe(figure, u, { title, axes: [{ label: across }, { label: up }] }) {
  const chart = u.root.querySelector(".u-wrap"), legend = u.root.querySelector(".u-legend");
  const caption = figure.querySelector("figcaption");
  caption.id ||= "caption-" + document.querySelectorAll("figcaption[id]").length;
  chart.tabIndex = 0;
  for (const [key, value] of Object.entries({
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": title ?? (across ? `${up} against ${across}` : up),
    "aria-describedby": caption.id,
  })) chart.setAttribute(key, value);
  legend.setAttribute("role", "presentation");
  legend.querySelectorAll(".u-series th").forEach((one, index) => {
    if (index === 0) return;
    one.tabIndex = 0;
    one.setAttribute("role", "button");
    one.onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      one.click();
    };
  });
  press(u);
}

function press(u) {
  u.root.querySelectorAll(".u-series th").forEach((one, index) => {
    if (index > 0) one.setAttribute("aria-pressed", u.series[index].show);
  });
}

const pans = (event) => event.shiftKey || event.button === 1;

// ---- marks --------------------------------------------------------------------------------------------------------

// A cursor that highlights the line nearest to it.
const lines = { focus: { prox: 30 } };

// Marks an interval of the horizontal axis with dashed ends; its name is inside, or before it if there is no space.
function band(u, [from, to], color, name, before = false) {
  const { ctx, bbox: { left, top, width, height } } = u;
  const [start, end] = [u.valToPos(from, "x", true), u.valToPos(to, "x", true)];
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.fillStyle = ctx.strokeStyle = color;
  ctx.globalAlpha = 0.12;
  ctx.fillRect(start, top, end - start, height);
  ctx.globalAlpha = 1;
  ctx.lineWidth = devicePixelRatio || 1;
  ctx.setLineDash([4, 4]);
  ctx.beginPath();
  for (const at of [start, end]) {
    ctx.moveTo(at, top);
    ctx.lineTo(at, top + height);
  }
  ctx.stroke();
  if (name) {
    const dpr = devicePixelRatio || 1;
    ctx.font = `${12 * dpr}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    const room = ctx.measureText(name).width + 6 * dpr;
    const turned = before ? start - room > left : start + room > left + width;
    ctx.textAlign = turned ? "right" : "left";
    // A label that would be on the wrong side moves below the existing one.
    ctx.fillText(name, start + (turned ? -4 : 4) * dpr, top + (turned === before ? 3 : 19) * dpr);
  }
  ctx.restore();
}

// ---- one chart ----------------------------------------------------------------------------------------------------

// The width of a page of A4 or Letter with its margins, in pixels.
const PAPER = 680;
const room = (figure) => ("print" in root.dataset ? PAPER : figure.querySelector(".plot").clientWidth);
const height = (width) => Math.round(Math.min(Math.max(width * 0.5, 300), 460));
const plots = new Map();

// Colours are painted into the canvases, so other colours require other charts.
let isRepainting = false;
const namesOf = ({ title, series }) => [title, ...series.map(({ label }) => label)].join("\n");

// Draws a chart, or gives new data to the drawn one if the lines are the same: it keeps its cursor, its focus and the lines that are off.
// A zoom stays in both cases.
function plot(figure, full, data, options) {
  const width = room(figure);
  if (!Object.values(full).flat().every(Number.isFinite)) throw new RangeError("a scale without ends");
  const before = plots.get(figure), names = namesOf(options);
  if (before?.names === names && !isRepainting) return update(before, full, data);
  const view = before ? viewOf(before) : [];
  before?.destroy();
  const drawn = () => {
    figure.dataset.shown = "";
    root.dataset.drawn = document.querySelectorAll("figure[data-shown]").length;
  };
  const { hooks, cursor, ...others } = options;
  const u = new uPlot({
    width,
    height: height(width),
    padding: [12, 22, 0, 0],
    legend: { live: true, markers: { dash: (u, index) => (u.series[index].dash ? "dashed" : "solid") } },
    focus: { alpha: 0.3 },
    ...others,
    cursor: {
      drag: { x: true, y: true, uni: 24, dist: 6 },
      bind: {
        mousedown: (u, target, handler) => (event) => { if (!pans(event)) handler(event); },
        dblclick: (u) => () => reset(u, full),
      },
      ...cursor,
    },
    hooks: {
      ...hooks,
      draw: [drawn],
      setCursor: [(u) => figure.toggleAttribute("data-read", u.cursor.left >= 0)],
      setScale: [(u) => figure.toggleAttribute("data-zoomed", viewOf(u).length > 0)],
      setSeries: [press],
    },
  }, data, figure.querySelector(".plot"));
  Object.assign(u, { full, names });
  listen(u, full);
  describe(figure, u, options);
  obey(figure, u, full);
  tools(figure, () => reset(u, full));
  u.batch(() => view.forEach(([key, ends]) => u.setScale(key, ends)));
  return u;
}

// The scales that do not show all.
const viewOf = ({ full, scales }) => Object.entries(full ?? {})
  .map(([key, [low, high]]) => [key, { min: scales[key].min, max: scales[key].max }, low, high])
  .filter(([, { min, max }, low, high]) => min !== low || max !== high);

function update(u, full, data) {
  const zoomed = viewOf(u).map(([key]) => key);
  u.batch(() => {
    u.setData(data, false);
    for (const [key, ends] of Object.entries(full)) {
      // The scales of the chart hold these arrays.
      u.full[key].splice(0, 2, ...ends);
      const { min, max } = u.scales[key];
      u.setScale(key, zoomed.includes(key) ? { min, max } : { min: ends[0], max: ends[1] });
    }
  });
  return u;
}

function tools(figure, action) {
  let bar = figure.querySelector(".tools");
  if (!bar) {
    bar = document.createElement("div");
    bar.className = "tools";
    bar.append(document.createElement("button"), document.createElement("span"));
    bar.lastChild.textContent = matchMedia("(pointer: coarse)").matches
      ? "Pinch to zoom and pan, tap to read a value."
      : "Drag to zoom, shift-drag to pan, ctrl-wheel to zoom, double-click to reset. Keys: arrows to read values, + and - to zoom, 0 to reset.";
    bar.firstChild.textContent = "Reset view";
    figure.querySelector(".plot").after(bar);
  }
  bar.firstChild.onclick = action;
}
