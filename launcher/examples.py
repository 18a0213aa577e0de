"""An example of every refusal: what was asked, and the values its text is then filled with.

Only `fp4kv explain` shows these. They are made up, apart from the ones that name a file or release.
"""

_RELEASE = "0.5.23"
_SITE = ".venv/lib/python3.11/site-packages"
_POOL = f"{_SITE}/sglang/srt/mem_cache/memory_pool.py"
_WHEEL = "sglang-0.5.23-py3-none-any.whl"

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
    },
    "FP4-012": {"asked": "--speculative-draft-model-path my-draft", "path": "my-draft"},
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
}
