# SPDX-License-Identifier: Apache-2.0
"""The pair's own tokenizer: byte-level BPE with single digits, and the chat template beside it.

`render` writes the same text as the template does; it exists because it is a hundred times
faster, and a test holds the two together.
"""
from __future__ import annotations

import json
import random
from pathlib import Path

import corpus

VOCAB_SIZE = 768
PAD, START, END, MASK = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"
SPECIAL = [PAD, START, END, MASK]  # ids 0 to 3
VISIBLE = ["<tool_call>", "</tool_call>", "<think>", "</think>"]  # one token each, kept when decoding
# Every digit is a token of its own; a space belongs to the word after it.
SPLIT = (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

TEMPLATE = """\
{%- set first = messages[0] -%}
{%- set system = first.content if first.role == 'system' else '' -%}
{%- if system or tools -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if system and tools -%}{{- '\\n' -}}{%- endif -%}
{%- if tools -%}
{{- 'Tools:' -}}
{%- for t in tools -%}
{%- set f = t.function if t.function is defined else t -%}
{{- '\\n' + f.name + '(' + ((f.parameters or {}).get('properties') or {}) | join(', ') + '): ' + (f.description or '') -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages if m.role != 'system' -%}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}
{%- for c in m.tool_calls or [] -%}
{%- set c = c.function if c.function is defined else c -%}
{{- '<tool_call>\\n{"name": "' + c.name + '", "arguments": ' -}}
{{- c.arguments if c.arguments is string else c.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def segments(messages: list[dict], tools: list[dict]) -> list[tuple[str, bool]]:
    """Return the conversation as (text, learn) pieces; `learn` marks what the assistant writes."""
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    out = []
    if system or tools:
        lines = [system] if system else []
        if tools:
            lines.append("Tools:")
            for t in tools:
                f = t["function"]
                lines.append(f"{f['name']}({', '.join(f['parameters']['properties'])}): {f['description']}")
        out.append((f"{START}system\n" + "\n".join(lines) + f"{END}\n", False))
    for m in messages:
        if m["role"] == "assistant":
            out += [(f"{START}assistant\n", False), (f"{m['content']}{END}", True), ("\n", False)]
        elif m["role"] != "system":
            out.append((f"{START}{m['role']}\n{m['content']}{END}\n", False))
    return out


def render(messages: list[dict], tools: list[dict] = ()) -> str:
    """Return the prompt up to where the assistant starts to write."""
    return "".join(text for text, _ in segments(messages, list(tools))) + f"{START}assistant\n"


def build(seed: int, conversations: int = 20_000):
    """Train the byte-level BPE on the corpus and return a `tokenizers.Tokenizer`.

    Numerics: ids 0 to 3 are pad, start, end (eos) and the drafter's mask; deterministic for a seed
    Runs on: CPU
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    r = random.Random(seed)
    texts = ["".join(t for t, _ in segments(*corpus.conversation(r, 800 * (i % 4 == 0))))
             .replace(START, "").replace(END, "") for i in range(conversations)]
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(VISIBLE), special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in VISIBLE])
    assert tok.get_vocab_size() == VOCAB_SIZE, tok.get_vocab_size()
    assert [tok.token_to_id(t) for t in SPECIAL] == [0, 1, 2, 3]
    return tok


def save(tok, folder: Path, max_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    tok.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_tokens,
        "pad_token": PAD, "eos_token": END, "mask_token": MASK,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False}, indent=2) + "\n")


def encode_pieces(tok, conversations) -> list[tuple[list[int], list[bool]]]:
    """Return (ids, learn) per conversation; pieces meet at special tokens, so they encode alone."""
    pieces = [segments(m, t) for m, t in conversations]
    flat = tok.encode_batch([text for p in pieces for text, _ in p], add_special_tokens=False)
    out, at = [], 0
    for p in pieces:
        ids, learn = [], []
        for _, flag in p:
            ids += flat[at].ids
            learn += [flag] * len(flat[at].ids)
            at += 1
        out.append((ids, learn))
    return out
