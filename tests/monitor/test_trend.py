"""`trueup report --trend`: sentences, exit codes, the cells, and the page in a browser."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from report.browser import ABSENT, CHROMIUM, DRIVER, browser
from trueup.analysis.monitor.trend import trend
from trueup.doors.cli import main
from trueup.foundation.store.series import SeriesWriter

LAYERS = tuple(f"gradient_norm/l{k}" for k in range(5))


def write(path: Path, steps: int = 60, *, alerts: bool = True) -> Path:
    for rank in range(2):
        writer = SeriesWriter(path, rank, {"monitor": {"alerts": alerts}}, {"world_size": 2})
        for step in range(steps):
            values = np.full(5, 1.0 + rank) + 0.001 * (step % 7)
            if step == 30:
                values[2] = 50.0
            if (step, rank) == (31, 1):
                values[4] = math.nan
            blocks = [(LAYERS, values)] + ([(("update_ratio/l0",), np.array([1e-3]))] if step % 10 == 0 else [])
            writer.append(step, blocks)
        writer.close("complete")
    return path


def spike(path: Path) -> None:
    row = {"step": 30, "rank": 0, "rule": "spike", "series": LAYERS[2], "said": "step 30, rank 0: <b>l2</b> spikes"}
    (path / "rank-00000/alerts.jsonl").write_text(json.dumps(row) + "\n")


def test_cells_keep_the_extremes(tmp_path: Path) -> None:
    found = trend(write(tmp_path / "m"), cells=160)
    assert (found.verdict, found.exit_code, found.sentence) == (
        "aligned", 0, "NO ALERT  12 series over 60 steps (0 to 59)"
    )  # fmt: skip
    gradients, updates = found.maps
    assert (gradients.kind, len(gradients.rows), len(gradients.steps)) == ("gradient_norm", 10, 16)
    assert gradients.rows[:3] == (("l0", 0), ("l0", 1), ("l1", 0))
    assert gradients.high.max() == math.inf  # the NaN
    assert (gradients.high[4] == 50).sum() == 1
    assert gradients.low[4].max() < 2
    assert updates.steps.tolist() == [0, 10, 20, 30, 40, 50]


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = write(tmp_path / "m")
    assert main(["report", str(held)]) == 0
    spike(held)
    assert main(["report", str(held), "--series", "gradient_norm/*", "--trend", "-o", "page", "--json", "found.json"]) == 1
    said = capsys.readouterr().out
    assert "1 ALERT  step 30, rank 0: <b>l2</b> spikes" in said
    told = json.loads(Path("found.json").read_text())
    assert (told["schema"], told["maps"]) == ("trueup-trend", [{"kind": "gradient_norm", "rows": 10, "columns": 60}])
    assert "<b>l2</b>" not in Path("page/index.html").read_text()
    log = held / "rank-00000/alerts.jsonl"
    log.write_text(log.read_text() * 2)
    assert main(["report", str(held)]) == 1
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert (first.index("step 30"), second.index("step 30")) == (10, 10)  # one below the other
    log.write_text("{")
    assert main(["report", str(held)]) == 2
    assert main(["report", str(write(tmp_path / "off", alerts=False))]) == 2
    assert "alerts were off" in capsys.readouterr().out
    assert main(["report", str(held), "--series", "nothing"]) == 2
    assert "No series is wanted" in capsys.readouterr().err


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=ABSENT)
def test_page(tmp_path: Path) -> None:
    held = write(tmp_path / "m")
    spike(held)
    assert main(["report", str(held), "--trend", "-o", str(tmp_path / "page")]) == 1
    with browser() as window:
        window.open(tmp_path / "page/index.html")
        window.wait("document.documentElement.dataset.trend === 'gradient_norm'")
        said = window.run("""
            const heat = document.getElementById('heat'), box = heat.getBoundingClientRect(), rows = 10;
            const cell = (box.height - 22) / rows, x = box.left + 190 + (box.width - 190) * 30.5 / 60, y = box.top + 4.5 * cell;
            for (const kind of ['pointermove', 'pointerdown', 'pointerup'])
                heat.dispatchEvent(new PointerEvent(kind, {clientX: x, clientY: y}));
            return [document.getElementById('under').textContent, document.getElementById('line-title').textContent];
        """)
        assert said == ["gradient_norm, l2, rank 0, step 30: 50", "gradient_norm, l2, rank 0"]
        window.run("const kind = document.getElementById('kind'); kind.value = '1'; kind.dispatchEvent(new Event('change'))")
        window.wait("document.documentElement.dataset.trend === 'update_ratio'")
        assert window.errors() == []
