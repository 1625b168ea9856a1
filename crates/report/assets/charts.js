// The charts of a page, from the embedded JSON records. In the same function plot.js, load.js, accept.js,
// planes.js and doctor.js precede this file.

// ---- data ---------------------------------------------------------------------------------------------------------

const EVEN = 0, ODD = 1, FAILED = 2;

const records = {};
const recordOf = ({ dataset: { record } }) =>
  (records[record] ??= JSON.parse(document.getElementById("data-" + record).textContent));

function resultsOf(figure) {
  const { results } = recordOf(figure), { part } = figure.dataset;
  return part ? results[part] : results;
}

// The words of a scatter (see fourtuple-record): bit 0 odd, bits 1-30 the time in units of 2 ns, bit 31 failed.
function decode(base64) {
  const bytes = atob(base64);
  const n = bytes.length >> 2;
  const dots = { n, x: new Float64Array(n), ns: new Float64Array(n), log: new Float32Array(n), kind: new Uint8Array(n) };
  for (let i = 0, at = 0; i < n; i++) {
    let word = 0;
    for (let shift = 0; shift < 32; shift += 8) word |= bytes.charCodeAt(at++) << shift;
    dots.x[i] = i + 1;
    dots.ns[i] = Math.max(1, word & 0x7ffffffe);
    dots.log[i] = Math.log10(dots.ns[i]);
    dots.kind[i] = word < 0 ? FAILED : word & 1;
  }
  dots.mean = movingMean(dots);
  return dots;
}

// Returns the samples of a trace in ascending order of the position `of`; samples without a position are omitted.
function sampled(samples, of) {
  const shown = samples.filter((sample) => of(sample) != null).sort((a, b) => of(a) - of(b));
  const ns = Float64Array.from(shown, (sample) => Math.max(1, sample.search_ns));
  return {
    n: shown.length,
    scattered: true,
    x: Float64Array.from(shown, of),
    ns,
    log: Float32Array.from(ns, Math.log10),
    kind: Uint8Array.from(shown, ({ source_port: port }) => (port == null ? FAILED : port & 1)),
    ports: shown.map((sample) => sample.source_port),
  };
}

// Moving mean over 1/128 of the successful dials, a regression line without a model.
function movingMean({ n, ns, kind }) {
  const mean = new Float64Array(n);
  const ring = new Float64Array(Math.max(16, n >> 7));
  let sum = 0, filled = 0;
  for (let i = 0; i < n; i++) {
    if (kind[i] !== FAILED) {
      const slot = filled++ % ring.length;
      sum += ns[i] - ring[slot];
      ring[slot] = ns[i];
    }
    mean[i] = filled ? sum / Math.min(filled, ring.length) : NaN;
  }
  return mean;
}

function dotsOf(strategy) {
  if (!strategy.dots) {
    strategy.dots = decode(strategy.scatter);
    delete strategy.scatter;
  }
  return strategy.dots;
}

const drawnRuns = (results) => results.strategies.filter((strategy) => strategy.scatter || strategy.dots);

function byName(strategies) {
  const groups = new Map();
  for (const strategy of strategies) {
    if (!groups.has(strategy.strategy)) groups.set(strategy.strategy, []);
    groups.get(strategy.strategy).push(strategy);
  }
  return [...groups];
}

// The smallest count of each shade, on a log scale.
function heatKey(figure, shades, most) {
  figure.querySelector(".heat-key")?.remove();
  const key = document.createElement("p");
  key.className = "heat-key";
  // For small counts several shades start at the same count: the darkest of them is drawn.
  const begins = shades.map((_, step) => Math.ceil(most ** (step / shades.length) - 1e-9));
  shades.forEach((color, step) => {
    if (begins[step] === begins[step + 1]) return;
    const box = document.createElement("i"), words = document.createElement("span");
    box.style.background = color;
    const last = step === shades.length - 1 ? most : begins[step + 1] - 1;
    words.textContent = begins[step] === last ? count(last) : `${count(begins[step])}–${count(last)}`;
    words.prepend(box);
    key.append(words);
  });
  key.append("searches in a cell");
  figure.querySelector(".plot").after(key);
}

