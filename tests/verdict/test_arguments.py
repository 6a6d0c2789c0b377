from __future__ import annotations

from trueup.comparison.measures.measure import equal_values


def test_arguments_are_equal_by_value() -> None:
    assert equal_values({"a": [1, 2.0, "x"]}, {"a": [1, 2.0000000000000001, "x"]})
    assert equal_values(float("nan"), float("nan"))
    assert not equal_values({"eps": 1e-5}, {"eps": 1e-6})
    assert not equal_values({"a": 1}, {"b": 1})
    assert not equal_values([1], [1, 2])
    assert not equal_values(1.0, "one")
