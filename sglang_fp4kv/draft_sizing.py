"""What a token of an EAGLE-family drafter's pool costs, where SGLang sizes both pools from one budget.

SGLang 0.5.23 prices each draft layer as one of the target's (DefaultPoolConfigurator.__init__ in
srt/model_executor/pool_configurator.py): in the target's dtype and with its heads. Next to NVFP4 that is
little more than half of an FP8 row, and the pools would outgrow the budget. A module inside the target's
checkpoint is not priced at all. DFLASH drafts are priced right.
"""

from sglang.srt.arg_groups.overrides import resolved_view

from sglang_fp4kv import formats
from sglang_fp4kv.resolution import uses_packed_read


def price_draft(original, configurator, kvc):
    """Around DefaultPoolConfigurator.__init__: the target alone by SGLang, plus the draft's own bytes.

    Raises: RuntimeError when SGLang does not know the draft's layers, so that nothing would be set aside.
    """
    aux, cfg = kvc.spec_aux_config, resolved_view(kvc.server_args)
    drafts = kvc.spec_algorithm.is_eagle() or kvc.spec_algorithm.is_standalone()
    if kvc.is_draft_worker or not drafts or not uses_packed_read(cfg):
        return original(configurator, kvc)
    draft, layers = aux.draft_model_config, aux.draft_kv_num_layers
    if draft is None or not layers:
        raise RuntimeError(f"SGLang resolved {layers} layers of the drafter {kvc.spec_algorithm.name}")
    counted, aux.eagle_draft_num_layers = aux.eagle_draft_num_layers, None
    try:
        original(configurator, kvc)
    finally:
        aux.eagle_draft_num_layers = counted
    configurator._cell_size += formats.bytes_per_token(
        draft.head_dim,
        draft.get_num_kv_heads(kvc.draft_attn_tp_size),
        int(layers),
        dtype=cfg.speculative_draft_kv_cache_dtype,
        v_head_dim=draft.v_head_dim,
    )
