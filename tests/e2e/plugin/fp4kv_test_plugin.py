"""A SGLang plugin for tests: an oracle drafter, its negative control, and a fixed KV budget.

FP4KV_ORACLE names a JSON file, read at the first draft: a list of {"prompt": ids, "output": ids}. For
a request with such a prompt the drafter's tokens are replaced by the recorded ones, so that every draft is right and the
accept length is at its maximum. The draft model still runs and still writes its own pool.

FP4KV_KV_BUDGET_BYTES=n gives SGLang's sizing n bytes for KV, whatever the machine has free; a model with
recurrent layers first takes its states out of them.

FP4KV_GEMMA3 gives Gemma 3, which SGLang cannot draft for, the method that names the layers a DFLASH
drafter looks at, and caps its attention's scores at this number.

FP4KV_MISREAD names a file with one word, read at every layer: how the readers deliberately misread the pool.
"k-scales-for-v" and "next-slot" (the scales of the neighbouring slot) are all readers', with
"verify-" in front verify's alone; "block-in-bf16" lets verify read the block's own K and V as computed
instead of back from the pool; "verify-without-mask" lets every node of a draft tree see its whole
block up to itself; "no-window" and "no-cap" leave out what a layer has. Anything else, or no file, reads as it should.

FP4KV_MOVES names a file that gets a line for every call of the target pool's move_kv_cache: how many
rows it took to another slot.

FP4KV_FAULT_FILE=file switches the faults of fp4kv_faults.py on and off in a running server.

FP4KV_FUSED_WRITES names a file: the drafter's pool is then written by SGLang's fused kernel, which it keeps for GPUs,
until the file exists; from then on that write fails.
FP4KV_OTHER_HEADS names a file: while it exists, every tensor-parallel rank keeps and reads the K and V heads
of the next rank instead of its own.
FP4KV_LEFT_ON_HOST names a file with one word, read at every load from host memory: what the hierarchical
cache deliberately does not load. "scales" are the target's block scales; with "draft" the drafter's K and V
come back as FP8's largest value. Anything else, or no file, loads all.

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
EAGLE_TREE = "sglang.srt.speculative.eagle_worker_common.build_eagle_verify_input"
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
            ("_propose_selector_block", oracle.propose, HookType.AROUND),  # a DFlash2's
            # Keeps the draft head out of the CUDA graph, so that propose is called there too.
            ("_maybe_build_draft_sampler", lambda worker: None, HookType.REPLACE),
        ):
            HookRegistry.register(f"{WORKER}.{name}", hook, kind)
        HookRegistry.register(EAGLE_TREE, oracle.plant, HookType.AROUND)
    budget = os.environ.get("FP4KV_KV_BUDGET_BYTES")
    if budget:
        HookRegistry.register(BUDGET, functools.partial(_budget, int(budget)), HookType.REPLACE)
    faults = os.environ.get("FP4KV_FAULT_FILE")
    if faults:
        import fp4kv_faults

        fp4kv_faults.activate(faults)
    if os.environ.get("FP4KV_GEMMA3"):
        make_gemma3_draftable(float(os.environ["FP4KV_GEMMA3"]))
    fused = os.environ.get("FP4KV_FUSED_WRITES")
    if fused:
        HookRegistry.register(f"{WORKER}.__init__", _write_fused, HookType.AROUND)
        helper = "sglang.kernels.ops.speculative.fused_kv_materialize.FusedKVMaterializeHelper.materialize"
        HookRegistry.register(helper, functools.partial(_fail_once_there, fused), HookType.BEFORE)
    if os.environ.get("FP4KV_MISREAD"):
        misread_as_told(os.environ["FP4KV_MISREAD"])
    if os.environ.get("FP4KV_MOVES"):
        write_down_moves(os.environ["FP4KV_MOVES"])
    if os.environ.get("FP4KV_OTHER_HEADS"):
        take_other_heads_while_there_is(os.environ["FP4KV_OTHER_HEADS"])
    if os.environ.get("FP4KV_LEFT_ON_HOST"):
        leave_on_host(os.environ["FP4KV_LEFT_ON_HOST"])


def told(file):
    return open(file).read().strip() if os.path.exists(file) else ""


def leave_on_host(file):
    """Lets the host pools of sglang_fp4kv.host_pool and of the drafter leave out what ``file`` says."""
    import torch
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    load = MHATokenToKVPoolHost.load_to_device_per_layer
    largest = 0x7E

    @functools.wraps(load)
    def load_some(pool, device_pool, host_indices, device_indices, layer_id, *args, **kwargs):
        left = told(file)
        if left != "scales" or not pool.pool_label.endswith(left):
            load(pool, device_pool, host_indices, device_indices, layer_id, *args, **kwargs)
        if left == "draft" == pool.pool_label:
            for rows in (pool.device_k_buffers[layer_id], pool.device_v_buffers[layer_id]):
                rows.view(torch.uint8)[device_indices] = largest

    MHATokenToKVPoolHost.load_to_device_per_layer = load_some


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

    right, block = TritonAttnBackend._pool_layer, TritonAttnBackend._attend_block
    chunk = TritonAttnBackend._attend_chunk
    options_of = TritonAttnBackend._layer_options

    def pool_layer(backend, layer):
        return misread(right(backend, layer), told(file))

    def attend_block(backend, q, k, v, out, pool, *rest):
        how = told(file)
        if how == "block-in-bf16":
            return chunk(backend, q, k, v, out, pool, *rest)
        if how == "verify-without-mask":
            rest = [*rest[:-1], {**rest[-1], "custom_mask": None, "mask_indptr": None}]
        elif how.startswith("verify-"):
            pool = misread(pool, how.removeprefix("verify-"))
        return block(backend, q, k, v, out, pool, *rest)

    def layer_options(backend, *args):
        pool, lists, windowed, options = options_of(backend, *args)
        if told(file) == "no-window":
            meta = backend.forward_metadata
            lists, windowed = (meta.kv_indptr, meta.kv_indices), False
        if told(file) == "no-cap":
            options["logit_cap"] = 0.0
        return pool, lists, windowed, options

    TritonAttnBackend._pool_layer, TritonAttnBackend._attend_block = pool_layer, attend_block
    TritonAttnBackend._layer_options = layer_options


def make_gemma3_draftable(cap):
    """Layer i's output is what layer i + 1 gets, as in SGLang's other targets (srt/models/qwen3.py)."""
    from sglang.srt.models import gemma3_causal

    def capture(model, layer_ids):
        model.capture_aux_hidden_states = True
        model.model.layers_to_capture = [layer + 1 for layer in layer_ids]

    def capped(attention, *args, **kwargs):
        built(attention, *args, **kwargs)
        attention.attn.logit_cap = cap

    built = gemma3_causal.Gemma3Attention.__init__
    gemma3_causal.Gemma3Attention.__init__ = capped
    gemma3_causal.Gemma3ForCausalLM.set_dflash_layers_to_capture = capture


def write_down_moves(file):
    from sglang_fp4kv.pool import NVFP4TokenToKVPool

    move = NVFP4TokenToKVPool.move_kv_cache

    def move_kv_cache(pool, target, source):
        with open(file, "a") as lines:
            print(int((target != source).sum()), file=lines)
        return move(pool, target, source)

    NVFP4TokenToKVPool.move_kv_cache = move_kv_cache


def _write_fused(original, worker, *args, **kwargs):
    original(worker, *args, **kwargs)
    worker._use_fused_kv_materialize = True
    worker._init_fused_kv_helper()


def _fail_once_there(file, *args, **kwargs):
    if os.path.exists(file):
        raise RuntimeError("told to fail")


def take_other_heads_while_there_is(file):
    from sglang.srt.runtime_context import get_parallel

    from sglang_fp4kv.attention import TritonAttnBackend

    def next_ranks(x):
        group = get_parallel().tp_group
        everyones = group.all_gather(x.contiguous(), dim=0).chunk(group.world_size)
        return everyones[(group.rank_in_group + 1) % group.world_size]

    def wrap(forward):
        @functools.wraps(forward)
        def with_other_heads(backend, q, k, v, *args, **kwargs):
            if os.path.exists(file):
                k, v = next_ranks(k), next_ranks(v)
            return forward(backend, q, k, v, *args, **kwargs)

        return with_other_heads

    for name in ("forward_extend", "forward_decode"):
        setattr(TritonAttnBackend, name, wrap(getattr(TritonAttnBackend, name)))


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

    def plant(self, original, batch, draft_input, parents, kept, drafts, *args, topk, **kwargs):
        """EAGLE: the recorded tokens along the longest branch of the tree, the last of several, so that
        accepted rows seldom stand at the front of their block."""
        drafts = drafts.clone()
        lists = (x.tolist() for x in (batch.seq_lens, parents, kept))
        # Under a CUDA graph the tensors may have rows of padding behind those of the batch.
        rows = zip(batch.reqs, *lists, drafts, strict=False)
        for request, anchor, followed, candidates, row in rows:
            known = self.answers.get(tuple(request.origin_input_ids), [])[anchor + 1 :]
            paths = []  # the nodes down to each one; parents stand before their children
            for node, candidate in enumerate(candidates):
                above = paths[candidates.index(followed[candidate // topk])] if candidate // topk else []
                paths.append([*above, node])
            longest = max(reversed(paths), key=len)
            for node, token in zip(longest, known, strict=False):
                row[node] = token
        return original(batch, draft_input, parents, kept, drafts, *args, topk=topk, **kwargs)
