"""A Hugging Face model on tilestream; needs `pip install "tilestream[transformers]"`.

The model is tiny and random, so nothing is downloaded. With a real one, pass the same attn_implementation to
from_pretrained.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tilestream.integrations.transformers import register

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()

tokens = torch.randint(128, (2, 20))
padding = torch.ones_like(tokens)
padding[0, :6] = 0  # the first sequence is shorter: padded on the left

logits = {}
for implementation in ("eager", register()):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        logits[implementation] = model(tokens, attention_mask=padding).logits

is_token = padding.bool()
torch.testing.assert_close(logits["tilestream"][is_token], logits["eager"][is_token], atol=1e-5, rtol=1e-4)
print("same logits as eager attention, padding included")
