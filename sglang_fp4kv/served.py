"""What the kit serves, for the server's side and the launcher's alike. Standard library only."""

import socket
import struct

BACKEND = "triton"  # SGLang's name of the attention backend that reads packed NVFP4

DRAFT_DTYPE_DEFAULT = "fp8_e4m3"  # of the drafter's own pool, where none was asked for
DRAFT_DTYPES = (DRAFT_DTYPE_DEFAULT, "bf16", "bfloat16")

# Drafters that run beside NVFP4 KV, by SGLang's names; NEXTN is EAGLE once SGLang has resolved it.
DRAFTERS = ("DFLASH", "NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
DRAFTERS_WITHOUT_MODEL = ("NGRAM",)

# How `fp4kv serve` holds a server back until it has proven itself (sglang_fp4kv/readiness.py).
HOLD_SOCKET = "FP4KV_HOLD_SOCKET"  # environment: name of the launcher's abstract Unix socket
HOLD_HEADER = "x-fp4kv-hold"  # carries the token that the launcher gives over that socket
WARM, SERVE = b"warm\n", b"serve\n"  # said by the server, by the launcher


def peer_uid(connection):
    """The user id of the process at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid
