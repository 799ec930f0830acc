"""Attention, its gradients, and what it would have stored."""

import torch

import tilestream

query = torch.randn(1, 2048, 8, 64, requires_grad=True)  # (batch, seqlen, heads, head_dim)
key = torch.randn(1, 2048, 2, 64, requires_grad=True)  # 2 KV heads serve 8 query heads: GQA, nothing is expanded
value = torch.randn(1, 2048, 2, 64, requires_grad=True)

out = tilestream.attention(query, key, value, causal=True)
out.square().mean().backward()

assert out.shape == query.shape
assert torch.isfinite(key.grad).all()
print(f"out {tuple(out.shape)}, without the {4 * 8 * 2048**2 / 2**20:.0f} MiB of scores")
