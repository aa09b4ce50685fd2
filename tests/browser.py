"""Pages as Debian's Chromium shows them."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium on this machine"
)
SCRIPT = """<script>addEventListener("load", () => {
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const seen = document.createElement("textarea");
  seen.id = "seen";
  seen.textContent = JSON.stringify({
    width: document.documentElement.scrollWidth,
    window: innerWidth,
    asked: performance.getEntriesByType("resource").map(entry => entry.name),
    broken: all("img").filter(image => !image.naturalWidth).length,
    titles: all("h1, h2, h3").map(title => title.textContent),
    tables: all("table").map(table => all("tr", table).map(
      row => [...row.children].map(cell => cell.textContent))),
  });
  document.body.append(seen);
})</script>"""


def browse(page: Path, folder: Path, *flags: str) -> str:
    """Opens a page, without a network, and returns what Chromium prints."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    command += [*flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def look(page: Path, folder: Path, *, width: int) -> dict[str, Any]:
    """Returns what a page shows in a window of that width; ``SCRIPT`` names it."""
    copy = folder / "looked_at.html"
    copy.write_text(page.read_text(encoding="utf-8") + SCRIPT, encoding="utf-8")
    dom = browse(copy, folder, f"--window-size={width},1000", "--dump-dom")
    (seen,) = re.findall(r'<textarea id="seen">(.*?)</textarea>', dom, re.DOTALL)
    return json.loads(html.unescape(seen))
