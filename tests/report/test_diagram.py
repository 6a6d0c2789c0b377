from __future__ import annotations

import dataclasses

from trueup.doors.report.charts import HEIGHT, WIDTH, diagram, edge_rows, ending
from trueup.foundation.model import Evidence

from .results import evidence


def test_producers_stand_left_of_consumers_and_nothing_overlaps() -> None:
    picture = diagram(evidence())
    assert picture is not None
    assert [heading for _, heading in picture.headings] == ["two before", "makes an input", "the call", "reads an output"]
    places = {(box.node.hops, box.node.op): (box.x, box.y) for box in picture.boxes}
    by_hops = sorted(places.items())
    assert [x for _, (x, _) in by_hops] == sorted(x for _, (x, _) in by_hops)
    for x, y in places.values():
        assert 0 <= x <= picture.width - WIDTH
        assert 0 <= y <= picture.height - HEIGHT
        crowd = [other for other in places.values() if other != (x, y)]
        assert all(abs(x - u) >= WIDTH or abs(y - v) >= HEIGHT for u, v in crowd)


def test_what_is_said_of_a_call_and_of_a_tensor() -> None:
    picture = diagram(evidence())
    assert picture is not None
    tones = {box.node.op: box.tone for box in picture.boxes}
    assert tones == {
        "torch.conv2d": "calm", "torch.Tensor.reshape": "calm", "torch.Tensor.view": "one-sided",
        "torch.lstm": "culprit", "torch.relu": "deviates",
    }  # fmt: skip
    assert [box.lines[2] for box in picture.boxes] == [
        "in 3e-8, out 3e-8", "in 3e-8, out 3e-8", "only in the candidate", "in 2.1e-1, out 2.1e-1", "in 2e-1, out 2e-1"
    ]  # fmt: skip
    assert [(line.tone, line.side) for line in picture.lines] == [
        ("calm", "both"), ("calm", "both"), ("calm", "candidate"), ("deviates", "both")
    ]  # fmt: skip
    assert picture.lines[2].title == "output.0 → grad_output.0: rel. L2 ?, only in the candidate"
    assert edge_rows(evidence())[3] == (
        "neck.lstm/torch.lstm#0", "grad_input.0", "backbone.layer1.0.relu/torch.relu#0", "grad_output.0", "2.1e-1"
    )  # fmt: skip


def test_a_culprit_that_one_run_alone_has_shows_its_own_errors() -> None:
    nan = float("nan")
    alone = dataclasses.replace(evidence().nodes[3], seq=(-1, 418), state="", role="", error_in=nan, error_out=nan)
    nodes = (*evidence().nodes[:3], alone, *evidence().nodes[4:])
    picture = diagram(dataclasses.replace(evidence(), nodes=nodes), (0.0, 0.095))
    assert picture is not None
    assert [box.lines[2] for box in picture.boxes if box.node.hops == 0] == ["in 0, out 9.5e-2"]
    assert [line.tone for line in picture.lines] == ["calm", "calm", "calm", "deviates"]


def test_names_keep_their_telling_end() -> None:
    assert ending("torch.nn.functional.cross_entropy#0", 22) == "…cross_entropy#0"
    assert ending("model.layers.10.self_attn.q_proj", 27) == "…layers.10.self_attn.q_proj"
    assert ending("torch.lstm#0", 22) == "torch.lstm#0"
    assert ending("x" * 60, 22) == "…" + "x" * 21
    assert len(ending("a.b" * 30, 22)) <= 22


def test_a_call_alone_has_no_picture() -> None:
    assert diagram(Evidence()) is None
    assert diagram(dataclasses.replace(evidence(), nodes=evidence().nodes[:1], edges=())) is None
