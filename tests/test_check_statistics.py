"""Intervals and tests against published values and against their definitions."""

from math import comb

import pytest

from launcher.checks.statistics import mcnemar, wilson


# Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score without continuity correction).
@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(successes, total, low, high):
    assert wilson(successes, total) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("successes", "total"), [(1, 0), (3, 2), (-1, 4), (0, 0)])
def test_wilson_refuses_what_is_no_proportion(successes, total):
    with pytest.raises(ValueError, match=f"{successes} of {total}: no proportion"):
        wilson(successes, total)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (2, 0), (5, 15), (9, 9), (1, 12), (40, 22)])
def test_mcnemar_is_the_exact_binomial_test(first, second):
    n, k = first + second, min(first, second)
    tail = 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n
    assert mcnemar(first, second) == pytest.approx(min(1.0, tail))


def test_mcnemar_without_a_changed_pair():
    assert mcnemar(0, 0) == 1.0
