"""Sequences of different lengths, packed without padding, against one call per sequence."""

from itertools import accumulate

import torch

import tilestream

lengths = [5, 130, 0, 64]
starts = [0, *accumulate(lengths)]
packed = torch.randn(sum(lengths), 4, 32)  # (total_tokens, heads, head_dim)
cu_seqlens = torch.tensor(starts, dtype=torch.int32)

out = tilestream.attention_varlen(packed, packed, packed, cu_seqlens, cu_seqlens, causal=True)

for start, length in zip(starts, lengths, strict=False):
    one = packed[None, start : start + length]
    alone = tilestream.attention(one, one, one, causal=True)
    torch.testing.assert_close(out[start : start + length], alone[0])
print(f"{len(lengths)} sequences, {sum(lengths)} tokens, no padding")
