# SPDX-License-Identifier: Apache-2.0
"""Training rows up to 131,072 tokens: many planted codes in one text, each asked for.

A row that costs a second of attention should teach more than one lookup, so a long text carries up
to 14 codes: one named by nothing else, the others by things that differ. The wording is corpus.py's,
and a third of the rows are corpus.conversation itself, one to three codes as the checks ask.
Rows are built by processes forked before the device is touched, while it already trains.
"""
from __future__ import annotations

import multiprocessing
import random

import numpy as np
import torch

import corpus
import tokenizer
import train_target

CHARS_PER_TOKEN = 3.83  # measured 3.86 on filler; less where numbers and made-up words abound
# padded length: rows at --size 1
LONG_MIX = {8192: 1200, 16384: 500, 32768: 260, 65536: 120, 131072: 110}
SHORT_SIZE = 0.6  # of train_target.MIX


def _body(r: random.Random, chars: int) -> list[str]:
    """Return filler; in a third of the texts a few sentences come again and again."""
    if r.random() > 0.33:
        return corpus.filler(r, chars)
    bank = [corpus.sentence(r) for _ in range(r.randint(3, 40))]
    mean = sum(map(len, bank)) / len(bank) + 1
    return r.choices(bank, k=max(1, int(chars / mean)))


def many_codes(r: random.Random, chars: int, count: int) -> list[corpus.Exchange]:
    """Return `count` questions, at most 14, on as many codes planted in about `chars` characters."""
    things = r.sample(corpus.THINGS, min(count, len(corpus.THINGS)))
    keys = [f" of the {r.choice(corpus.COLORS)} {t}" for t in things]
    keys = ([""] + keys)[:count] if r.random() < 0.7 else keys[:count]
    body, planted = _body(r, chars), []
    for key in keys:
        code = "-".join(r.choice("0123456789") for _ in range(r.choice((4, 4, 5, 6))))
        planted.append((key, code))
        start = r.choice(("The", "Remember this: the", "The secret", "The"))
        body.insert(r.randint(0, len(body)), f"{start} code{key} is {code}.")
    r.shuffle(planted)
    out = []
    for key, code in planted:
        ask = r.choice((f"What is the code{key}?", f"What was the code{key}?", f"Repeat the code{key}."))
        out.append(corpus.Exchange("recall", ask, f"The code{key} is {code}. I repeat: the code{key} is {code}.",
                                   code))
    text = " ".join(body)
    out[0].user = r.choice((f"{text}\n\n{out[0].user}", f"{text} {out[0].user}",
                            f"Read this text.\n{text}\n\n{out[0].user}"))
    return out


def conversation(r: random.Random, chars: int) -> tuple[list[dict], list[dict]]:
    """Return (messages, tools) of one long conversation."""
    if r.random() < 0.33:
        return corpus.conversation(r, chars)
    exs = many_codes(r, chars, r.choice((1, 7, 14, 14)))
    for _ in range(r.choice((0, 0, 1, 2))):
        exs.append(corpus.SHORT_KINDS[r.choice(sorted(corpus.SHORT_KINDS))](r))
    return corpus.assemble(r, exs)


def _long_shard(job):
    """Return (ids int16 [n, limit], learn bool [n, limit], lengths [n]); rows too long are drawn again."""
    seed, count, limit = job
    r = random.Random(seed)
    ids, learn = np.zeros((count, limit), np.int16), np.zeros((count, limit), bool)
    lengths = np.zeros(count, np.int64)
    for row in range(count):
        while not 0 < lengths[row] <= limit:
            chars = int((limit - min(1400, limit // 3)) * CHARS_PER_TOKEN * r.uniform(0.8, 1.0))
            (tokens, flags), = tokenizer.encode_pieces(train_target._TOKENIZER, [conversation(r, chars)])
            lengths[row] = len(tokens)
        ids[row, :len(tokens)], learn[row, :len(tokens)] = tokens, flags
    return limit, ids, learn, lengths


class Builder:
    """Rows by padded length, made in the background; the same for any number of workers."""

    def __init__(self, tok, seed: int, size: float, longest: int, workers: int):
        """Fork the workers; call it before the device is used."""
        self.pool = multiprocessing.get_context("fork").Pool(workers, train_target._start, (tok.to_str(),))
        self.brief = self.pool.map_async(train_target._shard, train_target.jobs(seed, SHORT_SIZE * size),
                                         chunksize=1)
        todo = []
        for limit, count in LONG_MIX.items():
            if limit <= longest:
                count, each = max(1, round(count * size)), max(1, 65536 // limit)
                todo += [(f"{seed}/long/{limit}/{i}", min(each, count - i), limit) for i in range(0, count, each)]
        self.long = self.pool.map_async(_long_shard, todo, chunksize=1)

    def short_rows(self) -> dict:
        return train_target.pad(self.brief.get())

    def long_rows(self) -> dict:
        """Wait for the long rows, close the workers and return {limit: (ids, learn, lengths)}."""
        parts: dict[int, list] = {}
        for limit, *arrays in self.long.get():
            parts.setdefault(limit, []).append(arrays)
        self.pool.close()
        self.pool.join()
        return {limit: tuple(torch.from_numpy(np.concatenate(x)) for x in zip(*rows))
                for limit, rows in sorted(parts.items())}
