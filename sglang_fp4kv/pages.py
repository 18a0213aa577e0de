"""Pages that hold either recurrent states or K and V. Standard library only.

An allocator that hands the same physical page to a recurrent layer or to an attention layer must make it
large enough for both: one layer's state, and one layer's K and V of the page's tokens. The number of tokens
is therefore planned from the bytes that are written, never from a width they would have in another format.

SGLang 0.5.23 keeps states and KV in pools of their own unless --enable-unified-memory is given; vLLM does
not. All sizes are bytes of one GPU.
"""

import math
from dataclasses import dataclass

from sglang_fp4kv.planner import PlanError

GRANULARITY = 16  # tokens; a page is a whole number of the blocks that readers step through


@dataclass(frozen=True)
class TokenGroup:
    """One attention layer's pages.

    ``token_bytes``: what the pool writes for a token (formats.bytes_per_token). ``granularity``: tokens
    a page holds a multiple of. ``follows``: the group whose slots this one is indexed by, as a drafter's pool is
    by its target's; it then has as many tokens a page. ``counted_bytes``: what the caller reckons a token with,
    where that is another figure; the plan is made with it and refused when it does not hold.
    """

    name: str
    token_bytes: int
    granularity: int = GRANULARITY
    follows: str | None = None
    counted_bytes: int | None = None


@dataclass(frozen=True)
class StateGroup:
    """One recurrent layer's pages: each holds one request's state of ``state_bytes``."""

    name: str
    state_bytes: int


@dataclass(frozen=True)
class Page:
    """One group's page: ``tokens`` (0 for a state), bytes ``written`` of the ``allocated``."""

    name: str
    tokens: int
    written: int
    allocated: int

    @property
    def unused(self) -> int:
        return self.allocated - self.written


@dataclass(frozen=True)
class PagePlan:
    """``page_bytes``: of the physical page all groups share. ``common_tokens``: the least number of
    tokens at which the pages of all groups end together; a prefix is shared in multiples of it."""

    page_bytes: int
    pages: tuple
    common_tokens: int

    def tokens(self, name: str) -> int:
        """Tokens a page of the group ``name`` holds."""
        return next(page.tokens for page in self.pages if page.name == name)


def _check(groups):
    if not groups:
        raise ValueError("a plan needs at least one group")
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise ValueError(f"group names must differ, got {names}")
    for group in groups:
        figures = (
            {"state_bytes": group.state_bytes}
            if isinstance(group, StateGroup)
            else {
                "token_bytes": group.token_bytes,
                "granularity": group.granularity,
                "counted_bytes": group.token_bytes if group.counted_bytes is None else group.counted_bytes,
            }
        )
        for what, value in figures.items():
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ValueError(f"{group.name}: {what} must be a positive int, got {value!r}")


def _families(groups):
    """[(leader, followers)] of the token groups."""
    tokens = {g.name: g for g in groups if isinstance(g, TokenGroup)}
    for group in tokens.values():
        if group.follows is None:
            continue
        leader = tokens.get(group.follows)
        if leader is None or leader.follows is not None:
            raise ValueError(
                f"{group.name}: follows must name an attention group with slots of its own, "
                f"got {group.follows!r}"
            )
    return [
        (leader, [g for g in tokens.values() if g.follows == leader.name])
        for leader in tokens.values()
        if leader.follows is None
    ]


def plan_pages(groups, *, align_bytes: int = 1) -> PagePlan:
    """The smallest page that holds every group's page, and the tokens each group fits into it.

    ``groups``: TokenGroup and StateGroup, one for each kind of layer; ``align_bytes``: the page is a multiple
    of it. A page is never smaller than a state, and holds whole granules of every group; a follower and
    its leader hold the same tokens, a multiple of both granularities.
    Raises: ValueError for figures that cannot be meant; PlanError when a group's counted_bytes give a page
    that what is written does not fit, or one smaller than a state.
    """
    groups = list(groups)
    _check(groups)
    if isinstance(align_bytes, bool) or not isinstance(align_bytes, int) or align_bytes <= 0:
        raise ValueError(f"align_bytes must be a positive int, got {align_bytes!r}")
    families = _families(groups)
    states = [group for group in groups if isinstance(group, StateGroup)]
    for group in groups:
        if isinstance(group, TokenGroup) and group.counted_bytes not in (None, group.token_bytes):
            _refuse_miscount(group, states)
    # A family's step: the fewest tokens and bytes its page grows by.
    steps = []
    for leader, followers in families:
        members = [leader, *followers]
        granule = math.lcm(*(member.granularity for member in members))
        steps.append((members, granule, granule * max(member.token_bytes for member in members)))
    least = max([state.state_bytes for state in states] + [step for _, _, step in steps])
    # Whole steps of one family leave that family no gap; the others fill theirs as far as they can.
    page_bytes = min([_up(least, step) for _, _, step in steps] or [least])
    page_bytes = _up(page_bytes, align_bytes)
    fitted = {
        member.name: page_bytes // step * granule for members, granule, step in steps for member in members
    }
    pages = tuple(
        Page(group.name, 0, group.state_bytes, page_bytes)
        if isinstance(group, StateGroup)
        else Page(group.name, fitted[group.name], fitted[group.name] * group.token_bytes, page_bytes)
        for group in groups
    )
    plan = PagePlan(page_bytes, pages, math.lcm(*fitted.values()) if fitted else 0)
    check_pages(plan)
    return plan


def check_pages(plan: PagePlan) -> None:
    """Raises PlanError naming the first group that writes more than its page."""
    for page in plan.pages:
        if page.written > page.allocated:
            raise PlanError(f"{page.name} writes {page.written:,} bytes into a page of {page.allocated:,}")


def tokens_for_state(state_bytes: int, token_bytes: int, granularity: int = GRANULARITY) -> int:
    """The fewest tokens, in whole granules, whose K and V in one layer take a state's bytes or more.

    Raises: ValueError unless all three are positive ints.
    """
    group = TokenGroup("attention", token_bytes, granularity)
    _check([group, StateGroup("state", state_bytes)])
    return _up(-(-state_bytes // token_bytes), granularity)


def check_tokens(tokens: int, token_bytes: int, state_bytes: int, granularity: int = GRANULARITY):
    """Whether a page of ``tokens`` holds a state of ``state_bytes``.

    Raises: PlanError with the arithmetic and the tokens that are needed where it does not, or where tokens
    is no multiple of the granularity.
    """
    needed = tokens_for_state(state_bytes, token_bytes, granularity)
    if tokens <= 0 or tokens % granularity:
        raise PlanError(f"{tokens:,} tokens are no multiple of {granularity}")
    if tokens * token_bytes < state_bytes:
        raise PlanError(
            f"{tokens:,} tokens x {token_bytes:,} bytes = {tokens * token_bytes:,} bytes, less than the "
            f"state page of {state_bytes:,}; it takes {needed:,} tokens"
        )


def _refuse_miscount(group, states):
    largest = max((state.state_bytes for state in states), default=0)
    if group.counted_bytes < group.token_bytes:
        raise PlanError(
            f"{group.name}: pages counted with {group.counted_bytes:,} bytes a token are too small for "
            f"the {group.token_bytes:,} that are written"
        )
    if not largest:
        return
    tokens = tokens_for_state(largest, group.counted_bytes, group.granularity)
    try:
        check_tokens(tokens, group.token_bytes, largest, group.granularity)
    except PlanError as error:
        raise PlanError(
            f"{group.name}: counted with {group.counted_bytes:,} bytes a token, allocated with "
            f"{group.token_bytes:,}: {error}"
        ) from None


def _up(value, step):
    return -(-value // step) * step
