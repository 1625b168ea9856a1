// Replaces the article by each event of the server. charts.js precedes this file in the same function.
// data-updates of the <html> element counts the events, which tests read.

const stream = new EventSource("/events");
stream.onmessage = ({ data }) => {
  // A replaced article loses the text that the user is selecting, such as a command to copy.
  if (!getSelection().isCollapsed) return;
  const scroll = scrollY;
  document.querySelector("article").outerHTML = JSON.parse(data);
  redraw();
  scrollTo(0, scroll);
  root.dataset.updates = 1 + Number(root.dataset.updates ?? 0);
  root.removeAttribute("data-stale");
};
stream.onerror = () => root.setAttribute("data-stale", "");
