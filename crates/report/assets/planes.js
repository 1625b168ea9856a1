// The chart of lab planes. In the same function plot.js, load.js and accept.js precede this file, and charts.js
// follows it.

const planesKinds = {
  // Throughput against the number of planes, one line per packet size.
  "planes-throughput"(figure) {
    const gbit = ({ packet_bytes }, pps) => (pps * packet_bytes * 8) / 1e9;
    const views = new Map();
    for (const cell of recordOf(figure).results.cells) {
      if (cell.flows !== 1 || cell.spread === "hash") continue;
      const work = cell.work_ns ? duration(cell.work_ns) + " of work" : "no work";
      const name = [cell.plane, work, ...(cell.spread === "flow" ? [] : [cell.spread])].join(", ");
      if (!views.has(name)) views.set(name, new Map());
      const lines = views.get(name);
      const line = `${count(cell.packet_bytes)} B (MTU ${cell.mtu})`;
      if (!lines.has(line)) lines.set(line, []);
      lines.get(line).push(cell);
    }
    const numbers = (lines) => [...new Set([...lines.values()].flat().map(({ planes }) => planes))].sort((a, b) => a - b);
    for (const lines of views.values()) {
      for (const [name, cells] of lines) if (cells.length < 2) lines.delete(name);
    }
    // The view with the most lines comes first.
    const shown = [...views].filter(([, lines]) => numbers(lines).length > 1)
      .sort(([, a], [, b]) => b.size - a.size || numbers(b).length - numbers(a).length);
    const draw = ([name, lines]) => {
      const x = numbers(lines);
      const column = (cells, field) => x.map((planes) => {
        const cell = cells.find((cell) => cell.planes === planes);
        return cell ? gbit(cell, cell[field]) : null;
      });
      const columns = [...lines.values()].flatMap((cells) => [column(cells, "pps"), column(cells, "capacity_pps")]);
      const top = columns.flat().reduce((a, b) => Math.max(a, b ?? 0), 0) || 1;
      const full = { x: [0, x[x.length - 1] * 1.05], y: [0, top * 1.08] };
      const rates = (value) => digits(value) + " Gbit/s";
      const names = [...lines.keys()];
      const at = { spanGaps: true, value: or(rates), points: { show: true, size: 7 } };
      return plot(figure, full, [x, ...columns], {
        title: `Payload that arrives with one 4-tuple: ${name}; dashed: counted, as if each plane had a processor`,
        scales: { x: horizontal(full.x), y: vertical(full.y) },
        series: [
          { label: "planes", value: or(count) },
          ...names.flatMap((name, index) => [
            line(name, index, at),
            line(name + ", counted", index, { ...at, dash: [4, 4], width: 1.5 }),
          ]),
        ],
        axes: [axis("planes", count, { splits: () => x }), upright("payload, Gbit/s", (value) => +value.toPrecision(3))],
        cursor: { focus: { prox: 30 } },
      });
    };
    figure.chosen ??= 0;
    tabs(figure, shown.map(([name]) => name), (index) => {
      plots.set(figure, draw(shown[index]));
      return "";
    }, "Way and work");
    return plots.get(figure);
  },
};
