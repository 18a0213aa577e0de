"""What the kit serves, for the server's side and the launcher's alike. Standard library only."""

import socket
import struct

BACKEND = "triton"  # SGLang's name of the attention backend that reads packed NVFP4

DRAFT_DTYPE_DEFAULT = "fp8_e4m3"  # of the drafter's own pool, where none was asked for
DRAFT_DTYPES = (DRAFT_DTYPE_DEFAULT, "bf16", "bfloat16")

# Drafters that run beside NVFP4 KV, by SGLang's names; NEXTN is EAGLE once SGLang has resolved it.
TREE_DRAFTERS = ("NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")  # a chain where their width is 1
DRAFTERS = ("DFLASH", *TREE_DRAFTERS)
DRAFTERS_WITHOUT_MODEL = ("NGRAM",)
DRAFTERS_WITH_MODEL = tuple(name for name in DRAFTERS if name not in DRAFTERS_WITHOUT_MODEL)
# Modules of a DFlash2 draft, as the worker reports and the launcher expects them.
CONV, SELECTOR = "grouped convolution", "candidate selector"
# Model types (without _text) with recurrent layers that are served: gated-delta ones beside plain attention.
GATED_DELTA_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# What --enable-hierarchical-cache can be asked with (sglang_fp4kv/host_pool.py). SGLang's copy kernels refuse
# rows of another multiple than this many bytes (transfer_kv_launcher in sgl-kernel/csrc/kvcacheio/transfer.cu);
# "direct" copies any.
HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
HOST_IO_BACKENDS = ("kernel", "direct")
HOST_KERNEL_ROW_BYTES = 8

# How `fp4kv serve` holds a server back until it has proven itself (sglang_fp4kv/readiness.py).
HOLD_SOCKET = "FP4KV_HOLD_SOCKET"  # environment: name of the launcher's abstract Unix socket
HOLD_HEADER = "x-fp4kv-hold"  # carries the token that the launcher gives over that socket
WARM, SERVE = b"warm\n", b"serve\n"  # said by the server, by the launcher


def peer_uid(connection):
    """The user id of the process at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid
