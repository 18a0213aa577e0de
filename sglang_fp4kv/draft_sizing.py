"""What a token of an EAGLE-family drafter's pool costs, where SGLang sizes both pools from one budget.

SGLang 0.5.23 prices each draft layer as one of the target's (DefaultPoolConfigurator.__init__ in
srt/model_executor/pool_configurator.py): in the target's dtype and with its heads. Next to NVFP4 that is
little more than half of an FP8 row, and the pools would outgrow the budget. DFLASH drafts are priced right.
"""

from sglang.srt.arg_groups.overrides import resolved_view

from sglang_fp4kv import formats
from sglang_fp4kv.resolution import uses_packed_read


def price_draft(original, configurator, kvc):
    """Around DefaultPoolConfigurator.__init__: the target alone by SGLang, plus the draft's own bytes.

    Raises: RuntimeError when SGLang names a number of draft layers but no draft to read them from.
    """
    aux, cfg = kvc.spec_aux_config, resolved_view(kvc.server_args)
    layers = aux.eagle_draft_num_layers
    if kvc.is_draft_worker or not layers or not uses_packed_read(cfg):
        return original(configurator, kvc)
    draft = aux.draft_model_config
    if draft is None:
        raise RuntimeError(f"the drafter has {layers} layers, but SGLang resolved no configuration of it")
    aux.eagle_draft_num_layers = None
    try:
        original(configurator, kvc)
    finally:
        aux.eagle_draft_num_layers = layers
    configurator._cell_size += formats.bytes_per_token(
        draft.head_dim,
        draft.get_num_kv_heads(kvc.draft_attn_tp_size),
        int(layers),
        dtype=cfg.speculative_draft_kv_cache_dtype,
        v_head_dim=draft.v_head_dim,
    )