// ---- the charts, by the name in data-chart ------------------------------------------------------------------------

const kinds = {
  scatter(figure) {
    const runs = drawnRuns(resultsOf(figure));
    const repeated = runs.some((run) => run.repeat > 1);
    let low = Infinity, high = 1, longest = 1;
    for (const run of runs) {
      const { n, ns } = dotsOf(run);
      longest = Math.max(longest, n);
      for (let i = 0; i < n; i++) {
        low = Math.min(low, ns[i]);
        high = Math.max(high, ns[i]);
      }
    }
    const full = { x: [0, longest + 1], y: decades(Math.min(low, high), high) };
    let dots = dotsOf(runs[figure.chosen ??= 0]);
    const data = () => [dots.x, dots.ns, dots.ns, dots.ns, dots.mean];
    const mark = (label, name) => ({
      label,
      stroke: css(name),
      fill: css(name),
      paths: (u, series) => paint(u, dots, series - 1, css(name)),
      points: { show: false },
      value: (u, value, series, index) => (index == null ? "–" : `${duration(value)} (no. ${count(index + 1)})`),
    });
    const u = plot(figure, full, data(), {
      scales: { x: horizontal(full.x), y: vertical(full.y, true) },
      series: [
        { label: "dial", value: or(count) },
        mark("even port", "--even"),
        mark("odd port", "--odd"),
        mark("failed", "--failed"),
        { label: "moving mean", stroke: css("--text"), width: 2, points: { show: false }, value: or(duration) },
      ],
      axes: [axis("dial", count, WHOLE), upright("time in connect()", tick, log)],
      cursor: { dataIdx: (u, series, index) => (series >= 1 && series <= 3 ? nearest(u, dots, series - 1, index) : index) },
    });
    tabs(figure, runs.map((run) => run.strategy + (repeated ? ` (run ${run.repeat})` : "")), (chosen) => {
      dots = dotsOf(runs[chosen]);
      u.setData(data(), false);
      u.redraw();
      const { even, odd } = runs[chosen].connect_ns;
      const failed = Object.values(runs[chosen].errors).reduce((sum, errors) => sum + errors, 0);
      const mean = (spread) => (spread ? duration(spread.mean) : "–");
      return `${count(runs[chosen].connections)} connections, mean ${mean(even)} on even ports and ` +
        `${mean(odd)} on odd ones, ${failed ? count(failed) : "none"} failed`;
    });
    return u;
  },

  "trace-scatter"(figure) {
    const { samples } = resultsOf(figure);
    const views = [
      { name: "by source port", label: "source port", of: (sample) => sample.source_port, value: (port) => String(Math.round(port)) },
      { name: "over time", label: "time", of: (sample) => Math.max(1, sample.at_ns), value: tick },
    ].map((view) => ({ ...view, dots: sampled(samples, view.of) })).filter(({ dots }) => dots.n);
    figure.chosen ??= 0;
    let { dots, ...view } = views[figure.chosen] ?? views[0];
    const ends = ({ x, n }) => [x[0] - Math.max(1, (x[n - 1] - x[0]) / 100), x[n - 1] + Math.max(1, (x[n - 1] - x[0]) / 100)];
    const times = samples.map((sample) => Math.max(1, sample.search_ns));
    const least = times.reduce((a, b) => Math.min(a, b)), most = times.reduce((a, b) => Math.max(a, b));
    const full = { x: ends(dots), y: decades(least, most) };
    const mark = (label, name) => ({
      label,
      stroke: css(name),
      fill: css(name),
      paths: (u, series) => paint(u, dots, series - 1, css(name)),
      points: { show: false },
      value: (u, value, series, index) =>
        (index == null || index >= dots.n ? "–" : `${duration(dots.ns[index])} (port ${dots.ports[index] || "none"})`),
    });
    const data = () => [dots.x, dots.ns, dots.ns, dots.ns];
    const u = plot(figure, full, data(), {
      scales: { x: { time: false, range: (u, min, max) => (u.status ? [Math.max(min, full.x[0]), Math.min(max, full.x[1])] : full.x) }, y: vertical(full.y, true) },
      series: [
        { label: "sample", value: (u, value) => (value == null ? "–" : view.value(value)) },
        mark("even port", "--even"),
        mark("odd port", "--odd"),
        mark("found none", "--failed"),
      ],
      axes: [axis("", (value) => view.value(value), { incrs: () => (view.label === "time" ? IN_NANOSECONDS : WHOLE).incrs }), upright("time of the search", tick, log)],
      cursor: { dataIdx: (u, series, index) => (series >= 1 ? nearest(u, dots, series - 1, index) : index) },
    });
    tabs(figure, views.map(({ name }) => name), (chosen) => {
      ({ dots, ...view } = views[chosen]);
      [full.x[0], full.x[1]] = ends(dots);
      u.setData(data(), false);
      u.setScale("x", { min: full.x[0], max: full.x[1] });
      return `${count(dots.n)} searches, ${view.label} from left to right`;
    }, "View");
    return u;
  },

  "trace-heat"(figure) {
    const { heat: { column_ns: column, from_ns: from, columns } } = resultsOf(figure);
    // The upper end of the last row: there are four rows per factor of ten.
    const top = from.at(-1) * 10 ** 0.25;
    const full = { x: [0, column * columns.length], y: [from[0], top] };
    const most = columns.flat().reduce((a, b) => Math.max(a, b), 1);
    const heat = (number) => (most > 1 ? Math.log(number) / Math.log(most) : 1);
    const shades = ["--heat-0", "--heat-1", "--heat-2", "--heat-3", "--heat-4"].map(css);
    const shade = (number) => shades[Math.min(4, Math.floor(heat(number) * 5))];
    const row = (ns) => from.findLastIndex((least) => least <= ns);
    const paintCells = (u) => {
      const { ctx, bbox: { left, top: above, width, height } } = u;
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, above, width, height);
      ctx.clip();
      columns.forEach((numbers, at) => {
        const [x0, x1] = [at, at + 1].map((edge) => Math.round(u.valToPos(edge * column, "x", true)));
        numbers.forEach((number, row) => {
          if (!number) return;
          const [y0, y1] = [from[row + 1] ?? top, from[row]].map((edge) => Math.round(u.valToPos(edge, "y", true)));
          ctx.fillStyle = shade(number);
          ctx.fillRect(x0, y0, Math.max(1, x1 - x0), Math.max(1, y1 - y0));
        });
      });
      ctx.restore();
    };
    // The cell below the pointer, for the legend.
    const at = (u) => {
      const { left, top: y } = u.cursor;
      if (left == null || left < 0) return null;
      const place = Math.min(columns.length - 1, Math.floor(u.posToVal(left, "x") / column)), of = row(u.posToVal(y, "y"));
      return { place, of, number: columns[place]?.[of] ?? 0 };
    };
    const told = (words) => (u) => {
      const here = at(u);
      return here ? words(here) : "–";
    };
    const quiet = { stroke: "transparent", points: { show: false }, paths: () => null };
    const u = plot(figure, full, [columns.map((_, at) => (at + 0.5) * column), columns.map(() => from[0])], {
      scales: { x: horizontal(full.x), y: vertical(full.y, true) },
      series: [
        { label: "time", value: told(({ place }) => `${tick(place * column)} to ${tick((place + 1) * column)}`) },
        {
          ...quiet,
          label: "searches",
          value: told(({ of, number }) => `${count(number)} of ${tick(from[of] ?? from[0])} to ${tick(from[of + 1] ?? top)}`),
        },
      ],
      axes: [axis("time", tick, IN_NANOSECONDS), upright("time of the search", tick, log)],
      cursor: { points: { show: false }, focus: { prox: -1 } },
      focus: { alpha: 1 },
      hooks: { drawClear: [paintCells] },
    });
    heatKey(figure, shades, most);
    return u;
  },

  distribution(figure) {
    const PER_DECADE = 16;
    const groups = byName(drawnRuns(resultsOf(figure)));
    const shares = groups.map(([, runs]) => {
      const bins = new Map();
      let total = 0;
      for (const { n, log, kind } of runs.map(dotsOf)) {
        for (let i = 0; i < n; i++) {
          if (kind[i] === FAILED) continue;
          const bin = Math.floor(log[i] * PER_DECADE);
          bins.set(bin, (bins.get(bin) ?? 0) + 1);
          total++;
        }
      }
      return new Map([...bins].map(([bin, dots]) => [bin, dots / total]));
    });
    const used = shares.flatMap((bins) => [...bins.keys()]);
    // An empty bin at both ends takes the steps down to the axis.
    const first = used.reduce((a, b) => Math.min(a, b), 1e9) - 1, last = used.reduce((a, b) => Math.max(a, b), 0) + 1;
    const bins = used.length ? Array.from({ length: last - first + 1 }, (_, index) => first + index) : [0, 1];
    const columns = shares.map((share) => bins.map((bin) => share.get(bin) ?? 0));
    const top = columns.flat().reduce((a, b) => Math.max(a, b), 0.01);
    const x = bins.map((bin) => 10 ** (bin / PER_DECADE));
    const full = { x: [x[0], x[x.length - 1]], y: [0, top * 1.05] };
    return plot(figure, full, [x, ...columns], {
      scales: { x: horizontal(full.x, true), y: vertical(full.y) },
      series: [
        { label: "time from", value: or(duration) },
        ...groups.map(([name], index) =>
          line(name, index, { paths: uPlot.paths.stepped({ align: 1 }), value: or(percent) })),
      ],
      axes: [axis("time in connect()", tick, log), upright("share of connections", percent)],
      cursor: lines,
    });
  },

  fill(figure) {
    const groups = byName(resultsOf(figure).strategies.filter((strategy) => strategy.by_fill.length));
    const points = groups.flatMap(([, runs]) => runs.flatMap((run) => run.by_fill));
    const x = [...new Set(points.map((point) => point.fill))].sort((a, b) => a - b);
    const average = (points, weight, value) => {
      const total = points.reduce((sum, point) => sum + weight(point), 0);
      return total ? points.reduce((sum, point) => sum + weight(point) * value(point), 0) / total : null;
    };
    const columns = groups.map(([, runs]) => x.map((fill) => average(
      runs.flatMap((run) => run.by_fill.filter((point) => point.fill === fill)),
      (point) => point.connections, (point) => point.mean_ns)));
    const floor = x.map((fill) => average(
      points.filter((point) => point.fill === fill), (point) => +(point.floor_ns > 0), (point) => point.floor_ns));
    // It is measured every 240 dials, and of a small range not in each part.
    for (let index = floor.length - 1; index > 0; index -= 1) floor[index - 1] ??= floor[index];
    const values = [...columns.flat(), ...floor].filter((value) => value > 0);
    const full = { x: [0, Math.max(...x)], y: decades(Math.min(...values, 1e9), Math.max(...values, 1)) };
    return plot(figure, full, [x, ...columns, floor], {
      scales: { x: horizontal(full.x), y: vertical(full.y, true) },
      series: [
        { label: "ports in use", value: or(percent) },
        ...groups.map(([name], index) =>
          line(name, index, { points: { show: true, size: 5 }, value: or(duration), spanGaps: true })),
        { label: "floor", stroke: css("--text"), width: 1.5, dash: [3, 4], points: { show: false }, value: or(duration) },
      ],
      axes: [axis("ports in use", percent), upright("mean in connect()", tick, log)],
      cursor: lines,
    });
  },

  "time-wait"(figure) {
    const { runs, ports } = resultsOf(figure);
    const SECOND = 1e9;
    const tables = runs.map((run) => [run.time_wait.map((point) => point.at_ns / SECOND), run.time_wait.map((point) => point.count)]);
    const joined = uPlot.join(tables.map((table) => (table[0].length ? table : [[0], [null]])));
    const x = joined[0];
    const stalls = runs.map((run) => {
      if (run.predicted_stall_at == null || !(run.rate_per_s > 0)) return null;
      const from = (run.predicted_stall_at - 1) / run.rate_per_s;
      return [from, from + run.predicted_stall_ns / SECOND];
    });
    // A stall that was cut short has no readings: mark its start instead of its length.
    const sat = stalls.filter((stall, index) => stall && !runs[index].cut);
    const right = Math.max(x[x.length - 1], ...sat.map((stall) => stall[1]), 0.001);
    const top = Math.max(ports, 1, ...tables.flatMap((table) => table[1]));
    const full = { x: [0, right], y: [0, top * 1.05] };
    const short = (value) => tick(value * SECOND);
    return plot(figure, full, [...joined, x.map(() => ports)], {
      title: `Sockets in TIME_WAIT, a line for each remedy; dotted: all ${count(ports)} ports`,
      scales: { x: horizontal(full.x), y: vertical(full.y) },
      series: [
        { label: "time", value: or((value) => duration(value * SECOND)) },
        ...runs.map((run, index) => line(run.remedy, index, { spanGaps: true, value: or(count) })),
        limit("ports", count),
      ],
      axes: [axis("since the first connect()", short, IN_SECONDS), upright("sockets in TIME_WAIT", thousands, WHOLE)],
      cursor: lines,
      hooks: {
        drawAxes: [(u) => stalls.forEach((stall, index) => {
          if (stall && u.series[index + 1].show) band(u, stall, css("--series-" + (index % SERIES)));
        })],
      },
    });
  },

  plan(figure) {
    const results = resultsOf(figure);
    const points = results.by_fill;
    const means = points.map((point) => Math.max(1, point.mean_ns)), probes = points.map((point) => Math.max(1, point.probes));
    const full = {
      x: [0, Math.max(...points.map((point) => point.fill), 1e-6)],
      y: decades(Math.min(...means), Math.max(...means)),
      probes: decades(1, Math.max(...probes)),
    };
    const cliff = results.cliff_connections == null ? null : results.cliff_connections / results.capacity;
    return plot(figure, full, [points.map((point) => point.fill), means, probes], {
      scales: { x: horizontal(full.x), y: vertical(full.y, true), probes: vertical(full.probes, true) },
      series: [
        { label: "ports in use", value: or(percent) },
        line("mean in connect()", 0, { points: { show: true, size: 5 }, value: or(duration) }),
        line("ports looked at", 5, { scale: "probes", value: or((value) => (value < 100 ? digits(value) : count(value))) }),
      ],
      axes: [
        axis("ports in use", percent),
        upright("mean in connect()", tick, log),
        upright("ports looked at", count, { ...log, scale: "probes", side: 1, grid: { show: false } }),
      ],
      cursor: lines,
      hooks: { drawAxes: [(u) => cliff != null && band(u, [cliff, cliff], css("--failed"))] },
    });
  },

  // The straight lines between the moments of the record.
  "plan-over-time"(figure) {
    const results = resultsOf(figure);
    const SECOND = 1e9;
    const x = results.over_time.map((moment) => moment.at_ns / SECOND), tuples = results.over_time.map((moment) => moment.tuples);
    const level = (value) => x.map(() => value);
    const cliff = results.cliff_connections, exhausted = results.exhausted_after_ns;
    const full = { x: [0, Math.max(x[x.length - 1], 1e-9)], y: [0, Math.max(results.capacity, 1) * 1.05] };
    return plot(figure, full, [x, tuples, level(results.capacity), ...(cliff == null ? [] : [level(cliff)])], {
      scales: { x: horizontal(full.x), y: vertical(full.y) },
      series: [
        { label: "time", value: or((value) => duration(value * SECOND)) },
        line("ports in use", 0, { value: or(count) }),
        limit("ports", count),
        ...(cliff == null ? [] : [{ ...limit("connect() turns slow", count), dash: [2, 4] }]),
      ],
      axes: [axis("since the first connect()", (value) => tick(value * SECOND), IN_SECONDS), upright("ports in use", thousands, WHOLE)],
      cursor: lines,
      hooks: { drawAxes: [(u) => exhausted != null && band(u, [exhausted / SECOND, exhausted / SECOND], css("--failed"))] },
    });
  },

  ...loadKinds,
  ...acceptKinds,
  ...planesKinds,
  ...doctorKinds,
};

