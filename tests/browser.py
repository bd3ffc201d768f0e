"""A page in a real browser without a window, asked what it shows."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2400", "--virtual-time-budget=2000"]
EARLY = """<script>
window.problems = [];
addEventListener("error", e => problems.push(String(e.message)));
addEventListener("securitypolicyviolation", e => problems.push(e.blockedURI));
</script>"""


def ask(page: str, question: str, tmp_path, dark: bool = False):
    """The value of the JavaScript expression ``question`` once ``page`` is shown."""
    if CHROMIUM is None:
        pytest.skip("no chromium here: what the report shows is not tested")
    late = f"""<script>addEventListener("load", () => {{
        const answer = document.createElement("pre");
        answer.id = "answer";
        answer.textContent = JSON.stringify({question});
        document.body.append(answer);
    }})</script>"""
    file = tmp_path / "page.html"
    file.write_text(page.replace("<head>", "<head>" + EARLY).replace("</body>", late + "</body>"), encoding="utf-8")
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    profile = [f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *FLAGS, *scheme, *profile, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer, "the page did not load"
    return json.loads(html.unescape(answer[1]))
