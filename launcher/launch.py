"""A launch as the rules see it: what was asked, and what SGLang 0.5.23 would make of it."""

from dataclasses import dataclass

from launcher.modelfacts import ModelFacts
from launcher.probe import GIB, Gpu, Machine
from sglang_fp4kv.formats import BLOCK_SIZE, PACKED_DTYPES, VALUE_BYTES, bytes_per_token
from sglang_fp4kv.planner import rank_heads
from sglang_fp4kv.served import BACKEND, DRAFT_DTYPE_DEFAULT, DRAFTERS, DRAFTERS_WITHOUT_MODEL

FP4 = PACKED_DTYPES
# _NVFP4_PREFILL_BACKEND and what follows from it: srt/arg_groups/kv_cache_hook.py @ 0.5.23.
_STOCK_DECODE = "trtllm_mha"
_SM100 = ((10, 0), (10, 3))
MODULES = ("EAGLE", "NEXTN")  # may be a module inside the target's checkpoint
# With a drafter: _handle_dflash and its neighbours in srt/arg_groups/speculative_hook.py @ 0.5.23.
DRAFT_SEATS = 48
MODEL_FLAG, DRAFT_FLAG = "--model-path", "--speculative-draft-model-path"


@dataclass(frozen=True)
class Launch:
    """SGLang's flags as a namespace, the two models' facts, the machine, and the draft a profile names."""

    flags: object
    target: ModelFacts | None
    draft: ModelFacts | None
    machine: Machine = Machine()
    draft_revision: str | None = None
    draft_sha256: str | None = None

    def asked(self, *names):
        """The flags ``names`` (SGLang's field names) as they would be typed, the unset ones left out."""
        parts = []
        for name in names:
            value = getattr(self.flags, name)
            if value is True:
                parts.append(f"--{name.replace('_', '-')}")
            elif value not in (None, False):
                parts.append(f"--{name.replace('_', '-')} {value}")
        return " ".join(parts)

    @property
    def kv_dtype(self):
        return self.flags.kv_cache_dtype

    @property
    def gpu(self):
        """The Gpu, None where it is unknown or the server runs on the CPU."""
        return self.machine.gpu if isinstance(self.machine.gpu, Gpu) and not self.on_cpu else None

    @property
    def on_cpu(self):
        """Whether it is for the embedded server, which tests and the demo run without a GPU."""
        return self.flags.device == "cpu"

    @property
    def in_bf16(self):
        """Whether SGLang runs the target in BF16, as far as is known: not where its config names no dtype."""
        asked, target = self.flags.dtype, self.target
        if asked == "auto":
            return target is None or target.dtype == "bfloat16"
        return asked == "bfloat16"

    @property
    def state_dtype(self):
        """What recurrent states are kept in: the flag, else the config's, else FP32."""
        stored = self.target.text.get("mamba_ssm_dtype") if self.target is not None else None
        return self.flags.mamba_ssm_dtype or stored or "float32"

    @property
    def models(self):
        """(the flag that names it, its ModelFacts or None) of the target and of the draft."""
        return (MODEL_FLAG, self.target), (DRAFT_FLAG, self.draft)

    @property
    def backends(self):
        """(prefill, decode) as they were asked for; None where nothing was."""
        base = self.flags.attention_backend
        return (
            self.flags.prefill_attention_backend or base,
            self.flags.decode_attention_backend or base,
        )

    @property
    def effective_backends(self):
        """(prefill, decode) as SGLang resolves them; None where it chooses by GPU and model."""
        prefill, decode = self.backends
        if self.kv_dtype != "nvfp4" or BACKEND in (prefill, decode):
            return prefill, decode
        if prefill is None:
            sm100 = self.gpu is not None and self.gpu.capability in _SM100
            prefill = _STOCK_DECODE if sm100 else "flashinfer"
        # Stock NVFP4 always decodes on trtllm_mha, whatever --attention-backend says.
        return prefill, self.flags.decode_attention_backend or _STOCK_DECODE

    @property
    def on_triton(self):
        return self.backends == (BACKEND, BACKEND)

    @property
    def drafter(self):
        asked = self.flags.speculative_algorithm
        return asked.upper() if asked else None

    @property
    def draft_model(self):
        """Facts of the model that drafts: the target's own where a module inside it does; None without one."""
        if self.drafter in (None, *DRAFTERS_WITHOUT_MODEL):
            return None
        named = self.flags.speculative_draft_model_path is not None
        return self.draft if named or self.drafter not in MODULES else self.target

    @property
    def drafts_inside(self):
        """Whether a module of the target's own checkpoint drafts."""
        model = self.draft_model
        known = self.drafter in MODULES and model is not None and self.target is not None
        return known and model.folder == self.target.folder

    @property
    def draft_layers(self):
        """Layers that keep K and V in the drafter's pool; None where its config does not say."""
        model = self.draft_model
        if model is None or self.drafter not in MODULES:
            return model and model.num_layers
        module = model.text.get("num_nextn_predict_layers")
        if type(module) is int and module > 0:
            return module
        return 1 if self.drafts_inside else model.num_layers

    @property
    def draft_dtype(self):
        """The drafter's KV dtype in effect: asked, or ours next to NVFP4, or the target's."""
        asked = self.flags.speculative_draft_kv_cache_dtype
        if asked is not None:
            return asked
        return DRAFT_DTYPE_DEFAULT if self.kv_dtype == "nvfp4" and self.on_triton else self.kv_dtype

    @property
    def draft_tokens(self):
        """Tokens of a drafted block that were asked for; None where the checkpoint decides."""
        block = self.flags.speculative_dflash_block_size
        return self.flags.speculative_num_draft_tokens if block is None else block

    @property
    def context(self):
        """Tokens one request may have; None where neither flag nor config says."""
        return self.flags.context_length or (self.target.max_positions if self.target else None)

    @property
    def seats(self):
        """Requests served at once; None where SGLang derives it from the pool."""
        asked = self.flags.max_running_requests
        return asked or (DRAFT_SEATS if self.drafter in DRAFTERS else None)


