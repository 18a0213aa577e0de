"""Faults of an FP4 KV cache with a drafter, switched on in a running server: the checks must find them.

FP4KV_FAULT_FILE names a file that is read before every batch. The name in it is the fault that is on;
no file or an empty one is a sound server. Each fault is a class below; the product has no switch for any.
"retraction" retracts requests and breaks nothing.
"""

import functools
import inspect
import os

import torch

WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
LOOP_TOKEN = 40  # of the loop; an ordinary one of the shipped pair's vocabulary


class Sound:
    """What a server does without a fault; a fault overrides the step that it breaks.

    ``retracts``: SGLang's own test switch is on, by which every third step retracts a request where a batch has
    two or more, whatever the pool still holds.
    """

    retracts = False

    def begin(self, batch, rows):
        """Before each batch. ``rows``: how many tokens each of its requests brings."""

    def store(self, write, slots, codes, scales):
        """``write()`` quantizes K and V into ``slots`` [T] of the layer's two ``codes`` and ``scales``."""
        write()

    def read(self, arguments, verify):
        """Arguments of a reader by name, changed in place. ``verify``: it reads a draft block's prefix."""

    def attend_block(self, backend, block, chunk):
        """The reader of a draft block: ``block`` takes it from the pool, ``chunk`` as it was computed."""
        return block

    def accept(self, accepted, block):
        """(accept_len, commit_lens, bonus, out_tokens, new_seq_lens) of a verify step; ``block``: what it
        was computed from."""
        return accepted

    def output(self, tokens):
        """The tokens that the scheduler is given."""
        return tokens


class StalePageTable(Sound):
    """Verify reads the table that the step before it was given, as a CUDA graph replayed without new
    indices would; entries that this step adds are an older request's, or slot 0."""

    def __init__(self):
        self.tables = {}

    def read(self, arguments, verify):
        if not verify:
            return
        rows = arguments["q"].shape[0] // arguments["q_per_req"]
        used = int(arguments["kv_indptr"][rows])
        now, layer = arguments["kv_indices"].clone(), arguments["k_codes"].data_ptr()
        table = self.tables.get(layer, now[:0])
        table = torch.cat([table, now.new_zeros(max(0, used - len(table)))])
        arguments["kv_indices"] = table[:used].clone()
        table[:used] = now[:used]
        self.tables[layer] = table


class KScalesForV(Sound):
    """Verify decodes V's codes with K's block scales."""

    def read(self, arguments, verify):
        if verify:
            arguments["v_scales"] = arguments["k_scales"]


class PreviousOwnersScales(Sound):
    """A slot that had an owner keeps that owner's block scales; only the codes are written."""

    def store(self, write, slots, codes, scales):
        kept = [side[slots].clone() for side in scales]
        write()
        for side, old in zip(scales, kept, strict=True):
            owned = old.flatten(1).any(1)
            side[slots[owned]] = old[owned]


class NibblesSwapped(Sound):
    """The writer puts the even element into the high nibble; every reader takes it for the odd one."""

    def store(self, write, slots, codes, scales):
        write()
        for side in codes:
            side[slots] = side[slots] << 4 | side[slots] >> 4


class BlockInBF16(Sound):
    """Verify takes the draft block's K and V as computed, where decode reads them back from FP4."""

    def attend_block(self, backend, block, chunk):
        return chunk


class CommittedTooFar(Sound):
    """One drafted token more is committed than the target agrees with."""

    def accept(self, accepted, block):
        accept_len, commit_lens, *_ = accepted
        width = block["candidates"].shape[1]
        best = block["next_token_logits"].argmax(-1).view(-1, width)
        further = (accept_len.long() + 1).clamp(max=width - 1)
        bonus = best.gather(1, further[:, None])
        out_tokens = block["candidates"].roll(-1, 1).scatter(1, further[:, None], bonus)
        commit_lens = (further + 1).to(commit_lens.dtype)
        return further.to(accept_len.dtype), commit_lens, bonus[:, 0], out_tokens, None


class Retraction(Sound):
    """No fault: the control of the next."""

    retracts = True


class RetractionWithoutScales(Retraction):
    """A request that resumes after its retraction has all its codes back and no block scales: its slots hold
    the zeros of a new pool. SGLang 0.5.23 keeps a retracted request's K and V on the host for PD only; elsewhere
    it takes them from the prefix cache and computes the rest anew, so that is where they are lost here."""

    def begin(self, batch, rows):
        table, self.lost = batch.req_to_token_pool.req_to_token, []
        if batch.forward_mode.is_extend():
            for request, row, prefix, new in zip(
                batch.reqs, batch.req_pool_indices.tolist(), batch.prefix_lens, rows, strict=True
            ):
                if request.retraction_count > 0:
                    self.lost.append(table[row, : prefix + new].long())

    def store(self, write, slots, codes, scales):
        write()
        for lost in self.lost:
            for side in scales:
                side[lost] = 0


class EverySecondRequestCorrupt(Sound):
    """Every second request to arrive writes K and V with the wrong sign."""

    def __init__(self):
        self.order, self.corrupt = {}, None

    def begin(self, batch, rows):
        odd = [self.order.setdefault(request.rid, len(self.order)) % 2 == 1 for request in batch.reqs]
        self.corrupt = torch.repeat_interleave(torch.tensor(odd), torch.tensor(rows))

    def store(self, write, slots, codes, scales):
        write()
        for side in codes:
            side[slots[self.corrupt]] ^= 0x88


class GlobalScaleTwice(Sound):
    """Every reader applies the global scales of K and V a second time."""

    def read(self, arguments, verify):
        for side in ("k_global_scale", "v_global_scale"):
            arguments[side] **= 2


class OneTokenLoop(Sound):
    """Whatever the model says, one token comes out; the accept length stays that of the right answer."""

    def output(self, tokens):
        return torch.full_like(tokens, LOOP_TOKEN)


FAULTS = {
    "stale-page-table": StalePageTable,
    "k-scales-for-v": KScalesForV,
    "previous-owners-scales": PreviousOwnersScales,
    "nibbles-swapped": NibblesSwapped,
    "block-in-bf16": BlockInBF16,
    "committed-too-far": CommittedTooFar,
    "retraction-without-scales": RetractionWithoutScales,
    "global-scale-twice": GlobalScaleTwice,
    "every-second-request": EverySecondRequestCorrupt,
    "one-token-loop": OneTokenLoop,
}
SOUND = {"": Sound, "retraction": Retraction}


class Switch:
    """The fault that is on. An unknown name is a KeyError in the scheduler, which ends with it."""

    def __init__(self, file):
        self.file, self.name, self.fault = file, "", Sound()

    def look(self):
        from sglang.srt.managers import scheduler

        name = ""
        if os.path.exists(self.file):
            with open(self.file) as file:
                name = file.read().strip()
        if name != self.name:
            self.name, self.fault = name, (SOUND | FAULTS)[name]()
            scheduler.TEST_RETRACT = self.fault.retracts

    def step(self, original, worker, batch, *args, **kwargs):
        self.look()
        extends = batch.forward_mode.is_extend()
        rows = batch.extend_lens if extends else [int(worker.block_size)] * len(batch.reqs)
        self.fault.begin(batch, rows)
        result = original(worker, batch, *args, **kwargs)
        if result.next_token_ids is not None:
            result.next_token_ids = self.fault.output(result.next_token_ids)
        return result

    def accept(self, original, worker, **block):
        return self.fault.accept(original(worker, **block), block)

    def storing(self, store):
        @functools.wraps(store)
        def store_nvfp4(k, v, slots, k_codes, v_codes, k_scales, v_scales, *global_scales):
            def write():
                store(k, v, slots, k_codes, v_codes, k_scales, v_scales, *global_scales)

            self.fault.store(write, slots, (k_codes, v_codes), (k_scales, v_scales))

        return store_nvfp4

    def reading(self, reader):
        signature = inspect.signature(reader)

        @functools.wraps(reader)
        def read(*args, **kwargs):
            arguments = signature.bind(*args, **kwargs).arguments
            self.fault.read(arguments, verify=arguments.get("block_slots") is not None)
            return reader(**arguments)

        return read

    def attending(self, block, chunk):
        def attend_block(backend, *args):
            return self.fault.attend_block(backend, block, chunk)(backend, *args)

        return attend_block


def activate(file):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_fp4kv import attention, pool

    switch = Switch(file)
    HookRegistry.register(f"{WORKER}.forward_batch_generation", switch.step, HookType.AROUND)
    HookRegistry.register(f"{WORKER}._accept_block", switch.accept, HookType.AROUND)
    pool.store_nvfp4 = switch.storing(pool.store_nvfp4)
    attention.attention_nvfp4 = switch.reading(attention.attention_nvfp4)
    attention.extend_nvfp4 = switch.reading(attention.extend_nvfp4)
    backend = attention.TritonAttnBackend
    backend._attend_block = switch.attending(backend._attend_block, backend._attend_chunk)
