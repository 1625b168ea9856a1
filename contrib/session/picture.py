#!/usr/bin/env python3
"""Takes the picture of one chart of a page that --html wrote, with Chromium: the pictures of docs/pictures.

    contrib/session/picture.py PAGE CHART PICTURE [WIDTH]

CHART is what the page has in data-chart. WIDTH is in pixels, by default 1024.
"""
import re
import subprocess
import sys
import tempfile

# Leaves the chart with its title and legend, and reports its height. A chart is drawn, and drawn again after a change of its width.
ALONE = """<script>addEventListener('load', () => setTimeout(() => {
  const chart = document.querySelector('figure[data-chart="%s"]');
  for (const control of chart.querySelectorAll('button')) control.parentElement.remove();
  const title = chart.querySelector('figcaption');
  if (chart.querySelector('.u-title')) title.remove();
  else chart.prepend(title);
  title.style = 'font: bold 14px sans-serif; margin: 4px 8px 12px; max-width: none; color: inherit';
  document.body.replaceChildren(chart);
  document.body.style = 'margin: 8px; max-width: none; padding: 0';
  chart.style = 'margin: 0; max-width: none; border: 0';
  setTimeout(() => document.documentElement.setAttribute('data-height', document.documentElement.scrollHeight), 500);
}, 500));</script></body>"""


def main():
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__.strip())
    page, chart, picture = sys.argv[1:4]
    width = int(sys.argv[4]) if len(sys.argv) == 5 else 1024
    with open(page, encoding="utf-8") as file:
        html = file.read()
    if f'data-chart="{chart}"' not in html:
        charts = sorted(set(re.findall(r'<figure data-chart="([^"]+)"', html)))
        sys.exit(f"picture.py: {page}: no chart {chart}: expected {' or '.join(charts)}")
    with tempfile.TemporaryDirectory() as directory:
        alone = f"{directory}/page.html"
        with open(alone, "w", encoding="utf-8") as file:
            file.write(html.replace("</body>", ALONE % chart))

        def chromium(height, *flags):
            command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000",
                       f"--user-data-dir={directory}/profile", f"--window-size={width},{height}", *flags, f"file://{alone}"]
            return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True).stdout

        height = int(re.search(r'data-height="(\d+)"', chromium(300, "--dump-dom"))[1]) + 32
        chromium(height, f"--screenshot={picture}")


main()
