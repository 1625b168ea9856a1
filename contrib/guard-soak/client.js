// As client.py, in Node.js: client.js RECORD HOST PORT. The time of a connect ends at the event.
const fs = require('fs'), net = require('net'), readline = require('readline');
const [record, host, port] = process.argv.slice(2);
const TICK = 0.05, BURST = 25, RENEWED = 0.01;
const held = new Set(), answered = new Set();
let target = 0, pending = 0, owed = 0, times = [], failures = {};
const fail = (kind) => { failures[kind] = (failures[kind] || 0) + 1; };

function openOne() {
  const began = process.hrtime.bigint();
  const client = net.connect({ host, port: Number(port) });
  pending++;
  let connected = false;
  client.on('connect', () => {
    connected = true;
    pending--;
    times.push(Number((process.hrtime.bigint() - began) / 1000n));
    held.add(client);
    client.write('GET / HTTP/1.1\r\nHost: soak\r\n\r\n');
  });
  client.on('data', (data) => {
    if (answered.has(client) || data.toString().startsWith('HTTP/1.1 200')) answered.add(client);
    else fail('wrong answer');
  });
  client.on('end', () => { fail('closed by the server'); forget(client); });
  client.on('error', (error) => { if (!connected) pending--; fail(error.code); forget(client); });
}
function forget(client) { held.delete(client); answered.delete(client); client.destroy(); }

readline.createInterface({ input: process.stdin }).on('line', (line) => { target = Number(line); }).on('close', () => process.exit(0));
setInterval(() => {
  owed = Math.min(owed + held.size * RENEWED * TICK, BURST);
  let surplus = Math.max(held.size - target, 0) + Math.floor(owed);
  owed -= Math.floor(owed);
  for (const client of held) {
    if (surplus <= 0) break;
    if (answered.has(client)) { forget(client); surplus--; }
  }
  for (let number = Math.min(target - held.size - pending, BURST); number > 0; number--) openOne();
}, TICK * 1000);
setInterval(() => {
  fs.appendFileSync(record, JSON.stringify({ us: times, fail: failures, held: held.size }) + '\n');
  times = []; failures = {};
}, 1000);
