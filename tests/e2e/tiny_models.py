"""Small models on disk: a random Qwen3 target with a byte tokenizer, and DFlash drafts."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 256, 4, 4, 2, 64
DRAFT_LAYERS, BLOCK_SIZE, MASK_TOKEN = 2, 8, 500
WINDOW = 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": VOCAB - 1,
}  # fmt: skip


def build_target(folder: Path, seed: int = 0) -> Path:
    """Weights are BF16. Embeddings and head are wide, so that logits spread and ties are rare."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **SIZES,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 1.0 if "embed" in name else weight.shape[1] ** -0.5
                wide = 3.0 if "lm_head" in name else 1.0
                weight.normal_(0, wide * gain, generator=generator)
    model.to(torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def build_windowed(folder: Path, seed: int = 0) -> Path:
    """A Gemma 3 of which three layers of four look WINDOW tokens back; weights are BF16.

    SGLang serves this class from one KV pool. Its head is its embedding, so the norms after each block
    are large: the answer would repeat its last token otherwise.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **SIZES,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        pad_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 0.2 if "embed" in name else weight.shape[1] ** -0.5
                weight.normal_(0, gain, generator=generator)
            elif "post_" in name:
                weight.fill_(9.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_only = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>").save_pretrained(folder)


# Three gated-delta layers to one that keeps K and V. Of 8 layers two keep it, so that a layer's id and its place
# in the pool are different numbers.
TINY_HYBRID = {
    "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
INTERVAL = 4
# What a Qwen3.5-MoE has in place of the MLP of every layer: routed experts, and a gated one for all tokens.
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def build_hybrid(folder: Path, seed: int = 0, **sizes: int) -> Path:
    """A Qwen3.5 text model with random BF16 weights and a byte tokenizer.

    ``sizes``: instead of those of TINY_HYBRID; with the keys of EXPERTS it is a Qwen3.5-MoE.
    """
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **TINY_HYBRID,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": INTERVAL,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 8192,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": VOCAB - 1,
        "dtype": "bfloat16",
        **sizes,
    }
    config["intermediate_size"] = 2 * config["hidden_size"]
    if "num_experts" in sizes:
        config |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    layers = config["num_hidden_layers"]
    kinds = ["full_attention" if i % INTERVAL == INTERVAL - 1 else "linear_attention" for i in range(layers)]
    config["layer_types"] = kinds
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _hybrid_shapes(config).items():
        tensors[name] = _hybrid_weight(name, shape, generator).to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _save_tokenizer(folder)
    return folder


def build_published_hybrid(folder: Path, source: Path, seed: int = 0) -> Path:
    """``source``, of build_hybrid, as Qwen3.5 is published: with a vision tower of random weights beside the text model,
    positions for images (M-RoPE), and a processor."""
    from transformers import (
        AutoTokenizer, Qwen2VLImageProcessor, Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )  # fmt: skip

    text = json.loads((source / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    patches = {"patch_size": 16, "merge_size": 2}
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": text["hidden_size"],
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(source)
    names = {key: f"<|{key}|>" for key in ("image_pad", "video_pad", "vision_start", "vision_end")}
    tokenizer.add_special_tokens({"additional_special_tokens": list(names.values())})
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(names.values())), strict=True))
    config = Qwen3_5Config(
        text_config={key: value for key, value in text.items() if key != "architectures"}, vision_config=vision,
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], tie_word_embeddings=False,
        vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"],
    )  # fmt: skip
    torch.manual_seed(seed)
    whole = Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).state_dict()
    tensors = {name: tensor.contiguous() for name, tensor in whole.items() if ".visual." in name}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name] = tensor
    assert set(tensors) == set(whole)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = config.to_dict() | {"architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "bfloat16"}
    described["text_config"]["rope_parameters"] = text["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(described, indent=1, default=str))
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches), tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**patches),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def _hybrid_shapes(config: dict) -> dict[str, tuple]:
    """Names and shapes of a Qwen3.5 checkpoint's tensors."""
    hidden, inner, head_dim = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    values, state = config["linear_num_value_heads"], config["linear_value_head_dim"]
    value_dim = values * state
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + value_dim
    attention = {
        "self_attn.q_proj.weight": (2 * heads * head_dim, hidden),  # with the output's gate
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }
    recurrent = {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (value_dim, hidden),
        "linear_attn.in_proj_a.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (values, hidden),
        "linear_attn.out_proj.weight": (hidden, value_dim),
        "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.norm.weight": (state,),
        "linear_attn.A_log": (values,),
        "linear_attn.dt_bias": (values,),
    }
    shared = {
        **(_expert_shapes(config) if "num_experts" in config else _mlp_shapes("mlp", hidden, inner)),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes = {name: (config["vocab_size"], hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shapes["model.norm.weight"] = (hidden,)
    for i, kind in enumerate(config["layer_types"]):
        own = attention if kind == "full_attention" else recurrent
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in {**shared, **own}.items()}
    return shapes


def _mlp_shapes(name: str, hidden: int, inner: int) -> dict[str, tuple]:
    shapes = {f"{name}.{side}_proj.weight": (inner, hidden) for side in ("gate", "up")}
    return shapes | {f"{name}.down_proj.weight": (hidden, inner)}


def _expert_shapes(config: dict) -> dict[str, tuple]:
    hidden, experts, inner = (config[key] for key in ("hidden_size", "num_experts", "moe_intermediate_size"))
    return {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        "mlp.experts.down_proj": (experts, hidden, inner),
        **_mlp_shapes("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"]),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


def _hybrid_weight(name: str, shape: tuple, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("A_log"):  # decays of exp(-softplus(dt)) to the power 0.02 to 2
        return torch.empty(shape).uniform_(0.02, 2, generator=generator).log()
    if name.endswith(("dt_bias", "linear_attn.norm.weight")):
        return torch.ones(shape)
    if len(shape) == 1:  # added to one
        return torch.zeros(shape)
    gain = 1.0 if "embed" in name else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator) * gain * (3.0 if "lm_head" in name else 1.0)


def build_draft(folder: Path, target: Path, seed: int = 1, mask_token: int = MASK_TOKEN) -> Path:
    """A DFlash draft for ``target`` in the layout of published checkpoints; random, so it is nearly
    never right."""
    config = json.loads((target / "config.json").read_text())
    hidden, inner, layers = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return values.to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    captured = [0, layers - 2]
    tensors = {"fc.weight": weight(hidden, len(captured) * hidden)}
    tensors |= {f"{name}.weight": ones(hidden) for name in ("hidden_norm", "norm")}
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    for layer in range(DRAFT_LAYERS):
        for name, rows, columns in (
            ("self_attn.q_proj", q_size, hidden),
            ("self_attn.k_proj", kv_size, hidden),
            ("self_attn.v_proj", kv_size, hidden),
            ("self_attn.o_proj", hidden, q_size),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"layers.{layer}.{name}.weight"] = weight(rows, columns)
        for name, size in (
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ):
            tensors[f"layers.{layer}.{name}.weight"] = ones(size)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    of_hybrids = ("full_attention_interval", "attn_output_gate", "partial_rotary_factor", "rope_parameters")
    config = {k: v for k, v in config.items() if k not in of_hybrids and not k.startswith("linear_")}
    config |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "head_dim": head_dim,
        "num_hidden_layers": DRAFT_LAYERS,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "num_target_layers": layers,
        "block_size": BLOCK_SIZE,
        "dflash_config": {"target_layer_ids": captured, "mask_token_id": mask_token},
    }
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:  # a windowed target has one for each kind of layer
        config |= {"rope_parameters": rope["full_attention"], "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def build_dflash2(folder: Path, draft: Path, window: int, seed: int = 3) -> Path:
    """The DFlash draft ``draft`` turned into a DFlash2 in the layout of published ones: all layers windowed, everything
    DFlash's in dflash_config. Convolution and selector are small and random, so that most of what it proposes is still
    right."""
    taps, group, rank, top_k = 2, 16, 8, 4
    config = json.loads((draft / "config.json").read_text())
    tensors = load_file(draft / "model.safetensors")
    hidden, layers, vocab = (config[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    for layer in range(layers):
        for name in ("attention_conv", "mlp_conv"):
            base = random(2, taps, hidden, scale=0.02)
            base[:, 0] += 1  # tap 0 alone would be no convolution
            tensors[f"layers.{layer}.{name}.base_kernel"] = base
            rows = 2 * taps * (hidden // group)
            projection = random(rows, hidden, scale=0.02 * hidden**-0.5)
            tensors[f"layers.{layer}.{name}.kernel_projection.weight"] = projection
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}"] = random(vocab, rank, scale=0.3)
    projection = random(rank, hidden, scale=hidden**-0.5)
    tensors["candidate_selector.hidden_projection.weight"] = projection
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    moved = {key: config.pop(key) for key in ("block_size", "num_target_layers")}
    config["dflash_config"] |= moved | {
        "conv_kernel_size": taps,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": top_k,
    }
    config |= {
        "architectures": ["DFlash2DraftModel"],
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": window,
        "use_sliding_window": True,
        "is_causal": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def build_older_layout(folder: Path, draft: Path) -> Path:
    """The DFlash draft ``draft`` with everything DFlash's at the top of its config.json, and no block size."""
    config = json.loads((draft / "config.json").read_text())
    config |= config.pop("dflash_config")
    del config["block_size"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "model.safetensors").symlink_to(draft / "model.safetensors")
    return folder
