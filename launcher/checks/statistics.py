"""Intervals and tests for counts of answers, by SciPy."""


def wilson(successes, total, confidence=0.95):
    """The Wilson score interval of a proportion as (low, high).

    Raises: ValueError when there is nothing to count or more successes than trials.
    """
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"{successes} of {total}: no proportion")
    from scipy.stats import binomtest

    interval = binomtest(successes, total).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar(only_first, only_second):
    """Two-sided p-value of McNemar's exact test; the arguments count the pairs right on one side alone."""
    if only_first + only_second == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(only_first, only_first + only_second, 0.5).pvalue)
