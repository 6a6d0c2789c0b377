from __future__ import annotations

from trueup.recording.recorder.recorder import Recent


def test_the_entry_used_longest_ago_goes() -> None:
    recent: Recent[int, str] = Recent(3)
    for k in (1, 2, 3):
        recent.put(k, str(k))
    assert recent.get(1) == "1"
    recent.put(4, "4")
    assert [recent.get(k) for k in (1, 2, 3, 4)] == ["1", None, "3", "4"]
    recent.put(3, "three")
    assert (len(recent), recent.get(3)) == (3, "three")
