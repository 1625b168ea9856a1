// Gets a page COUNT times over new connections of an http.Agent: node agent.js URL COUNT. Prints requests, failures and seconds, without a first tenth.
const http = require('http');
const [url, count] = [process.argv[2], +process.argv[3]];
const agent = new http.Agent({ keepAlive: false });

const get = () => new Promise((resolve) => {
  http.get(url, { agent }, (response) => response.resume().on('end', () => resolve(true))).on('error', () => resolve(false));
});

(async () => {
  for (let number = 0; number < count / 10; number++) await get();
  const began = process.hrtime.bigint();
  let failed = 0;
  for (let number = 0; number < count; number++) failed += !(await get());
  console.log(count, failed, Number(process.hrtime.bigint() - began) / 1e9);
  agent.destroy();
})();
