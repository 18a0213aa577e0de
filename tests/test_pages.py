"""Pages that hold a state or K and V: the reported figures, and properties of every plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fp4kv.formats import bytes_per_token
from sglang_fp4kv.pages import (
    Page, PagePlan, StateGroup, TokenGroup, check_pages, check_tokens, plan_pages, tokens_for_state,
)  # fmt: skip
from sglang_fp4kv.planner import PlanError

STATE = 3_207_168  # report 2


def test_the_reported_page():
    plan = plan_pages([StateGroup("linear", STATE), TokenGroup("full", bytes_per_token(256, 2))])
    assert (plan.tokens("full"), plan.page_bytes, plan.common_tokens) == (5568, STATE, 5568)
    assert [page.unused for page in plan.pages] == [0, 0]


def test_the_reported_failure_is_refused():
    """Planned with FP8's 1,024 bytes, allocated with NVFP4's 576."""
    assert tokens_for_state(STATE, 1024) == 3136
    with pytest.raises(
        PlanError,
        match="full: counted with 1,024 bytes a token, allocated with 576: 3,136 tokens x 576 bytes = "
        "1,806,336 bytes, less than the state page of 3,207,168; it takes 5,568 tokens",
    ):
        plan_pages([StateGroup("linear", STATE), TokenGroup("full", 576, counted_bytes=1024)])


def test_a_page_counted_too_small_is_refused():
    with pytest.raises(PlanError, match="counted with 288 bytes a token are too small for the 576 that are written"):
        plan_pages([TokenGroup("full", 576, counted_bytes=288)])


def test_a_count_that_holds_all_the_same():
    """Without states a width too large wastes nothing here, and a small state may still fit."""
    assert plan_pages([TokenGroup("full", 576, counted_bytes=1024)]).page_bytes == 16 * 576
    plan = plan_pages([StateGroup("s", 100), TokenGroup("full", 576, counted_bytes=1024)])
    assert plan.page_bytes == 16 * 576


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(3136, "1,806,336 bytes, less than"), (5552, "it takes 5,568 tokens"), (5567, "no multiple of 16"), (0, "no multiple")],
)
def test_tokens_that_do_not_hold_a_state(tokens, message):
    with pytest.raises(PlanError, match=message):
        check_tokens(tokens, 576, STATE)


def test_tokens_that_hold_a_state():
    check_tokens(5568, 576, STATE)
    check_tokens(16, 576, 1)


def test_sizes_that_do_not_divide():
    """Two widths and a state between them: whole steps of one, the rest of the other's page unused."""
    groups = [StateGroup("s", 10_001), TokenGroup("wide", 300, 16), TokenGroup("narrow", 70, 16)]
    plan = plan_pages(groups)
    assert plan.page_bytes == 10_080  # 9 x 16 x 70; three steps of the wide one would be 14,400
    assert (plan.tokens("wide"), plan.tokens("narrow"), plan.common_tokens) == (32, 144, 288)
    assert [page.unused for page in plan.pages] == [79, 480, 0]


def test_a_draft_group_has_its_targets_tokens():
    groups = [StateGroup("s", STATE), TokenGroup("full", 576, 16), TokenGroup("draft", 512, 24, follows="full")]
    plan = plan_pages(groups)
    assert plan.tokens("full") == plan.tokens("draft") == 5568
    assert plan.tokens("full") % 48 == 0
    wide = plan_pages([*groups[:2], TokenGroup("draft", 1024, 16, follows="full")])
    assert wide.tokens("full") == 3136 and wide.page_bytes == 3136 * 1024


def test_the_page_is_aligned():
    plan = plan_pages([StateGroup("s", STATE), TokenGroup("full", 576)], align_bytes=4096)
    assert plan.page_bytes == 3_207_168 and plan.page_bytes % 4096 == 0
    plan = plan_pages([StateGroup("s", STATE)], align_bytes=1 << 20)
    assert (plan.page_bytes, plan.common_tokens) == (4 << 20, 0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "a plan needs at least one group"),
        ([TokenGroup("a", 1), StateGroup("a", 1)], r"group names must differ, got \['a', 'a'\]"),
        ([TokenGroup("a", 0)], "a: token_bytes must be a positive int, got 0"),
        ([TokenGroup("a", 1.5)], "a: token_bytes must be a positive int, got 1.5"),
        ([TokenGroup("a", 1, 0)], "a: granularity must be a positive int, got 0"),
        ([TokenGroup("a", 1, counted_bytes=0)], "a: counted_bytes must be a positive int, got 0"),
        ([StateGroup("s", True)], "s: state_bytes must be a positive int, got True"),
        ([TokenGroup("a", 1, follows="b")], "a: follows must name an attention group .* got 'b'"),
        ([StateGroup("s", 1), TokenGroup("a", 1, follows="s")], "got 's'"),
        ([TokenGroup("a", 1, follows="a")], "got 'a'"),
    ],
)
def test_groups_that_cannot_be_meant(groups, message):
    with pytest.raises(ValueError, match=message):
        plan_pages(groups)


