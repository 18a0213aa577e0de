"""An example of every refusal: what was asked, and the values its text is then filled with.

Only `fp4kv explain` shows these. They are made up, apart from the ones that name a file or release.
"""

_RELEASE = "0.5.23"
_SITE = ".venv/lib/python3.11/site-packages"
_POOL = f"{_SITE}/sglang/srt/mem_cache/memory_pool.py"
_WHEEL = "sglang-0.5.23-py3-none-any.whl"
_NVFP4 = "--kv-cache-dtype nvfp4"
_TRITON = f"{_NVFP4} --attention-backend triton"
_DFLASH = "--speculative-algorithm DFLASH"
_DRAFT = {"asked": "--speculative-draft-model-path my-draft", "path": "my-draft"}
_MODEL = {"asked": "--model-path my-model", "path": "my-model"}

EXAMPLES = {
    "FP4-001": {
        "asked": "fp4kv patch apply --target sglang-checkout",
        "where": "sglang-checkout",
        "looked_for": "sglang-checkout/[python/]sglang/srt",
        "release": _RELEASE,
    },
    "FP4-002": {
        "asked": "fp4kv patch apply",
        "found": "0.5.22",
        "found_in": _SITE,
        "release": _RELEASE,
    },
    "FP4-003": {
        "asked": "fp4kv patch apply",
        "count": "1",
        "files": _POOL,
        "restore": f"pip install --force-reinstall --no-deps sglang=={_RELEASE}",
    },
    "FP4-004": {
        "asked": "fp4kv patch status",
        "applied": "2",
        "total": "5",
        "files": _POOL,
        "target_flag": "",
    },
    "FP4-005": {
        "asked": "fp4kv patch apply",
        "patch": "refuse-fp4-scale-loss.patch",
        "mechanism": "its sha256 is not the one on record, so its lines may be anyone's",
    },
    "FP4-006": {
        "asked": "fp4kv patch apply",
        "problem": "the series lists no patch",
        "place": "patches/series",
    },
    "FP4-007": {
        "asked": "fp4kv patch apply",
        "path": _POOL,
        "folder": _POOL.rpartition("/")[0],
        "error": "Permission denied",
        "aftermath": "nothing is changed",
    },
    "FP4-008": {
        "asked": f"fp4kv patch verify --wheel {_WHEEL}",
        "problem": f"{_WHEEL} is not the wheel on record",
        "mechanism": "its sha256 is not the one in patches/UPSTREAM",
        "place": _WHEEL,
        "release": _RELEASE,
    },
    "FP4-009": {
        "asked": "fp4kv patch refresh --target sglang-checkout",
        "problem": "python/sglang/srt/server_args.py is edited and no patch touches it",
        "mechanism": "an edit needs a patch to belong to",
        "place": "patches/series and the target",
        "way_out": "--patch NAME, after adding the patch's header to patches/ and its name to series",
    },
    "FP4-010": {
        "asked": "--kv-cache-dtype nvfp4 --attention-backend flashinfer",
        "prefill": "flashinfer",
        "decode": "flashinfer",
    },
    "FP4-011": {
        "asked": "--kv-cache-dtype nvfp4 --speculative-draft-kv-cache-dtype nvfp4",
        "dtype": "nvfp4",
        "target": "nvfp4",
    },
    "FP4-012": _DRAFT,
    "FP4-013": {
        "asked": "target_layer_ids [1, 35] in my-draft",
        "wrong": "[35]",
        "layers": "36",
        "limit": "35",
    },
    "FP4-014": {
        "asked": "--model-path my-model with head_dim 72",
        "head_dim": "72",
        "block": "16",
    },
    "FP4-015": {"asked": "--model-path my-model", "head_dim": "192", "v_head_dim": "128"},
    "FP4-016": {
        "asked": "--kv-cache-dtype nvfp4",
        "state": "pristine",
        "where": _SITE,
    },
    "FP4-017": {
        "asked": f"{_NVFP4} --attention-backend flashinfer {_DFLASH}",
        "drafter": "DFLASH",
        "prefill": "flashinfer",
        "decode": "flashinfer",
    },
    "FP4-018": {
        "asked": f"{_NVFP4} --attention-backend trtllm_mha {_DFLASH}",
        "drafter": "DFLASH",
        "prefill": "trtllm_mha",
        "decode": "trtllm_mha",
    },
    "FP4-019": {
        "asked": f"{_TRITON} --decode-attention-backend trtllm_mha",
        "prefill": "triton",
        "decode": "trtllm_mha",
    },
    "FP4-020": {"asked": f"{_NVFP4} --attention-backend flashinfer", "sm": "sm_90"},
    "FP4-021": {
        "asked": f"{_TRITON} --prefill-kv-cache-dequant-dtype fp8_e4m3",
        "dtype": "fp8_e4m3",
    },
    "FP4-022": {"asked": f"{_NVFP4} --enable-deterministic-inference"},
    "FP4-023": {"asked": f"{_NVFP4} --enable-mixed-chunk"},
    "FP4-024": {"asked": f"{_NVFP4} with SGLANG_USE_HND_KVCACHE=1 in the environment"},
    "FP4-025": {"asked": f"{_NVFP4} with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 in the environment"},
    "FP4-026": {"asked": _TRITON, "gpu": "NVIDIA GB10", "sm": "sm_121"},
    "FP4-027": {"asked": f"{_NVFP4} --tp-size 4"},
    "FP4-028": {
        "asked": f"--kv-cache-dtype fp4_mx_block16 {_DFLASH}",
        "drafter": "DFLASH",
    },
    "FP4-029": {"asked": "--kv-cache-dtype fp4_mx_block16 --attention-backend triton"},
    "FP4-030": {"asked": "--speculative-num-draft-tokens 16", "tokens": "16", "block": "8"},
    "FP4-031": {
        "asked": f"{_DFLASH} --speculative-draft-attention-backend torch_native",
        "backend": "torch_native",
        "replacement": "flashinfer",
    },
    "FP4-032": {
        "asked": f"{_DFLASH} --speculative-draft-attention-backend fa3",
        "backend": "fa3",
    },
    "FP4-033": {"asked": f"{_NVFP4} --speculative-draft-kv-cache-dtype bf16"},
    "FP4-036": {"asked": f"{_DFLASH} --dtype auto for my-model", "drafter": "DFLASH", "stored": "float16"},
    "FP4-037": {
        "asked": "--speculative-draft-model-path my-draft --speculative-draft-model-revision v2",
        "found": "v2",
        "wanted": "v1",
    },
    "FP4-038": _MODEL,
    "FP4-039": _MODEL | {"asked": "--model-path my-model with architectures 'GptOssForCausalLM'"},
    "FP4-040": _MODEL | {"asked": "--model-path my-model with mamba_num_heads 64"},
    "FP4-041": _MODEL,
    "FP4-042": {"asked": "--tp-size 4 for my-model", "heads": "6", "kind": "KV", "tp": "4"},
    "FP4-043": _MODEL | {"scales": "k_scale 0.0 of layer 3, v_scale nan of layer 3"},
    "FP4-044": _MODEL | {"layers": "3, 7", "total": "36"},
    "FP4-045": _MODEL | {"problem": "model.safetensors ends before its header does"},
    "FP4-046": {"asked": f"{_NVFP4} --enable-unified-memory"},
    "FP4-047": {"asked": "--kv-cache-dtype fp4_mx_block16 --enable-hierarchical-cache"},
    "FP4-048": {"asked": f"{_NVFP4} --enable-lmcache"},
    "FP4-049": {"asked": f"{_NVFP4} --enable-flexkv"},
    "FP4-050": {"asked": f"{_NVFP4} --enable-unified-cache-external-linker"},
    "FP4-051": {"asked": f"{_NVFP4} --disaggregation-mode decode"},
    "FP4-052": {"asked": f"{_NVFP4} --dcp-size 2"},
    "FP4-053": {"asked": f"{_NVFP4} --enable-kv-cache-sharding"},
    "FP4-054": {"asked": f"{_NVFP4} --enable-hisparse"},
    "FP4-055": {
        "asked": f"{_NVFP4} --context-length 131072 --mem-fraction-static 0.9 for my-model",
        "context": "131072",
        "room": "55512",
        "sum": "131,072 tokens x (target 9,216 + drafter 8,192 bytes) = 2.12 GB > 31.00 GB x 0.9 - "
        "weights 27.00 GB = 0.90 GB, which holds 55,512 tokens",
    },
    "FP4-056": {
        "asked": f"{_NVFP4} --max-total-tokens 2000000 --mem-fraction-static 0.4 for my-model",
        "sum": "2,000,000 tokens x (target 9,216 + drafter 8,192 bytes) = 32.42 GB > "
        "121.00 GB x 0.4 - weights 20.00 GB = 28.40 GB",
    },
    "FP4-057": {
        "asked": "--kv-cache-dtype fp4_mx_block16 --mem-fraction-static 0.9 for my-model",
        "sum": "4,603,378 tokens: weights 20.00 GB + target pool 79.02 GB + drafter pool 9.88 GB + "
        "one decoded layer 17.56 GB = 126.46 GB > 121.00 GB",
    },
    "FP4-058": {"asked": f"{_NVFP4} --dllm-algorithm LowConfidence"},
    "FP4-059": {
        "asked": "--kv-cache-dtype nvfp4 --attention-backend fa3",
        "prefill": "fa3",
        "decode": "fa3",
    },
    "FP4-060": _MODEL | {"asked": "--model-path my-model with indexer_n_heads 4"},
    "FP4-061": _MODEL | {"asked": "--model-path my-model with num_loops 2"},
    "FP4-062": _MODEL | {"asked": "--model-path my-model with loop_num 2"},
    "FP4-063": {
        "asked": "--model-path my-model with model_type 'qwen3'",
        "path": "my-model",
        "keys": "head_dim",
        "reasons": "model_type 'qwen3' has a figure of its own for it outside of this file, "
        "so it must be written down",
    },
    "FP4-064": {"asked": f"{_NVFP4} --grpc-port 30001"},
    "FP4-065": {"asked": f"{_NVFP4} --checkpoint-engine-wait-weights-before-ready"},
    "FP4-070": {"asked": "--linear-attn-backend flashinfer for my-model"},
    "FP4-071": {"asked": "--enable-linear-replayssm for my-model"},
    "FP4-072": {"asked": f"--mamba-ssm-dtype bfloat16 {_DFLASH} for my-model"},
    "FP4-075": _DRAFT | {"keys": "conv_kernel_size and conv_group_size"},
    "FP4-076": _DRAFT | {"problems": "selector_rank 256 and selector_top_k 0 are needed together"},
    "FP4-077": _DRAFT
    | {"told": "the checkpoint has a candidate selector and dflash_config has no selector_rank"},
    "FP4-078": {"asked": "--speculative-draft-window-size 4", "window": "4", "block": "8"},
    "FP4-079": _DRAFT | {"head": "projector_type 'domino'"},
    "FP4-080": {"asked": f"{_NVFP4} --speculative-algorithm DSPARK", "drafter": "DSPARK"},
    "FP4-081": {
        "asked": "--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 10 --page-size 16",
        "width": "10",
        "page": "16",
    },
    "FP4-090": {"asked": f"{_DFLASH} --speculative-accept-threshold-single 0.9"},
    "FP4-091": _MODEL | {
        "asked": "--disable-hybrid-swa-memory --model-path my-model with architectures 'LagunaForCausalLM'",
    },
    "FP4-095": {
        "asked": f"{_TRITON} --enable-hierarchical-cache", "how": "pages of one token and write_through and no drafter",
    },
    "FP4-096": {"asked": f"{_TRITON} --enable-hierarchical-cache --hicache-storage-backend file"},
    "FP4-097": {
        "asked": f"{_TRITON} --enable-hierarchical-cache --hicache-io-backend kernel for my-model",
        "row": "4",
        "multiple": "8",
    },
    "FP4-098": {
        "asked": f"{_TRITON} --enable-hierarchical-cache --speculative-algorithm EAGLE3",
        "beside": "with EAGLE3",
    },
    "FP4-100": {
        "asked": f"{_NVFP4} --speculative-algorithm NEXTN for my-model", "drafter": "NEXTN", "path": "my-model",
    },
    "FP4-101": {
        "asked": f"{_NVFP4} --speculative-algorithm NGRAM for my-model", "drafter": "NGRAM", "path": "my-model",
    },
    "FP4-102": {
        "asked": f"{_TRITON} --tp-size 2 --enable-hierarchical-cache",
        "pairs": "several ranks with the hierarchical cache",
    },
    "FP4-103": {
        "asked": f"{_NVFP4} --speculative-algorithm DFLASH --speculative-draft-window-size 512 for my-draft",
        "parts": "a draft window",
        "tests": "tests/e2e/test_draft_serving.py",
    },
    "FP4-104": {
        "asked": f"{_TRITON} --speculative-algorithm EAGLE3 --speculative-adaptive", "flags": "--speculative-adaptive",
    },
    "FP4-110": {
        "asked": "--fp4-gemm-backend flashinfer_cutlass for my-model", "path": "my-model",
        "gemm": "flashinfer_cutlass", "gpu": "sm_90",
    },
    "FP4-111": _MODEL | {"where": "sm_90"},
    "FP4-112": _MODEL,
    "FP4-113": _MODEL,
    "FP4-114": {"asked": f"{_NVFP4} --quantization-param-path scales.json"},
    "FP4-115": {
        "asked": f"{_NVFP4} for my-model with model_type 'qwen3_next'", "path": "my-model", "type": "qwen3_next",
    },
    "FP4-116": {
        "asked": f"{_TRITON} --speculative-algorithm EAGLE3 --speculative-eagle-topk 4 --page-size 16",
        "drafter": "EAGLE3",
        "width": "4",
        "page": "16",
    },
    "FP4-117": {"asked": f"{_TRITON} --enable-hierarchical-cache --disable-radix-cache"},
    "FP4-118": {"asked": f"{_NVFP4} for my-model with Gemma2ForCausalLM", "path": "my-model"},
    "FP4-119": {
        "asked": f"{_NVFP4} --speculative-algorithm DFLASH for my-model", "drafter": "DFLASH",
        "names": "Gemma3ForCausalLM", "needed": "dflash",
    },
}
