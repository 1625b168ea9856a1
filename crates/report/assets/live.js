// Brings the page up to date by each event of the server, and says since when there was none. charts.js precedes this file in the same
// function. data-updates of the <html> element counts the events, which tests read.

const main = document.querySelector("main");
const updated = document.createElement("p"), verdict = document.createElement("p");
updated.className = "live";
verdict.className = "spoken";
verdict.setAttribute("role", "status");
verdict.setAttribute("aria-live", "polite");
main.prepend(updated, verdict);
let last = new Date();

function showAge(isStale) {
  const time = clock(last / 1000);
  updated.textContent = isStale ? `The server has not answered since ${time}: these figures are old.` : `updated ${time}`;
  // Read aloud when the server is gone, not once a second.
  updated.setAttribute("role", isStale ? "alert" : "presentation");
  root.toggleAttribute("data-stale", isStale);
}

// The severity and the rule of each finding, such as `critical P01`: the verdict is read aloud when they change, not with each figure.
let rules = "";
function sayVerdict() {
  const findings = [...document.querySelectorAll(".finding")].map(({ textContent }) => textContent);
  const now = findings.map((text) => text.split(" ", 2).join(" ")).join();
  if (now !== rules) verdict.textContent = findings.join(". ");
  rules = now;
}

const kindOf = ({ nodeName, dataset, className }) => [nodeName, className, dataset?.chart].join(" ");
const isSelected = (node) => !getSelection().isCollapsed && getSelection().containsNode(node, true);

// Gives `old` the content of `next`. What is alike in both stays: a focus, a selection, an open <details>, and a chart with its zoom.
function patch(old, next) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data && !isSelected(old)) old.data = next.data;
    return;
  }
  // charts.js fills the figures, whose captions do not change.
  if (old.dataset.chart) return;
  for (const { name } of [...old.attributes]) if (name !== "open" && !next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  let at = old.firstChild;
  for (const child of [...next.childNodes]) {
    // A figure is passed over only by itself.
    let same = at;
    while (same && kindOf(same) !== kindOf(child)) same = same.dataset?.chart ? null : same.nextSibling;
    if (!same) {
      old.insertBefore(child, at);
      continue;
    }
    for (; at !== same; at = removed(at));
    at = same.nextSibling;
    patch(same, child);
  }
  while (at) at = removed(at);
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

const stream = new EventSource("/events");
stream.onmessage = ({ data }) => {
  last = new Date();
  showAge(false);
  const next = document.createElement("template");
  next.innerHTML = JSON.parse(data);
  patch(document.querySelector("article"), next.content.firstElementChild);
  redraw();
  sayVerdict();
  root.dataset.updates = 1 + Number(root.dataset.updates ?? 0);
};
stream.onerror = () => showAge(true);
showAge(false);
sayVerdict();
