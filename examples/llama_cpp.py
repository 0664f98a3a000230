"""Greedy text of a GGUF file in llama.cpp, beside that of the model it was converted from.

nalanda convert MODEL MODEL.gguf --to gguf
python examples/llama_cpp.py MODEL MODEL.gguf "The state of"
"""

import argparse
import sys

import xllamacpp

from nalanda.inference.load import load_model

parser = argparse.ArgumentParser()
parser.add_argument("model", help="a model's folder")
parser.add_argument("file", help="the GGUF file made of it")
parser.add_argument("prompt")
given = parser.parse_args()

model, tokenizer = load_model(given.model, device="cpu", dtype="float32")
ids = tokenizer(
    given.prompt, return_tensors="pt"
).input_ids  # with bos, if texts began with it in training
made = model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None)
# With the text before it: alone it may lose its first blank.
whole, before = (tokenizer.decode(x[0], skip_special_tokens=True) for x in (made, ids))
ours = whole[len(before) :]

params = xllamacpp.CommonParams()
params.model.path, params.verbosity, params.port = given.file, -1, 0
params.n_ctx, params.n_parallel, params.n_gpu_layers = 512, 1, 0
params.flash_attn_type = (
    xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
)  # its sums are fp16
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
answer = server.handle_completions(
    {"prompt": given.prompt, "n_predict": 64, "temperature": 0, "top_k": 1, "ignore_eos": True}
)
theirs = answer["choices"][0]["text"]

print(f"nalanda    {ours!r}\nllama.cpp  {theirs!r}\nequal: {ours == theirs}")
sys.exit(ours != theirs)