// ---- painting -----------------------------------------------------------------------------------------------------

let owners = new Uint8Array(0);

// Draws one square per dot and a plus sign per failed dial. If dots are closer than their squares, each pixel square
// belongs to the last visible dot in it: every square is painted once, which keeps panning smooth, and neither even
// nor odd ports cover the other kind.
function paint(u, { n, x: places, log, kind, scattered }, wanted, color) {
  const { ctx, bbox: { left, top, width, height } } = u;
  const { x, y } = u.scales;
  const bottom = Math.log10(y.min), perDot = width / (x.max - x.min), perDecade = height / (Math.log10(y.max) - bottom);
  const dpr = devicePixelRatio || 1;
  const size = Math.round(Math.min(Math.max(perDot * 0.7, (scattered ? (n < 4000 ? 3 : 2.4) : 1.6) * dpr), (scattered ? 4 : 6) * dpr));
  const grid = perDot < size ? size : 1;
  const arm = Math.round(Math.min(Math.max(perDot * 2, 2), 4) * dpr), thick = Math.max(1, Math.round(1.5 * dpr));
  const columns = Math.ceil(width / grid) + 1, rows = Math.ceil(height / grid) + 1;
  if (owners.length < columns * rows) owners = new Uint8Array(columns * rows);
  else owners.fill(0);
  const shown = [EVEN, ODD, FAILED].map((other) => (wanted === FAILED ? other === FAILED : other !== FAILED && u.series[other + 1].show));
  // Dials are in order; a sample has no known position among all dials.
  const start = scattered ? 0 : Math.max(0, Math.floor(x.min) - 1), end = scattered ? n : Math.min(n, Math.ceil(x.max));
  const cell = (i) => {
    const column = Math.floor(((places[i] - x.min) * perDot) / grid), row = ((height - (log[i] - bottom) * perDecade) / grid) | 0;
    return column < 0 || column >= columns || row < 0 || row >= rows ? -1 : row * columns + column;
  };
  for (let i = start; i < end; i++) {
    if (!shown[kind[i]]) continue;
    const at = cell(i);
    if (at >= 0) owners[at] = kind[i] + 1;
  }
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.fillStyle = color;
  for (let i = start; i < end; i++) {
    if (kind[i] !== wanted) continue;
    const at = cell(i);
    if (at < 0 || owners[at] !== wanted + 1) continue;
    owners[at] = 0;
    const px = left + (at % columns) * grid, py = top + Math.floor(at / columns) * grid;
    if (wanted === FAILED) {
      ctx.fillRect(px - arm, py - thick / 2, 2 * arm, thick);
      ctx.fillRect(px - thick / 2, py - arm, thick, 2 * arm);
    } else {
      ctx.fillRect(px - size / 2, py - size / 2, size, size);
    }
  }
  ctx.restore();
  // Without a path uPlot requests it again for every frame.
  return null;
}

