// Replaces the article by each event of the server, and says since when there was none. charts.js precedes this file in the same function.
// data-updates of the <html> element counts the events, which tests read.

const updated = document.createElement("p");
updated.className = "live";
document.body.prepend(updated);
let last = new Date();

function showAge(isStale) {
  const time = last.toLocaleTimeString();
  updated.textContent = isStale ? `The server has not answered since ${time}: these figures are old.` : `updated ${time}`;
  // Read aloud when the server is gone, not once a second.
  updated.setAttribute("role", isStale ? "alert" : "presentation");
  root.toggleAttribute("data-stale", isStale);
}

const stream = new EventSource("/events");
stream.onmessage = ({ data }) => {
  last = new Date();
  showAge(false);
  // A replaced article loses the text that the user is selecting, such as a command to copy.
  if (!getSelection().isCollapsed) return;
  const scroll = scrollY;
  const isOpen = [...document.querySelectorAll("article details")].map((details) => details.open);
  document.querySelector("article").outerHTML = JSON.parse(data);
  document.querySelectorAll("article details").forEach((details, at) => (details.open = isOpen[at] ?? details.open));
  redraw();
  scrollTo(0, scroll);
  root.dataset.updates = 1 + Number(root.dataset.updates ?? 0);
};
stream.onerror = () => showAge(true);
showAge(false);
