"""Texts of the refusals about backends, GPU, the drafter and its pool."""

from launcher.texts import Text

_RESULT = "tests/bench/results/h200_pair.json"
_KV_HOOK = "srt/arg_groups/kv_cache_hook.py @ sglang 0.5.23"
_SPEC_HOOK = "srt/arg_groups/speculative_hook.py @ sglang 0.5.23"
_SERVER = "sglang_fp4kv/resolution.py, which refuses it in the server too"
_TRITON = "--kv-cache-dtype nvfp4 --attention-backend triton"

TEXTS = {
    "FP4-010": Text(
        name="nvfp4-without-triton",
        says="NVFP4 KV is asked for with prefill on {prefill} and decode on {decode}",
        why="this kit reads packed NVFP4 through Triton alone; what SGLang itself does with another backend has no result on file here",
        evidence=f"{_KV_HOOK}; {_RESULT} is Triton's",
        help=_TRITON,
    ),
    "FP4-011": Text(
        name="draft-pool-not-plain",
        says="the drafter's KV dtype cannot be {dtype} next to a target in {target}",
        why="the drafter commits a prefix of each block into its own pool, which is plain FP8 E4M3 or BF16; nothing reads a drafter's pool in FP4, and auto is priced differently than it is built",
        evidence="srt/speculative/dflash_worker_v2.py and srt/mem_cache/draft_kv_budget.py @ sglang 0.5.23",
        help="--speculative-draft-kv-cache-dtype fp8_e4m3",
    ),
    "FP4-012": Text(
        name="draft-without-block-size",
        says="the draft {path} does not say its block size",
        why="SGLang falls back to 16 when the config has none, and a drafter trained on another size then proposes nonsense",
        evidence=_SPEC_HOOK,
        help="write the block_size the draft was trained with into its config.json",
    ),
    "FP4-013": Text(
        name="draft-names-a-missing-layer",
        says="the draft wants the output of target layers {wrong}, and the target has {layers} layers",
        why="a layer's output is captured as the next layer's input, so an id must be below {limit}; any other captures nothing and the drafter gets fewer features than it was trained on",
        evidence="set_dflash_layers_to_capture in srt/models/qwen3.py @ sglang 0.5.23",
        help="use the draft that was trained for this target",
    ),
    "FP4-017": Text(
        name="nvfp4-verify-on-flashinfer",
        says="NVFP4 KV with {drafter} is asked for with prefill on {prefill} and decode on {decode}",
        why="a drafted block is verified on the prefill backend, and FlashInfer has no FP4 verify: it reads an FP8 workspace that the host prepares for prefill and nobody refreshes for verify",
        evidence=f"{_KV_HOOK}; public issues 36001 and 36010 of SGLang",
        help=_TRITON,
    ),
    "FP4-018": Text(
        name="nvfp4-verify-on-trtllm-mha",
        says="NVFP4 KV with {drafter} is asked for with prefill on {prefill} and decode on {decode}",
        why="the drafted block is not a decode: trtllm_mha serves NVFP4 on SM100 alone, and there the commit of a block's accepted prefix does not write its scale layout",
        evidence=_KV_HOOK,
        help=_TRITON,
    ),
    "FP4-019": Text(
        name="prefill-and-decode-differ",
        says="prefill is on {prefill} and decode on {decode}",
        why="verify runs on the prefill backend and decode on the other, and both read one packed pool; only Triton with Triton reads it in every phase",
        evidence="sglang_fp4kv/resolution.py; speculative_attention_mode @ sglang 0.5.23",
        help=f"{_TRITON} --prefill-attention-backend triton --decode-attention-backend triton",
    ),
    "FP4-020": Text(
        name="stock-nvfp4-off-blackwell",
        says="NVFP4 KV without Triton is asked for on {sm}",
        why="SGLang's own NVFP4 recipe starts on SM100 and SM120 alone",
        evidence=f"handle_kv4_compatibility in {_KV_HOOK}",
        help=_TRITON,
    ),
    "FP4-021": Text(
        name="dequant-dtype-without-meaning",
        says="--prefill-kv-cache-dequant-dtype {dtype} is asked for where nothing is dequantized",
        why="the flag chooses the workspace of SGLang's own NVFP4 prefill; another KV dtype has none, and Triton reads packed bytes",
        evidence=f"{_KV_HOOK}; sglang_fp4kv/resolution.py",
        help="--prefill-kv-cache-dequant-dtype auto",
    ),
    "FP4-022": Text(
        name="nvfp4-deterministic-inference",
        says="deterministic inference is asked for with NVFP4 KV",
        why="its unified kernel reads plain K and V, and would take packed codes for values",
        evidence=_SERVER,
        help="leave out --enable-deterministic-inference",
    ),
    "FP4-023": Text(
        name="nvfp4-mixed-chunk",
        says="mixed chunks are asked for with NVFP4 KV",
        why="a mixed batch sends decodes through prefill, which reads their own K and V in BF16 and not as the pool holds them",
        evidence=_SERVER,
        help="leave out --enable-mixed-chunk",
    ),
    "FP4-024": Text(
        name="fp4-hnd-layout",
        says="the HND layout of the KV pool is switched on",
        why="the packed pool and its readers have the NHD layout, one row of codes and scales a token and head",
        evidence="srt/mem_cache/memory_pool.py @ sglang 0.5.23; sglang_fp4kv/pool.py",
        help="unset SGLANG_USE_HND_KVCACHE",
    ),
    "FP4-025": Text(
        name="fp4-post-capture-sizing",
        says="sizing the KV pool after graph capture is switched on",
        why="SGLang builds a quantized pool before capture all the same, so the switch would be dropped in silence",
        evidence="srt/mem_cache/kv_cache_configurator.py @ sglang 0.5.23; sglang_fp4kv/resolution.py",
        help="unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    ),
    "FP4-026": Text(
        name="gpu-untested",
        says="NVFP4 KV on Triton is asked for on {gpu}, and no result from {sm} is on file",
        why="the kernels were compiled for sm_90, 100, 103, 120 and 121, and have answered on sm_90 alone",
        evidence=_RESULT,
        help="--allow FP4-026, or --kv-cache-dtype fp8_e4m3",
    ),
    "FP4-027": Text(
        name="several-gpus-untested",
        says="NVFP4 KV is asked for across several GPUs, and no result from more than one is on file",
        why="every run on file has one GPU; KV heads split over several were not compared",
        evidence=_RESULT,
        help="--allow FP4-027, or --kv-cache-dtype fp8_e4m3",
    ),
    "FP4-028": Text(
        name="fp4-writer-copies-bf16",
        says="{drafter} is asked for with a drafter pool that inherits the target's FP4",
        why="the commit of a block's accepted prefix copies BF16 rows into the pool and knows no block scales, so the server dies at its first batch",
        evidence="MHATokenToKVPool.set_kv_buffer_prefix_valid in srt/mem_cache/memory_pool.py @ sglang 0.5.23",
        help=f"{_TRITON} --speculative-draft-kv-cache-dtype fp8_e4m3",
    ),
    "FP4-029": Text(
        name="fp4-mx-block16-untested",
        says="fp4_mx_block16 KV is asked for, and no result with it is on file",
        why="SGLang's own recipe decodes a whole layer of the pool at every read; this kit brings none for it",
        evidence="MHATokenToKVPool in srt/mem_cache/memory_pool.py @ sglang 0.5.23",
        help=_TRITON,
    ),
    "FP4-030": Text(
        name="draft-tokens-differ",
        says="{tokens} draft tokens are asked for, and the draft was trained on blocks of {block}",
        why="the drafter fills a whole block in one pass and was trained on that length; SGLang runs it on the length it is told",
        evidence=f"_handle_dflash in {_SPEC_HOOK}; block_size in the draft's config.json",
        help="--speculative-num-draft-tokens {block}, or leave it out",
    ),
    "FP4-031": Text(
        name="draft-backend-replaced",
        says="the drafter's backend {backend} would be replaced by {replacement}",
        why="SGLang logs a warning and goes on with {replacement}, so what runs is not what was asked for",
        evidence=f"_resolve_dflash_draft_attention_backend in {_SPEC_HOOK}",
        help="--speculative-draft-attention-backend triton",
    ),
    "FP4-032": Text(
        name="draft-backend-untested",
        says="the drafter is asked for on {backend}, and no result with it is on file",
        why="in every run on file the drafter's attention is Triton's, as the target's",
        evidence=_RESULT,
        help="--speculative-draft-attention-backend triton",
    ),
    "FP4-033": Text(
        name="bf16-draft-pool-untested",
        says="a drafter pool in BF16 is asked for next to NVFP4, and no result with it is on file",
        why="in every NVFP4 run on file the drafter's pool is FP8 E4M3",
        evidence=_RESULT,
        help="--speculative-draft-kv-cache-dtype fp8_e4m3",
    ),
    "FP4-034": Text(
        name="ngram-tree-untested",
        says="NGRAM with breadth {breadth} drafts a tree, and no result with one is on file",
        why="a tree is verified through a mask over the block, and every run on file verifies a chain",
        evidence=f"_handle_ngram in {_SPEC_HOOK}; {_SERVER}",
        help="--speculative-algorithm DFLASH",
    ),
    "FP4-035": Text(
        name="drafter-untested",
        says="NVFP4 KV is asked for with {drafter}, and no result with it is on file",
        why="the runs on file are with DFLASH and without a drafter; another drafter builds its pool and its backend by another path",
        evidence=f"{_RESULT}; {_SERVER}",
        help="--speculative-algorithm DFLASH",
    ),
    "FP4-036": Text(
        name="dflash-on-fp16",
        says="DFLASH is asked for on a target that runs in float16 (its config says {stored})",
        why="SGLang casts the drafter's input embeddings to BF16; the patch series keeps their dtype, and no run in float16 has shown the rest. A float32 checkpoint runs in float16 too unless --dtype says otherwise",
        evidence="srt/model_executor/model_runner.py and srt/configs/model_config.py @ sglang 0.5.23",
        help="--dtype bfloat16",
    ),
    "FP4-037": Text(
        name="draft-not-the-profiles",
        says="the draft has {found}, and the profile was made with {wanted}",
        why="a drafter is trained for one target; another revision changes what is accepted, and the profile's result is not about it",
        evidence="draft_revision and draft_sha256 in the profile",
        help="use the draft with {wanted}, or leave out --profile",
    ),
    "FP4-058": Text(
        name="diffusion-untested",
        says="diffusion decoding is asked for with NVFP4 KV, and no result with it is on file",
        why="it attends within a block in both directions; every run on file decodes one token after another, or verifies a chain",
        evidence=_RESULT,
        help="leave out --dllm-algorithm",
    ),
}