// Returns the dot of a kind that is nearest to the pointer, within some pixels to the left and the right.
function nearest(u, { n, x, log, kind, scattered }, wanted, index) {
  if (index == null) return null;
  const reach = Math.ceil((5 * (u.scales.x.max - u.scales.x.min)) / u.over.clientWidth);
  const target = Math.log10(u.posToVal(u.cursor.top, "y"));
  let best = null, least = Infinity;
  if (scattered) {
    const near = x[index], far = (5 * (u.scales.x.max - u.scales.x.min)) / u.over.clientWidth;
    for (let i = 0; i < n; i++) {
      if (kind[i] === wanted && Math.abs(x[i] - near) <= far && Math.abs(log[i] - target) < least) {
        least = Math.abs(log[i] - target);
        best = i;
      }
    }
    return best;
  }
  for (let i = Math.max(0, index - reach); i < Math.min(n, index + reach + 1); i++) {
    if (kind[i] === wanted && Math.abs(log[i] - target) < least) {
      least = Math.abs(log[i] - target);
      best = i;
    }
  }
  return best;
}

function tabs(figure, names, choose, of = "Strategy") {
  figure.querySelector(".tabs")?.remove();
  const bar = document.createElement("div");
  bar.className = "tabs";
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", of);
  const summary = document.createElement("p");
  const buttons = names.map((name, index) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.onclick = () => {
      figure.chosen = index;
      buttons.forEach((other) => other.setAttribute("aria-pressed", other === button));
      summary.textContent = choose(index);
    };
    return button;
  });
  bar.append(...buttons, summary);
  figure.prepend(bar);
  buttons[figure.chosen].click();
}

