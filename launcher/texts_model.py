"""Texts of the refusals about the target, about what moves KV elsewhere, and about memory."""

from launcher.texts import Text

_FP8 = "--kv-cache-dtype fp8_e4m3"
_SERVER = "sglang_fp4kv/resolution.py, which refuses it in the server too"
_HOOKS = "sglang_fp4kv/hooks.py, which refuses it in the server too; public issue 36121 of SGLang"
_SIZES = "sglang_fp4kv/formats.py; srt/mem_cache/kv_cache_configurator.py @ sglang 0.5.23"

TEXTS = {
    "FP4-014": Text(
        name="head-dim-without-whole-blocks",
        says="head_dim {head_dim} is not a multiple of {block}",
        why="NVFP4 keeps one scale for each {block} elements along head_dim, and a block cannot span two heads",
        evidence="sglang_fp4kv/formats.py",
        help=_FP8,
    ),
    "FP4-015": Text(
        name="k-and-v-of-different-width",
        says="K is {head_dim} wide and V is {v_head_dim}",
        why="the packed pool and its readers keep K and V rows of one width",
        evidence="sglang_fp4kv/pool.py",
        help=_FP8,
    ),
    "FP4-038": Text(
        name="nvfp4-on-mla",
        says="{path} is a model with latent attention (MLA)",
        why="it keeps one latent row a token and no K and V, for which SGLang has another FP4 codec and this kit none",
        evidence=_SERVER,
        help=_FP8,
    ),
    "FP4-039": Text(
        name="nvfp4-on-sliding-window",
        says="{path} has layers with a sliding window",
        why="SGLang gives the window's pool no quantization method, so its rows would be written and read in another format",
        evidence=_SERVER,
        help=_FP8,
    ),
    "FP4-040": Text(
        name="nvfp4-on-recurrent-layers",
        says="{path} has recurrent layers beside its attention",
        why="SGLang's pool for such models passes on scale 1.0 or no layer at all, and reports half the width of packed values",
        evidence=_SERVER,
        help=_FP8,
    ),
    "FP4-041": Text(
        name="attention-sinks",
        says="{path} has attention sinks",
        why="a sink adds a term to each softmax, which the packed readers do not have",
        evidence="sglang_fp4kv/attention.py, which refuses it at the first batch",
        help=_FP8,
    ),
    "FP4-042": Text(
        name="kv-heads-not-divisible",
        says="{heads} KV heads cannot be divided by tensor parallel {tp}",
        why="SGLang then keeps max(1, heads // tp) a GPU, so heads are dropped or held twice and the bytes of a token are not those of the plan",
        evidence="get_num_kv_heads in srt/configs/model_config.py @ sglang 0.5.23",
        help=_FP8,
    ),
    "FP4-043": Text(
        name="kv-scales-unusable",
        says="{path} holds {scales}",
        why="a KV scale multiplies whatever is read, so it must be finite and above zero; SGLang writes 1.0 where a checkpoint has none, so exactly 1.0 cannot be told from a scale that was lost",
        evidence="sglang_fp4kv/scales.py; srt/layers/quantization/kv_cache.py @ sglang 0.5.23",
        help=_FP8,
    ),
    "FP4-044": Text(
        name="kv-scales-missing",
        says="{path} has KV scales, but not for both K and V of layers {layers} (of {total})",
        why="a layer without its own would be read with a default that the calibration did not choose",
        evidence="sglang_fp4kv/scales.py",
        help=_FP8,
    ),
    "FP4-045": Text(
        name="safetensors-unreadable",
        says="the weights of {path} cannot be read",
        why="{problem}",
        evidence="the files themselves",
        help="fetch the checkpoint again",
    ),
    "FP4-046": Text(
        name="fp4-unified-memory",
        says="unified memory or its page-major layout is asked for with FP4 KV",
        why="its pool allocates no block scales",
        evidence="srt/arg_groups/kv_cache_hook.py @ sglang 0.5.23; sglang_fp4kv/resolution.py",
        help="leave out --enable-unified-memory and --enable-page-major-kv-layout",
    ),
    "FP4-047": Text(
        name="fp4-hierarchical-cache",
        says="the hierarchical cache is asked for with FP4 KV",
        why="its host pool takes the codes without their block scales, so what comes back decodes to other values",
        evidence=_HOOKS,
        help="leave out --enable-hierarchical-cache",
    ),
    "FP4-048": Text(
        name="fp4-lmcache",
        says="LMCache is asked for with FP4 KV",
        why="it takes the codes without their block scales, so what comes back decodes to other values",
        evidence=_HOOKS,
        help="leave out --enable-lmcache",
    ),
    "FP4-049": Text(
        name="fp4-flexkv",
        says="FlexKV is asked for with FP4 KV",
        why="it takes the codes without their block scales, so what comes back decodes to other values",
        evidence=_HOOKS,
        help="leave out --enable-flexkv and --radix-cache-backend",
    ),
    "FP4-050": Text(
        name="fp4-external-linker",
        says="an external linker is asked for with FP4 KV",
        why="it transfers the codes without their block scales, so what comes back decodes to other values",
        evidence=_HOOKS,
        help="leave out --enable-unified-cache-external-linker",
    ),
    "FP4-051": Text(
        name="fp4-pd-disaggregation",
        says="prefill and decode on separate servers are asked for with FP4 KV",
        why="the transfer registers the buffers of the codes and not those of the block scales",
        evidence=_HOOKS,
        help="leave out --disaggregation-mode and --enable-pd-role-switch",
    ),
    "FP4-052": Text(
        name="fp4-decode-context-parallel",
        says="decode context parallelism is asked for with FP4 KV",
        why="its masked write of one rank's share of the slots has no packed writer",
        evidence=f"{_SERVER}; sglang_fp4kv/pool.py",
        help="--dcp-size 1",
    ),
    "FP4-053": Text(
        name="fp4-kv-sharding",
        says="sharding of the KV cache is asked for with FP4 KV",
        why="the sharded pages carry no block scales",
        evidence=_SERVER,
        help="leave out --enable-kv-cache-sharding",
    ),
    "FP4-054": Text(
        name="fp4-hisparse",
        says="HiSparse is asked for with FP4 KV",
        why="it moves parts of the pool to the host and back without their block scales",
        evidence=_SERVER,
        help="leave out --enable-hisparse",
    ),
    "FP4-055": Text(
        name="one-request-does-not-fit",
        says="one request of {context} tokens does not fit; there is room for {room}",
        why="{sum}",
        evidence=_SIZES,
        help="--context-length {room}",
    ),
    "FP4-056": Text(
        name="pools-over-the-budget",
        says="target and drafter together need more than the memory there is for KV",
        why="{sum}",
        evidence=_SIZES,
        help="a larger --mem-fraction-static or --gpu-memory, or a smaller --max-total-tokens",
    ),
    "FP4-057": Text(
        name="drafter-does-not-fit-beside-mx-fp4",
        says="with the pool at the fraction's maximum nothing is left for reading it and for the drafter",
        why="every read decodes a layer of the whole pool to BF16: {sum}",
        evidence="MHATokenToKVPool in srt/mem_cache/memory_pool.py @ sglang 0.5.23; sglang_fp4kv/formats.py",
        help="--kv-cache-dtype nvfp4 --attention-backend triton",
    ),
}
