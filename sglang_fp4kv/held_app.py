"""SGLang's HTTP app with the gate in it: what the workers of --tokenizer-worker-num import.

SGLang loads no plugins there; sglang_fp4kv.readiness names this module to it.
"""

from sglang.srt.entrypoints import http_server

from sglang_fp4kv import readiness

readiness.install(http_server)
app = http_server.app