@dataclass(frozen=True)
class Memory:
    """One GPU's share, in bytes; None where something it needs is unknown.

    ``target_cell``, ``draft_cell``: per token. ``budget``: for both pools. ``fraction``: None where
    SGLang chooses it; then ``budget`` is an upper bound.
    """

    total: int | None
    fraction: float | None
    weights: int | None
    target_cell: int | None
    draft_cell: int | None
    layer_cell: int | None  # one decoded layer's K and V in BF16

    @property
    def cell(self):
        known = None not in (self.target_cell, self.draft_cell)
        return self.target_cell + self.draft_cell if known else None

    @property
    def budget(self):
        if self.total is None or self.weights is None:
            return None
        return int(self.total * (1.0 if self.fraction is None else self.fraction)) - self.weights

    @property
    def tokens(self):
        """Tokens that both pools can hold."""
        return max(0, self.budget) // self.cell if self.budget is not None and self.cell else None

    def budget_text(self):
        """The budget's arithmetic as text."""
        fraction = "1 (SGLang chooses less)" if self.fraction is None else f"{self.fraction:g}"
        return (
            f"{gib(self.total)} x {fraction} - weights {gib(self.weights)} = {gib(self.budget)}"
        )


def gib(count):
    return f"{count / GIB:.2f} GB"


def _cell(facts, tp, dtype, layers):
    """Bytes a token takes in ``layers`` layers on one GPU; None where something it needs is unknown."""
    if not (facts and facts.head_dim and facts.kv_heads and layers):
        return None
    if dtype in FP4 and (facts.mla or facts.head_dim % BLOCK_SIZE or facts.v_head_dim % BLOCK_SIZE):
        return None
    try:
        heads = rank_heads(facts.kv_heads, tp)
    except ValueError:  # SGLang stops at such heads by itself
        return None
    return bytes_per_token(
        facts.head_dim, heads, layers, dtype=dtype, v_head_dim=facts.v_head_dim
    )


def _draft_cell(launch, tp):
    if launch.drafter in (None, *DRAFTERS_WITHOUT_MODEL):
        return 0
    if launch.draft_dtype not in (*FP4, *VALUE_BYTES):
        return None
    return _cell(launch.draft_model, tp, launch.draft_dtype, launch.draft_layers)


def memory(launch):
    """The launch's Memory on one GPU; pools of an FP4 target only."""
    tp, target, draft = max(1, launch.flags.tp_size), launch.target, launch.draft_model
    with_draft = launch.drafter not in (None, *DRAFTERS_WITHOUT_MODEL)
    parts = [target, draft] if with_draft and not launch.drafts_inside else [target]
    sizes = [facts.checkpoint.weights_bytes if facts else None for facts in parts]
    layers = target.attention_layers if target else None
    return Memory(
        total=launch.gpu.memory_bytes if launch.gpu else None,
        fraction=launch.flags.mem_fraction_static,
        weights=None if None in sizes else sum(sizes) // tp,
        target_cell=_cell(target, tp, "nvfp4", layers and len(layers) * target.passes),
        draft_cell=_draft_cell(launch, tp),
        layer_cell=_cell(target, tp, "bf16", 1),
    )
