// The charts of a diagnosis over time. In the same function plot.js precedes this file, and charts.js follows it.

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
const zone = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB", { timeZoneName: "short" }).split(" ").pop();

// Returns the times of the readings in seconds since 1970. The record has only the second of the last one: the chart keeps the beginning
// that it computed first, and so does not tremble from update to update.
function timesOfDay(figure, moments) {
  const began = Date.parse(recordOf(figure).started) / 1000 - moments[moments.length - 1].at_ns / SECOND_NS;
  if (!(Math.abs(began - figure.began) <= 1)) figure.began = began;
  return moments.map(({ at_ns: at }) => figure.began + at / SECOND_NS);
}

function overHistory(figure, columns, series, label, budget) {
  const { moments } = resultsOf(figure).history;
  const x = timesOfDay(figure, moments);
  const top = [...columns.flat(), budget ?? 0].reduce((a, b) => Math.max(a, b), 10);
  // A single reading has no extent.
  const full = { x: [x[0], Math.max(x[x.length - 1], x[0] + 1)], y: [0, top * 1.08] };
  const limits = budget == null ? [] : [x.map(() => budget)];
  return plot(figure, full, [x, ...columns, ...limits], {
    scales: { x: { ...horizontal(full.x), time: true }, y: vertical(full.y) },
    series: [
      { label: "time", value: or(clock) },
      ...series.map((name, index) => line(name, index, { value: or(count), ...few(moments) })),
      ...limits.map(() => limit("usable ports", count)),
    ],
    axes: [axis(`time of day (${zone(x[0])})`, clock, { space: 80, incrs: undefined }), upright(label, thousands, WHOLE)],
    cursor: lines,
    // Half of the last label is right of the axis.
    padding: [12, 34, 0, 0],
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
