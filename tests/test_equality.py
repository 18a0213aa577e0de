"""When two greedy answers count as the same."""

import pytest

from launcher.equality import compare

GAPS = (3.0, 0.02, 2.0)


def test_equal_sequences():
    assert compare((1, 2, 3), (1, 2, 3), GAPS, 0.0).verdict == "equal"


def test_parting_at_a_near_tie_is_reported_and_passes():
    result = compare((1, 2, 3), (1, 9, 9), GAPS, 0.1)
    assert (result.verdict, result.position, result.gap, result.passed) == ("near-tie", 1, 0.02, True)
    assert str(result) == "near-tie at token 1 (gap 0.020)"


@pytest.mark.parametrize(
    ("candidate", "position"), [((9, 2, 3), 0), ((1, 2, 9), 2), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)]
)
def test_parting_anywhere_else_fails(candidate, position):
    result = compare((1, 2, 3), candidate, GAPS, 0.1)
    assert (result.verdict, result.position, result.passed) == ("different", position, False)


def test_a_bound_of_zero_allows_no_near_tie():
    assert not compare((1, 2, 3), (1, 9, 9), (3.0, 0.0, 2.0), 0.0).passed


def test_missing_margins_are_an_error():
    with pytest.raises(ValueError, match="1 gaps for 3 reference tokens"):
        compare((1, 2, 3), (1, 2, 3), (1.0,), 0.0)
