"""A model of Qwen3.5's shape with random weights, where no published one can be had.

    python examples/random_qwen3_5.py OUT runs/hybrid_30m/tokenizer

Its heads, convolutions and rotary entries are those of Qwen3.5 0.8 B; it has four of the 24 layers and the
vocabulary of the given tokenizer, which is copied.
"""

import argparse

import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

parser = argparse.ArgumentParser()
parser.add_argument("out", help="folder of the new model")
parser.add_argument("tokenizer", help="folder of a tokenizer")
given = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
config = Qwen3_5TextConfig(
    vocab_size=len(tokenizer),
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    tie_word_embeddings=True,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
torch.manual_seed(0)
Qwen3_5ForCausalLM(config).save_pretrained(given.out)
tokenizer.save_pretrained(given.out)
