// The chart of lab keepalive. In the same function plot.js precedes this file, and charts.js follows it.

const QUANTILES = [
  ["p99.9", "p999", "1 request in 1,000 waits longer"],
  ["p99", "p99", "1 request in 100 waits longer"],
  ["p50", "p50", "half of the requests wait longer"],
];

// Draws the 95% interval of each point of a line as whiskers.
function whiskers(u, index, cells, x) {
  const { ctx } = u, dpr = devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = u.series[index].stroke(u, index);
  // The whiskers of a line out of focus are dim too.
  ctx.globalAlpha = u.series[index].alpha ?? 1;
  ctx.lineWidth = dpr;
  ctx.beginPath();
  for (const { close_every, wait_ns: { p999_low, p999_high } } of cells) {
    if (p999_low == null || p999_high == null) continue;
    // Horizontal offsets keep the whiskers of crossing lines apart.
    const at = u.valToPos(x.indexOf(close_every), "x", true) + ((index % 5) - 2) * 3 * dpr, arm = 3 * dpr;
    const [low, high] = [p999_low, p999_high].map((ns) => u.valToPos(Math.max(1, ns), "y", true));
    ctx.moveTo(at, low);
    ctx.lineTo(at, high);
    for (const end of [low, high]) {
      ctx.moveTo(at - arm, end);
      ctx.lineTo(at + arm, end);
    }
  }
  ctx.stroke();
  ctx.restore();
}

const acceptKinds = {
  "accept-wait"(figure) {
    const { family, load } = figure.dataset;
    const cells = recordOf(figure).results.cells.filter((cell) => cell.family === family && cell.load === load);
    const policies = new Map();
    for (const cell of cells) {
      const name = cell.server ?? cell.policy;
      if (!policies.has(name)) policies.set(name, []);
      policies.get(name).push(cell);
    }
    // Evenly spaced categories: closed after one request on the left, never closed on the right.
    const often = (every) => every || Infinity;
    const x = [...new Set(cells.map((cell) => cell.close_every))].sort((a, b) => (often(a) < often(b) ? -1 : 1));
    const closing = (at) => (Number.isInteger(at) && at in x ? (x[at] ? count(x[at]) : "never") : "");
    const column = (own, field) => x.map((every) => {
      const cell = own.find((cell) => cell.close_every === every);
      return cell ? Math.max(1, cell.wait_ns[field]) : null;
    });
    const groups = [...policies];
    let chosen = QUANTILES[figure.chosen ??= 0];
    const extent = () => {
      const ends = chosen[1] === "p999" ? ["p999", "p999_low", "p999_high"] : [chosen[1]];
      const values = cells.flatMap(({ wait_ns }) => ends.map((end) => wait_ns[end]))
        .filter((value) => value != null).map((value) => Math.max(1, value));
      return decades(Math.min(...values), Math.max(...values));
    };
    const full = { x: [-0.3, x.length - 0.7], y: extent() };
    const data = () => [x.map((every, at) => at), ...groups.map(([, own]) => column(own, chosen[1]))];
    const title = () => `Wait of a request, ${chosen[0]}: ${chosen[2]}`;
    const u = plot(figure, full, data(), {
      title: title(),
      scales: { x: horizontal(full.x), y: vertical(full.y, true) },
      series: [
        { label: "close every", value: or(closing) },
        ...groups.map(([name], index) => line(name, index, {
          points: { show: true, size: 6 },
          value: or(duration),
          spanGaps: true,
          // There are more policies than colours.
          ...(index >= SERIES && { dash: [2, 3] }),
        })),
      ],
      axes: [
        axis("requests after which a connection is closed", closing, { splits: () => x.map((every, at) => at) }),
        upright("wait of a request", tick, log),
      ],
      cursor: lines,
      hooks: {
        drawSeries: [(u, index) => {
          if (index > 0 && chosen[1] === "p999" && u.series[index].show) whiskers(u, index, groups[index - 1][1], x);
        }],
      },
    });
    tabs(figure, QUANTILES.map(([name]) => name), (index) => {
      chosen = QUANTILES[index];
      full.y.splice(0, 2, ...extent());
      u.batch(() => {
        u.setData(data(), false);
        u.setScale("y", { min: full.y[0], max: full.y[1] });
      });
      u.root.querySelector(".u-title").textContent = title();
      u.root.querySelector(".u-wrap").setAttribute("aria-label", title());
      return "";
    }, "Quantile");
    return u;
  },
};
