// The charts of a load run. In the same function plot.js precedes this file, and charts.js follows it.

const SECOND_NS = 1e9;
const few = (points) => ({ points: { show: points.length <= 40, size: 5 } });

// Labels of axes: 5k, not 5,000.
function thousands(value) {
  const unit = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([least]) => value >= least);
  return unit ? +(value / unit[0]).toFixed(3) + unit[1] : count(value);
}

// Returns the middle and the length of each second; the end of the run cuts the last one short.
function timeline({ seconds, elapsed_ns }) {
  const lengths = seconds.map((second) => Math.min(1, Math.max(0, elapsed_ns - second.at_ns) / SECOND_NS) || 1);
  return { lengths, x: seconds.map((second, index) => second.at_ns / SECOND_NS + lengths[index] / 2) };
}

// The range from 0 to the end of the run; a stall predicted long after the end would compress the chart.
function span({ seconds, elapsed_ns, ports }, marks) {
  const last = seconds.length ? seconds[seconds.length - 1].at_ns : 0;
  const end = Math.max(elapsed_ns, last, 1);
  const predicted = ports?.predicted_stall_ns ?? 0;
  return [0, (marks && predicted < 1.5 * end ? Math.max(end, predicted * 1.05) : end) / SECOND_NS];
}

// Options shared by the charts over time: the axis and the shaded stall.
function overTime(figure, data, full, series, axes, { marks = [], ...more }) {
  const { ports, elapsed_ns } = resultsOf(figure);
  const stalled = ports?.stalled_ns == null ? null : [
    ports.stalled_ns / SECOND_NS,
    Math.min(ports.stalled_ns + ports.stall_length_ns, Math.max(elapsed_ns, ports.stalled_ns)) / SECOND_NS,
  ];
  return plot(figure, full, data, {
    series: [{ label: "time", value: or((value) => duration(value * SECOND_NS)) }, ...series],
    axes: [axis("since the start", (value) => tick(value * SECOND_NS), IN_SECONDS), ...axes],
    cursor: lines,
    ...more,
    hooks: { drawAxes: [(u) => stalled && band(u, stalled, css("--failed"), "stalled"), ...marks] },
  });
}

const loadKinds = {
  "load-latency"(figure) {
    const results = resultsOf(figure);
    const { seconds } = results;
    // Seconds without completed operations have no latency: draw a gap.
    const column = (field) => seconds.map((second) => (second.operations > 0 ? Math.max(1, second[field]) : null));
    const columns = ["p50_ns", "p99_ns", "max_ns"].map(column);
    const values = columns.flat().filter((value) => value != null);
    const full = {
      x: span(results),
      y: decades(values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), 1)),
    };
    const times = (name, index, more) => line(name, index, { value: or(duration), ...few(seconds), ...more });
    return overTime(figure, [timeline(results).x, ...columns], full,
      [times("p50", 0), times("p99", 1), times("longest", 3, { width: 1 })],
      [upright("time of an operation", tick, log)],
      { scales: { x: horizontal(full.x), y: vertical(full.y, true) } });
  },

  "load-throughput"(figure) {
    const results = resultsOf(figure), { seconds } = results;
    const { x, lengths } = timeline(results);
    const open = recordOf(figure).settings.rate_per_s != null;
    // A very short last second gives no meaningful rate.
    const column = (field) => seconds.map((second, index) =>
      (lengths[index] >= 0.2 || seconds.length === 1 ? second[field] / lengths[index] : null));
    const [operations, connections, errors] = ["operations", "connections", "errors"].map(column);
    // With one connection per operation both lines would coincide.
    const same = seconds.every((second) => second.operations === second.connections);
    const columns = [operations, ...(same ? [] : [connections]), errors];
    const offered = open ? [x.map(() => results.offered_per_s)] : [];
    const top = [...columns, ...offered].flat().reduce((a, b) => Math.max(a, b ?? 0), 1);
    const full = { x: span(results), y: [0, top * 1.05] };
    const rates = (name, index) => line(name, index, { value: or((value) => count(value) + "/s"), ...few(seconds) });
    return overTime(figure, [x, ...columns, ...offered], full,
      [
        rates(same ? "operations and connections" : "operations", 0),
        ...(same ? [] : [rates("connections", 2)]),
        rates("errors", 1),
        ...(open ? [limit("offered", (value) => count(value) + "/s")] : []),
      ],
      [upright("per second", thousands, WHOLE)],
      { scales: { x: horizontal(full.x), y: vertical(full.y) } });
  },

  // The scale of HdrHistogram's plots: each further nine has the same width.
  "load-distribution"(figure) {
    const { distribution, latency_ns: { total } } = resultsOf(figure);
    const last = 2 * Math.max(total.samples, ...distribution.map(({ share }) => (share < 1 ? 1 / (1 - share) : 1)));
    const x = distribution.map(({ share }) => (share < 1 ? 1 / (1 - share) : last));
    const y = distribution.map(({ ns }) => Math.max(1, ns));
    const full = { x: [1, last * 1.1], y: decades(Math.min(...y), Math.max(...y)) };
    // Shows as many digits as the share has nines.
    const nines = (value) => {
      const digits = Math.max(0, Math.ceil(Math.log10(value) - 1e-9) - 2);
      return +(100 * (1 - 1 / value)).toFixed(digits) + "%";
    };
    // If the labels of all decades do not fit, label every second or third one.
    const splits = (u, index, low, high) => {
      const all = logSplits(u, index, low, high);
      const every = Math.ceil((all.length * 64) / Math.max(64, u.width - 80));
      return all.filter((value, position) => position % every === 0);
    };
    return plot(figure, full, [x, y], {
      scales: { x: horizontal(full.x, true), y: vertical(full.y, true) },
      series: [
        { label: "share", value: or((value) => (value >= last ? "100%" : nines(value * 1.0000001))) },
        line("no longer than", 0, { value: or(duration) }),
      ],
      axes: [axis("share of the operations", nines, { splits, filter: log.filter }), upright("time of an operation", tick, log)],
      cursor: lines,
    });
  },

  "load-ports"(figure) {
    const results = resultsOf(figure), { seconds, ports } = results;
    const { x } = timeline(results);
    const predicted = ports.predicted_stall_ns == null ? null : ports.predicted_stall_ns / SECOND_NS;
    const left = seconds.map((second) => second.ports_left);
    const top = Math.max(ports.budget, left.reduce((a, b) => Math.max(a, b ?? 0), 1));
    const full = { x: span(results, true), y: [0, top * 1.08] };
    return overTime(figure, [x, left, x.map(() => ports.budget)], full,
      [line("tuples left", 0, { value: or(count), ...few(seconds) }), limit("budget", count)],
      [upright("tuples left", thousands, WHOLE)],
      {
        scales: { x: horizontal(full.x), y: vertical(full.y) },
        marks: [(u) => predicted != null && band(u, [predicted, predicted], css("--text"), "predicted", true)],
      });
  },
};
