"""The rule by which steps end, as a table of programs: what runs, and which step each event is in."""

from __future__ import annotations

import pytest

from trueup.recording.engine.steps import Steps


def counted(events: str, alive: str = "") -> str:
    """Return the number of the step that each event is in.

    ``f`` is a forward, a capital letter an optimizer's step. ``alive`` are the optimizers that hold parameters of what ran, as
    far as the first step can tell.
    """
    steps, step, said = Steps(), 0, []
    for event in events:
        if event == "f" and steps.forward(inside=False, others=lambda: not set(map(ord, alive)) <= steps.stepped):
            steps.ended()
            step += 1
            steps.forward(inside=False, others=lambda: False)
        elif event != "f" and steps.begin(ord(event)):
            steps.ended()
            step += 1
        said.append(str(step))
        if event != "f" and steps.end(ord(event)):
            steps.ended()
            step += 1
    return "".join(said)


PROGRAMS = {
    "one optimizer": ("fAfAfA", "", "001122"),
    "accumulation": ("fffAfffA", "", "00001111"),
    "evaluation after the step": ("fAffA", "", "00111"),
    "gan": ("fffAfBfffAfBfffAfB", "AB", "000000111111222222"),
    "gan, optimizers unknown at first": ("fAfBfAfBfAfB", "", "001122334455"),
    "back to back": ("fABfABfAB", "", "000111222"),
    "one optimizer for each parameter, in the backward": ("fABCDfABCD", "", "0000011111"),
    "second one at every other step": ("fAfBfAfAfBfAfA", "AB", "00001111223344"),
    "critic five times": ("fAfAfAfAfAfBfAfA", "AB", "0000112233445566"),
    "a stale optimizer": ("fAfAfAfA", "AB", "00001122"),
    "joined later": ("fAfAfAfBfAfB", "A", "001122334455"),
    "replaced": ("fAfAfBfBfB", "", "0011223344"),
    "no modules": ("AAABB", "", "01234"),
    "two steps in a row": ("fAAfA", "", "00122"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_steps_of_programs(program: str) -> None:
    events, alive, expected = PROGRAMS[program]
    assert counted(events, alive) == expected


def lbfgs(*closures: int) -> list[int]:
    steps, step, said = Steps(), 0, []
    for forwards in closures:
        if steps.begin(0):
            steps.ended()
            step += 1
        assert not any(steps.forward(inside=True, others=lambda: False) for _ in range(forwards))
        said.append(step)
        assert not steps.end(0)
    return said


def test_forwards_inside_an_optimizers_step_belong_to_it() -> None:
    assert lbfgs(3, 1, 2) == [0, 1, 2]


def test_closures_of_several_optimizers_share_a_step() -> None:
    steps = Steps()
    ended = 0
    for _ in range(3):
        for optimizer in (0, 1):
            if steps.begin(optimizer):
                steps.ended()
                ended += 1
            steps.forward(inside=True, others=lambda: True)
            steps.end(optimizer)
    assert (ended, steps.irregular) == (2, False)


def test_a_step_by_hand_after_an_optimizer_without_modules_ends_no_second_one() -> None:
    """The first optimizer's step ended one, for nothing but `step` itself tells that it will be called."""
    steps, ended = Steps(), 0
    for _ in range(3):
        assert not steps.begin(0)
        for over in (steps.end(0), steps.by_hand()):
            if over:
                steps.ended()
                ended += 1
    assert ended == 3
    assert steps.by_hand()  # a step of no optimizer is one


def test_explicit_steps_are_the_only_ones() -> None:
    steps = Steps()
    steps.manual = True
    for _ in range(3):
        assert not steps.forward(inside=False, others=lambda: False)
        assert not steps.begin(0)
        assert not steps.end(0)


@pytest.mark.parametrize(("events", "irregular"), [("fAfBfAfB", False), ("fAfAfB", True), ("fABfAfA", True)])
def test_irregular_programs_are_known(events: str, irregular: bool) -> None:
    steps = Steps()
    for event in events:
        if event == "f" and steps.forward(inside=False, others=lambda: not {1, 2} <= steps.stepped):
            steps.ended()
            steps.forward(inside=False, others=lambda: False)
        elif event != "f":
            if steps.begin(1 if event == "A" else 2):
                steps.ended()
            steps.end(1 if event == "A" else 2)
    assert steps.irregular == irregular
