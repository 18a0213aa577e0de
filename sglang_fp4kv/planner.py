"""How many tokens fit: bytes a token, recurrent states and the budget SGLang divides. Standard library only.

Everything is one GPU's share. Sizes of K and V come from :mod:`sglang_fp4kv.formats`; how SGLang 0.5.23
splits a budget is read in srt/model_executor/pool_configurator.py (DefaultPoolConfigurator) and
srt/mem_cache/kv_cache_configurator.py (_handle_max_mamba_cache), whose rounding is kept to the token.
"""

from dataclasses import dataclass

from sglang_fp4kv.formats import VALUE_BYTES, bytes_per_token

GIB = 1 << 30
# --mamba-full-memory-ratio where it is left out: states get 0.9 of what KV gets.
STATE_RATIO = 0.9
# State slots a request may hold, by --mamba-radix-cache-strategy; the second figure: without overlap.
_TRACKED = {"no_buffer": (0, 0), "extra_buffer": (2, 1), "extra_buffer_lazy": (1, 1)}
_SLOTS_PER_REQUEST = 3


class PlanError(ValueError):
    """A plan that cannot be had; its text shows the arithmetic."""


def rank_heads(heads: int, tp: int, what: str = "KV heads") -> int:
    """Heads one of ``tp`` GPUs keeps: its share, or 1 where there are more GPUs than heads.

    Raises: ValueError when neither divides the other.
    """
    if heads <= 0 or tp <= 0:
        raise ValueError(f"{what} and GPUs must be positive, got {heads} and {tp}")
    if heads % tp and tp % heads:
        raise ValueError(f"{heads} {what} cannot be split or copied evenly over {tp} GPUs")
    return max(1, heads // tp)


@dataclass(frozen=True)
class Attention:
    """Layers that keep K and V of every token. ``kv_heads``: on one GPU; dims in elements."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes a token takes in all these layers, stored as ``dtype``."""
        return self._bytes(dtype, self.layers)

    def layer_bytes(self, dtype: str) -> int:
        """The same in one layer; also what a decoded workspace of one layer costs a token."""
        return self._bytes(dtype, 1)

    def _bytes(self, dtype, layers):
        return bytes_per_token(self.head_dim, self.kv_heads, layers, dtype=dtype, v_head_dim=self.v_head_dim)


@dataclass(frozen=True)
class GatedDelta:
    """Recurrent (gated delta rule) layers as Qwen3-Next and Qwen3.5 have them; heads of the whole model.

    Raises: ValueError when the value heads do not split over the GPUs.
    Source: Mamba2StateShape.create, srt/configs/mamba_utils.py @ 0.5.23.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    tp: int = 1
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"

    def __post_init__(self):
        if self.value_heads % self.tp:
            raise ValueError(f"{self.value_heads} value heads cannot be split over {self.tp} GPUs")

    @property
    def layer_bytes(self) -> int:
        """Bytes of one request's state in one layer: the conv window and the [V, K] state of each head."""
        groups = self.key_heads
        if groups % self.tp:
            groups = self.tp  # each GPU keeps a copy of what its heads need
        channels = self.value_heads * self.value_dim + 2 * groups * self.key_dim
        conv = channels // self.tp * (self.conv_kernel - 1) * VALUE_BYTES[self.conv_dtype]
        cells = self.value_heads // self.tp * self.value_dim * self.key_dim
        return conv + cells * VALUE_BYTES[self.state_dtype]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot: one request's state in all these layers."""
        return self.layers * self.layer_bytes


def slots_per_request(strategy: str = "extra_buffer", *, radix_cache=True, overlap=True) -> int:
    """State slots SGLang reckons with for each running request (_calculate_mamba_ratio)."""
    if not radix_cache:
        return 1
    return _SLOTS_PER_REQUEST + _TRACKED[strategy][0 if overlap else 1]


@dataclass(frozen=True)
class States:
    """What SGLang sets aside for recurrent states, and what that leaves for K and V, in bytes.

    ``slots`` leave out the pool's padding slot; ``verify_bytes``: states of a drafted block's steps.
    """

    slots: int
    slot_bytes: int
    pool_bytes: int
    verify_bytes: int
    left_bytes: int


def plan_states(
    budget_bytes: int,
    slot_bytes: int,
    *,
    per_request: int,
    ratio: float = STATE_RATIO,
    slots: int | None = None,
    requests: int | None = None,
    radix_cache: bool = True,
    draft_tokens: int = 0,
) -> States:
    """Splits a budget between recurrent states and K and V as SGLang does.

    ``per_request``: see slots_per_request. ``slots``: --max-mamba-cache-size. ``requests``:
    --max-running-requests, which a drafter needs. ``draft_tokens``: of a drafted block, 0 without.
    Raises: PlanError when the slots hold no request, or nothing is left for K and V.
    """
    rest = budget_bytes / GIB  # SGLang reckons in floats of GiB; the same rounding needs the same
    per_slot = slot_bytes

    def verify(count):
        return per_slot * (count + 1) * draft_tokens  # + 1: the pool's padding slot

    if slots is not None:
        running = min(max(1, requests), slots // per_request) if draft_tokens else 0
    elif not radix_cache and requests is not None:
        slots = running = max(1, requests)
    else:
        share = rest * ratio / (1 + ratio) * GIB
        if draft_tokens:
            slots = int(
                (share - per_slot * (1 + draft_tokens)) // (per_slot * (1 + draft_tokens / per_request))
            )
            running = min(max(1, requests), slots // per_request)
        else:
            slots, running = int((share - per_slot) // per_slot), 0
    if slots < per_request:
        given = f"{budget_bytes:,} bytes leave {max(0, slots)} slots"
        raise PlanError(
            f"{given} for recurrent states of {slot_bytes:,} bytes each; a request needs {per_request}"
        )
    verify_bytes = verify(running) if draft_tokens else 0
    if draft_tokens:
        rest -= verify_bytes / GIB
    pool_bytes = (slots + 1) * per_slot
    left = int((rest - pool_bytes / GIB) * GIB)
    if left <= 0:
        raise PlanError(
            f"recurrent states take {pool_bytes + verify_bytes:,} bytes ({slots} + 1 slots of "
            f"{slot_bytes:,}) and leave nothing of {budget_bytes:,} for K and V"
        )
    return States(slots, slot_bytes, pool_bytes, verify_bytes, left)


def plan_tokens(budget_bytes: int, cell_bytes: int, *, page_size: int = 1, limit: int | None = None) -> int:
    """Tokens the pools hold: ``max_total_num_tokens`` of a server with this budget.

    ``cell_bytes``: of one token in all pools; ``limit``: --max-total-tokens. Whole pages only.
    Raises: ValueError unless cell_bytes and page_size are positive; PlanError when no page fits.
    """
    if cell_bytes <= 0 or page_size <= 0:
        raise ValueError(f"bytes and page size must be positive, got {cell_bytes} and {page_size}")
    tokens = max(0, budget_bytes) // cell_bytes // page_size * page_size
    if limit is not None and limit < tokens:
        tokens = limit // page_size * page_size
    if tokens <= 0:
        raise PlanError(
            f"{budget_bytes:,} bytes hold no page of {page_size} tokens of {cell_bytes:,} bytes"
            if limit is None or limit >= page_size
            else f"a limit of {limit:,} tokens is less than a page of {page_size}"
        )
    return tokens
