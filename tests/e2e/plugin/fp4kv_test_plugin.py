"""A SGLang plugin for tests: an oracle drafter, its negative control, and a fixed KV budget.

FP4KV_ORACLE names a JSON file, read at the first draft: a list of {"prompt": ids, "output": ids}. For
a request with such a prompt the drafter's tokens are replaced by the recorded ones, so that every draft is right and the
accept length is at its maximum. The draft model still runs and still writes its own pool.

FP4KV_BLOCK_IN_BF16=1 is the negative control: verify then reads the block's own K and V as computed
instead of back from the pool.

FP4KV_KV_BUDGET_BYTES=n gives SGLang's sizing n bytes for KV, whatever the machine has free; a model with
recurrent layers first takes its states out of them.

FP4KV_MISREAD names a file with one word, read at every layer: how the readers deliberately misread the pool.
"k-scales-for-v" and "next-slot" (the scales of the neighbouring slot) are all readers', with
"verify-" in front verify's alone; anything else, or no file, reads as it should.

FP4KV_FAULT_FILE=file switches the faults of fp4kv_faults.py on and off in a running server.

FP4KV_FUSED_WRITES names a file: the drafter's pool is then written by SGLang's fused kernel, which it keeps for GPUs,
until the file exists; from then on that write fails.

FP4KV_BREAK_IN_CHILDREN=1 makes the kit's own plugin fail in SGLang's child processes, the scheduler
among them, while the arguments still resolve in the first one.
"""

import dataclasses
import functools
import json
import multiprocessing
import os

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
BUDGET = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"


def _fail():
    raise RuntimeError("broken by the test plugin")


# SGLang imports every plugin before it runs the first, so this holds in whatever order they come.
if os.environ.get("FP4KV_BREAK_IN_CHILDREN") == "1" and multiprocessing.parent_process():
    from sglang_fp4kv import integration

    integration.check_release = _fail


def activate():
    recorded = os.environ.get("FP4KV_ORACLE")
    if recorded:
        oracle = Oracle(recorded)
        for name, hook, kind in (
            ("forward_batch_generation", oracle.note_batch, HookType.AROUND),
            ("_greedy_sample_from_vocab_parallel_head", oracle.propose, HookType.AROUND),
            # Keeps the draft head out of the CUDA graph, so that propose is called there too.
            ("_maybe_build_draft_sampler", lambda worker: None, HookType.REPLACE),
        ):
            HookRegistry.register(f"{WORKER}.{name}", hook, kind)
    budget = os.environ.get("FP4KV_KV_BUDGET_BYTES")
    if budget:
        HookRegistry.register(BUDGET, functools.partial(_budget, int(budget)), HookType.REPLACE)
    faults = os.environ.get("FP4KV_FAULT_FILE")
    if faults:
        import fp4kv_faults

        fp4kv_faults.activate(faults)
    if os.environ.get("FP4KV_BLOCK_IN_BF16") == "1":
        from sglang_fp4kv.attention import TritonAttnBackend

        TritonAttnBackend._attend_block = TritonAttnBackend._attend_chunk
    fused = os.environ.get("FP4KV_FUSED_WRITES")
    if fused:
        HookRegistry.register(f"{WORKER}.__init__", _write_fused, HookType.AROUND)
        helper = "sglang.kernels.ops.speculative.fused_kv_materialize.FusedKVMaterializeHelper.materialize"
        HookRegistry.register(helper, functools.partial(_fail_once_there, fused), HookType.BEFORE)
    if os.environ.get("FP4KV_MISREAD"):
        misread_as_told(os.environ["FP4KV_MISREAD"])


def misread(layer, how):
    """The packed buffers of ``layer`` with the scales that a broken reader would take."""
    if how == "k-scales-for-v":
        return dataclasses.replace(layer, v_scales=layer.k_scales)
    if how == "next-slot":
        k, v = (scales.roll(-1, 0) for scales in (layer.k_scales, layer.v_scales))
        return dataclasses.replace(layer, k_scales=k, v_scales=v)
    return layer


def misread_as_told(file):
    """Lets the readers of sglang_fp4kv.attention misread what ``file`` says."""
    from sglang_fp4kv.attention import TritonAttnBackend

    def told():
        return open(file).read().strip() if os.path.exists(file) else ""

    right, block = TritonAttnBackend._pool_layer, TritonAttnBackend._attend_block

    def pool_layer(backend, layer):
        return misread(right(backend, layer), told())

    def attend_block(backend, q, k, v, out, pool, *rest):
        how = told()
        if how.startswith("verify-"):
            pool = misread(pool, how.removeprefix("verify-"))
        return block(backend, q, k, v, out, pool, *rest)

    TritonAttnBackend._pool_layer, TritonAttnBackend._attend_block = pool_layer, attend_block


def _write_fused(original, worker, *args, **kwargs):
    original(worker, *args, **kwargs)
    worker._use_fused_kv_materialize = True
    worker._init_fused_kv_helper()


def _fail_once_there(file, *args, **kwargs):
    if os.path.exists(file):
        raise RuntimeError("told to fail")


def _budget(size, configurator, _pre_model_load_memory):
    if configurator.mambaish_config is None:
        return size
    return int(configurator._handle_max_mamba_cache(size / (1 << 30)) * (1 << 30))


class Oracle:
    def __init__(self, file):
        self.file = file
        self.requests = []

    @functools.cached_property
    def recorded(self):
        """The whole token sequence of a request by its prompt."""
        with open(self.file) as file:
            return {tuple(a["prompt"]): a["prompt"] + a["output"] for a in json.load(file)}

    @property
    def answers(self):
        """The recorded sequences; none before the file is there, as at the server's warm-up."""
        return self.recorded if os.path.exists(self.file) else {}

    def note_batch(self, original, worker, batch, *args, **kwargs):
        self.requests = list(batch.reqs)
        return original(worker, batch, *args, **kwargs)

    def propose(self, original, worker, *args, **kwargs):
        drafts = original(worker, *args, **kwargs)
        rows = drafts.view(len(self.requests), -1)
        anchors = worker._draft_block_positions_buf[: len(rows), 0].tolist()
        for row, anchor, request in zip(rows, anchors, self.requests, strict=True):
            sequence = self.answers.get(tuple(request.origin_input_ids))
            if sequence is None:
                continue
            known = sequence[anchor + 1 : anchor + 1 + len(row)]
            row[: len(known)] = drafts.new_tensor(known)
        return drafts
