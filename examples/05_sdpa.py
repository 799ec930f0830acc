"""Code written for PyTorch's scaled_dot_product_attention, served by tilestream without a change."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from tilestream.integrations.sdpa import tilestream_sdpa

query, key, value = (torch.randn(2, 8, 300, 64) for _ in range(3))  # (batch, heads, seqlen, head_dim)
layer = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4, dropout=0.0, batch_first=True)
tokens = torch.randn(2, 50, 64)

wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
wanted_tokens = layer(tokens)
with tilestream_sdpa():
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, is_causal=True), wanted)
    torch.testing.assert_close(layer(tokens), wanted_tokens, atol=1e-5, rtol=1e-4)
print("PyTorch's attention calls, served by tilestream")
