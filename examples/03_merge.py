"""Attention over parts of the keys, merged into attention over all of them.

Decoding with a shared prefix, splitting a long cache over devices, and ring attention are all this.
"""

import torch

import tilestream

query = torch.randn(2, 1, 8, 64)  # one new token in each of two conversations
prefix_key, prefix_value = torch.randn(1, 500, 8, 64), torch.randn(1, 500, 8, 64)  # stored once
own_key, own_value = torch.randn(2, 40, 8, 64), torch.randn(2, 40, 8, 64)

# Both conversations read the prefix as rows of one batch entry.
shared = tilestream.attention_with_lse(query.transpose(0, 1), prefix_key, prefix_value)
shared = (shared.out.transpose(0, 1), shared.lse.transpose(0, 2))
own = tilestream.attention_with_lse(query, own_key, own_value)
out, lse = tilestream.merge(shared, own)

whole_key = torch.cat([prefix_key.expand(2, -1, -1, -1), own_key], dim=1)
whole_value = torch.cat([prefix_value.expand(2, -1, -1, -1), own_value], dim=1)
whole = tilestream.attention_with_lse(query, whole_key, whole_value)
torch.testing.assert_close(out, whole.out)
torch.testing.assert_close(lse, whole.lse)
print("prefix and conversation, merged, equal the whole")