// ---- all of them --------------------------------------------------------------------------------------------------

// data-overflow: the page is wider than its window. data-scrolls: a table is wider than the page, and says so.
function overflow() {
  root.toggleAttribute("data-overflow", root.scrollWidth > root.clientWidth);
  for (const frame of document.querySelectorAll(".scroll")) {
    frame.toggleAttribute("data-scrolls", frame.scrollWidth > frame.clientWidth);
  }
}

function draw(figure) {
  try {
    plots.set(figure, kinds[figure.dataset.chart](figure));
  } catch (error) {
    fail(`${figure.dataset.chart}: ${error.stack ?? error}`);
    figure.querySelector(".plot").textContent = "This chart could not be drawn.";
  }
}

let figures = [];

// Draws the charts of the page as it is now; a live page calls it again after each change.
function redraw() {
  for (const [figure, u] of plots) {
    if (!figure.isConnected) {
      u.destroy();
      plots.delete(figure);
    }
  }
  for (const index of Object.keys(records)) delete records[index];
  figures = [...document.querySelectorAll("figure[data-chart]")];
  figures.forEach(draw);
  overflow();
}
redraw();

function repaint() {
  isRepainting = true;
  figures.forEach(draw);
  isRepainting = false;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
for (const [event, isPrinting] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    root.toggleAttribute("data-print", isPrinting);
    repaint();
  });
}
new ResizeObserver(() => {
  for (const [figure, u] of plots) {
    const width = room(figure);
    if (width > 0 && width !== u.width) u.setSize({ width, height: height(width) });
  }
  overflow();
}).observe(document.body);

// A page of a plain HTTP address has no navigator.clipboard.
async function copied(text, place) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(place);
    return document.execCommand("copy");
  }
}

addEventListener("click", async ({ target }) => {
  const code = target.closest(".copy")?.parentElement.querySelector("code");
  if (!code) return;
  target.textContent = (await copied(code.textContent, code)) ? "Copied" : "Press Ctrl-C";
  setTimeout(() => { target.textContent = "Copy"; }, 2000);
});
