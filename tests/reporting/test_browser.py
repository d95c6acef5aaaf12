"""Pages in a real browser: wide and narrow, light and dark; nothing on the console, nothing from a network, no fault
that axe knows. Wants Debian's chromium, nodejs and npm (`make test-all` installs what npm has to bring)."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers_pages import empty, fast, one_document, resumed
from helpers_run import command

HERE = Path(__file__).parent / "browser"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [
    name
    for name, there in (
        ("chromium", BROWSER),
        ("node", shutil.which("node")),
        ("axe-core and playwright-core", (HERE / "node_modules").exists()),
    )
    if not there
]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"needs {', '.join(MISSING)}: apt-get install chromium nodejs npm, then npm install --prefix {HERE}",
    ),
]


def faults(*pages: Path) -> dict[str, list[str]]:
    """What is wrong with pages, by their names."""
    done = subprocess.run(
        ["node", HERE / "check.mjs", BROWSER, *pages], capture_output=True, text=True, check=True, timeout=300
    )
    return {Path(name).name: wrong for name, wrong in json.loads(done.stdout).items()}


def test_pages_are_in_order(tmp_path, monkeypatch):
    fast(monkeypatch)
    runs = {make.__name__: make(tmp_path / make.__name__) for make in (resumed, one_document, empty)}
    pages = [shutil.copy(out / "report.html", tmp_path / f"{name}.html") for name, out in runs.items()]
    both = tmp_path / "both.html"
    assert command("report", runs["resumed"], runs["one_document"], "--html", both).returncode == 0
    assert faults(*map(Path, pages), both) == {
        name: [] for name in ("resumed.html", "one_document.html", "empty.html", "both.html")
    }


def test_a_page_that_is_not_in_order_is_told(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><html lang=en><title>t</title><main><h1 style='color: #ccc; background: #fff'>faint</h1>"
        "<div id=a style='width: 3000px'>wide</div><div id=a></div><a href='#nowhere'>x</a>"
        "<svg role=img aria-labelledby=p viewBox='0 0 4 2'><path d='M0 0' style='fill: var(--no)'/></svg>"
        "<img alt='' src=http://127.0.0.1:9/a><script>console.log('hello')</script></main>"
    )
    wrong = "\n".join(faults(bad)["bad.html"])
    for fault in (
        "overflow", "id twice: a", "dead link", "empty plot: p", "plot without numbers: p", "no color --no: p",
        "request: http://127.0.0.1:9/a", "console: hello", "axe: color-contrast",
    ):  # fmt: skip
        for view in ("1280 light", "400 dark"):
            assert f"{view}: {fault}" in wrong
