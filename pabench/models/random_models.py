"""Random-weight Llamas whose attention matters: with the usual 0.02 init a faulty attention hardly moves the logits.

With h the normalised input of a layer (unit RMS), an element of W·h has standard deviation gain when W's entries have
gain/√columns. So q and k of gain √2.5 give q·k/√D a standard deviation of 2.5, and RoPE, a rotation, keeps it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pabench.models.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE
from pabench.models.catalog import RandomGeometry
from pabench.models.notices import quiet_transformers

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ATTENTION_LOGIT_STD = 2.5
_GAINS = {
    "embed_tokens": 1.0,  # of the residual stream's unit scale
    "q_proj": math.sqrt(ATTENTION_LOGIT_STD),
    "k_proj": math.sqrt(ATTENTION_LOGIT_STD),
    "v_proj": 1.0,
    "o_proj": 1.5,  # attention averages values: what it adds is then about as large as what is there
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 1.0,
    "lm_head": 2.5,  # logits: the top token gets a tenth or so, neither flat nor one-hot
}


def random_model(geometry: RandomGeometry, *, seed: int, attn_implementation: str = "sdpa") -> LlamaForCausalLM:
    """An fp32 Llama of that geometry, the same bits on every machine for one ``seed``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_q_heads,
        num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.max_length,
        tie_word_embeddings=False,  # tied random embeddings would predict the token just read
    )
    config._attn_implementation = attn_implementation
    with quiet_transformers():
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms stay 1
                continue
            layer = name.split(".")[-2]
            std = _GAINS[layer] / (1.0 if layer == "embed_tokens" else math.sqrt(weight.shape[1]))
            # uniform, not normal: no transcendental function, hence no bit that depends on the machine
            weight.copy_((torch.rand(weight.shape, generator=generator) * 2 - 1) * (math.sqrt(3) * std))
    return model