@pytest.mark.parametrize("align", [0, -1, 1.0, True])
def test_alignments_that_cannot_be_meant(align):
    with pytest.raises(ValueError, match=f"align_bytes must be a positive int, got {align}"):
        plan_pages([StateGroup("s", 1)], align_bytes=align)


def test_a_page_that_is_written_over_is_named():
    with pytest.raises(PlanError, match="full writes 577 bytes into a page of 576"):
        check_pages(PagePlan(576, (Page("s", 0, 100, 576), Page("full", 1, 577, 576)), 1))


granularities = st.sampled_from([1, 2, 3, 8, 16, 24, 32, 64, 100])
widths = st.integers(1, 5000)


@st.composite
def layouts(draw):
    """Groups of every kind, in any order: states, attention groups, and drafts that follow some."""
    states = [StateGroup(f"s{i}", n) for i, n in enumerate(draw(st.lists(st.integers(1, 10**7), max_size=3)))]
    leaders = [
        TokenGroup(f"t{i}", w, g)
        for i, (w, g) in enumerate(draw(st.lists(st.tuples(widths, granularities), max_size=4)))
    ]
    drafts = []
    if leaders:
        names = st.sampled_from([g.name for g in leaders])
        for i, (w, g, name) in enumerate(draw(st.lists(st.tuples(widths, granularities, names), max_size=3))):
            drafts.append(TokenGroup(f"d{i}", w, g, follows=name))
    groups = states + leaders + drafts
    if not groups:
        groups = [StateGroup("s", draw(st.integers(1, 10**7)))]
    return draw(st.permutations(groups))


@given(layouts(), st.sampled_from([1, 7, 256, 4096]))
def test_no_page_is_smaller_than_what_is_written(groups, align):
    plan = plan_pages(groups, align_bytes=align)
    by_name = {page.name: page for page in plan.pages}
    assert list(by_name) == [g.name for g in groups]
    assert plan.page_bytes % align == 0
    for group in groups:
        page = by_name[group.name]
        assert page.allocated == plan.page_bytes
        if isinstance(group, StateGroup):
            assert page.tokens == 0 and page.written == group.state_bytes <= plan.page_bytes
            continue
        # Written byte by byte, not from the plan's own sum.
        assert 0 < page.tokens * group.token_bytes == page.written <= plan.page_bytes
        assert page.tokens % group.granularity == 0
        assert plan.common_tokens % page.tokens == 0
        if group.follows:
            assert page.tokens == by_name[group.follows].tokens


@given(layouts())
def test_a_smaller_page_would_not_do(groups):
    """Without alignment the page is the smallest that is whole for one group and holds all."""
    plan = plan_pages(groups)
    leaders = [g for g in groups if isinstance(g, TokenGroup) and g.follows is None]
    if not leaders:
        assert plan.page_bytes == max(g.state_bytes for g in groups)
        return
    exact = [
        g for g in groups
        if isinstance(g, TokenGroup) and plan.tokens(g.name) * g.token_bytes == plan.page_bytes
    ]  # fmt: skip
    assert exact
    steps = {}
    for leader in leaders:
        family = [leader, *(g for g in groups if getattr(g, "follows", None) == leader.name)]
        granule = next(n for n in range(1, 10**6) if all(n % g.granularity == 0 for g in family))
        steps[leader.name] = granule * max(g.token_bytes for g in family)
        # The tokens are as many as fit in whole granules.
        assert plan.tokens(leader.name) == plan.page_bytes // steps[leader.name] * granule
    least = max([g.state_bytes for g in groups if isinstance(g, StateGroup)] + list(steps.values()))
    for step in steps.values():
        assert (plan.page_bytes - 1) // step * step < least


@given(st.integers(1, 10**8), widths, granularities)
def test_the_fewest_tokens_that_hold_a_state(state, width, granularity):
    tokens = tokens_for_state(state, width, granularity)
    assert tokens % granularity == 0
    assert (tokens - granularity) * width < state <= tokens * width
    check_tokens(tokens, width, state, granularity)
    plan = plan_pages([StateGroup("s", state), TokenGroup("t", width, granularity)])
    assert plan.tokens("t") == tokens and plan.page_bytes == tokens * width
    if tokens > granularity:
        with pytest.raises(PlanError, match="less than the state page"):
            check_tokens(tokens - granularity, width, state, granularity)


@given(st.integers(1, 10**7), widths, widths, granularities)
def test_a_miscounted_page_is_planned_right_or_refused(state, width, counted, granularity):
    """Whatever width a caller counts with, a plan that comes back holds what is written."""
    groups = [StateGroup("s", state), TokenGroup("t", width, granularity, counted_bytes=counted)]
    try:
        plan = plan_pages(groups)
    except PlanError:
        counted_tokens = tokens_for_state(state, counted, granularity)
        assert counted < width or counted_tokens * width < state
        return
    assert plan.page_bytes >= max(state, plan.tokens("t") * width)
    assert counted >= width and tokens_for_state(state, counted, granularity) * width >= state
