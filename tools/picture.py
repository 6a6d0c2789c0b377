"""Photograph a report for the README: `make picture` writes docs/report.png from the demo's page, with a headless Chromium.

The demo is run where its report is not there. Where no Chromium is installed, this says so and leaves the picture as it is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image  # Bokeh brings it

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = 1240, 850
COLOURS = 48
MOST = 150_000
"""Bytes that a picture in the README may have."""


def photograph(page: Path, picture: Path, chromium: str) -> int:
    """Write the top of a page as a PNG of few colours; return its size in bytes."""
    with tempfile.TemporaryDirectory(prefix="trueup-picture-") as folder:
        shot = Path(folder, "shot.png")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
        options += [f"--user-data-dir={folder}/profile", f"--window-size={SIZE[0]},{SIZE[1]}", "--virtual-time-budget=8000"]
        command = [chromium, *options, f"--screenshot={shot}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        Image.open(shot).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)
    return picture.stat().st_size


def main() -> int:
    """Make the demo's report if need be, and its picture."""
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        print(f"no picture: none of {', '.join(NAMES)} is installed (apt-get install chromium); docs/report.png stays as it is")
        return 0
    page = ROOT / "report" / "index.html"
    if not page.exists():
        subprocess.run([sys.executable, ROOT / "examples/centernet/demo.py"], cwd=ROOT, check=True)
    size = photograph(page, ROOT / "docs/report.png", chromium)
    print(f"docs/report.png: {size:,} bytes")
    return int(size > MOST)


if __name__ == "__main__":
    sys.exit(main())
