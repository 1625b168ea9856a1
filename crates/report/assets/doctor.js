// The charts of a diagnosis over time. In the same function plot.js precedes this file, and charts.js follows it.

function overHistory(figure, columns, series, label, budget) {
  const { moments } = resultsOf(figure).history;
  const x = moments.map(({ at_ns: at }) => at / SECOND_NS);
  const top = [...columns.flat(), budget ?? 0].reduce((a, b) => Math.max(a, b), 10);
  // A single reading has no extent.
  const full = { x: [x[0], Math.max(x[x.length - 1], x[0] + 1)], y: [0, top * 1.08] };
  const limits = budget == null ? [] : [x.map(() => budget)];
  return plot(figure, full, [x, ...columns, ...limits], {
    scales: { x: horizontal(full.x), y: vertical(full.y) },
    series: [
      { label: "time", value: or((value) => duration(value * SECOND_NS)) },
      ...series.map((name, index) => line(name, index, { value: or(count), ...few(moments) })),
      ...limits.map(() => limit("usable ports", count)),
    ],
    axes: [axis("since the start", (value) => tick(value * SECOND_NS)), upright(label, thousands)],
    cursor: lines,
  });
}

const doctorKinds = {
  "doctor-ports"(figure) {
    const { history: { tuples, moments }, snapshot: { ports: { seen } } } = resultsOf(figure);
    const columns = tuples.map((_, index) => moments.map(({ in_use: used }) => used[index]));
    return overHistory(figure, columns, tuples, "ports in use", seen ? seen.high - seen.low + 1 : null);
  },

  "doctor-queues"(figure) {
    const { moments } = resultsOf(figure).history;
    const column = (field) => moments.map((moment) => moment[field]);
    return overHistory(figure, [column("time_wait"), column("queued")],
      ["TIME_WAIT sockets", "connections in accept queues"], "sockets");
  },
};
