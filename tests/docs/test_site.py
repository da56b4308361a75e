"""The documentation as HTML: it builds without a warning, and a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fompi

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def rendered(site):
    """What a browser without a window makes of a page, as HTML."""
    found = [path for path in map(shutil.which, BROWSERS) if path]
    assert found, f"no browser among {', '.join(BROWSERS)}: apt-get install --no-install-recommends chromium"

    def render(page):
        command = [found[0], "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", (site / page).as_uri()]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return render


def test_the_front_page_has_a_title_and_a_search_box(rendered):
    page = rendered("index.html")
    assert re.search(r"<title>fompi\b", page)
    assert re.search(r'<input class="sidebar-search"[^>]*name="q"', page)


def test_the_page_of_an_operation(rendered):
    """Its signature, its meaning as code, and its text."""
    page = rendered("reference/api.html")
    start = page.index('id="fompi.matmul_reduce_scatter"')
    text = re.sub(r"<[^>]+>", "", page[start : start + 10_000])
    assert "matmul_reduce_scatter(x" in text.replace("\n", "") and "counts" in text
    assert re.search(r"y = reduce_scatter\(x @ w", text)


def test_every_public_name_is_in_the_reference(site):
    page = (site / "reference" / "api.html").read_text()
    missing = [name for name in fompi.__all__ if f'id="fompi.{name}"' not in page]
    assert not missing
