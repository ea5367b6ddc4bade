"""A server of runs, and a browser to look at its page with."""

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusedrec_torchrec.watch.run import open_runs
from fusedrec_torchrec.watch.server import WatchServer

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(  # set where there must be a browser, tests fail without
    BROWSER is None and "FUSEDREC_TEST_BROWSER" not in os.environ,
    reason=f"there is no browser: none of {', '.join(NAMES)} is on the PATH",
)
FLAGS = (
    *("--headless", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--mute-audio"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--virtual-time-budget=1500"),
)


@contextmanager
def served(*folders: Path) -> Iterator[WatchServer]:
    with WatchServer(open_runs(folders), port=0, every=2.0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def browse(*arguments: str) -> str:
    """Runs the browser once, with a profile of its own, and returns what it prints."""
    assert BROWSER is not None, f"none of {', '.join(NAMES)} is on the PATH"
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [BROWSER, *FLAGS, *sandbox, f"--user-data-dir={profile}", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    return done.stdout
