"""How far rounding moves log-probs of drawn tokens: engine and whole forward pass in float32, each against float64.

    python benchmarks/log_prob_rounding.py runs/text_rl/spell_backward_sft/hf_ckpt [--scale 4]

Draws answers to questions about random words with the embedded engine and says of each way how far it is from the same
weights in float64, what is left of that when logits of float32 go through a softmax of float64, and what noise of the
size of one rounding of the embeddings alone does to float64. ``--scale`` multiplies the logits.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from sfumato.rollout.engines.base import GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine

ROUNDING = 2.0**-24
"""Relative error of one rounding to float32, at most."""
QUESTION = "Spell this word backward (example: sun -> nus): {}"
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def questions(tokenizer: PreTrainedTokenizerBase, question: str, count: int) -> list[list[int]]:
    """The question about words of three random letters."""
    letters = torch.randint(97, 123, (count, 3), generator=torch.Generator().manual_seed(0))
    texts = [CHATML.format(question.format(bytes(word).decode())) for word in letters.tolist()]
    return [tokenizer(text).input_ids for text in texts]


@torch.no_grad()
def logits_of(module: nn.Module, tokens: Tensor, begin: int) -> Tensor:
    """Of the tokens from a place on, ``[T, V]``."""
    return module(input_ids=tokens, use_cache=False).logits[0, begin - 1 : -1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model in float32")
    parser.add_argument("--question", default=QUESTION, help="with {} where the word stands")
    parser.add_argument("--prompts", type=int, default=100, help="how many, of four answers each")
    parser.add_argument("--tokens", type=int, default=16, help="most tokens of an answer")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the weights of the last layer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    module = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    module.get_decoder().norm.weight.data *= arguments.scale  # pyright: ignore[reportAttributeAccessIssue]
    exact = copy.deepcopy(module).double()
    noisy = copy.deepcopy(exact)
    noisy.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, output: output * (1 + (2 * torch.rand_like(output) - 1) * ROUNDING)
    )

    requests = [
        GenerationRequest(prompt, 4 * number + member, arguments.tokens)
        for number, prompt in enumerate(questions(tokenizer, arguments.question, arguments.prompts))
        for member in range(4)
    ]
    drawn = complete_requests(EmbeddedEngine(module), requests, Sampling(stop_token_ids=(module.config.eos_token_id,)))
    actual: dict[str, list[Tensor]] = {}
    for request, completion in zip(requests, drawn, strict=True):
        begin, tokens = len(request.prompt_ids), torch.tensor([[*request.prompt_ids, *completion.token_ids]])

        def picked(logits: Tensor, chosen: Tensor = tokens[0, begin:, None]) -> Tensor:
            return logits.log_softmax(-1).gather(-1, chosen)[:, 0].double()

        single, double = logits_of(module, tokens, begin), logits_of(exact, tokens, begin)
        engine, whole, reference = torch.tensor(completion.log_probs).double(), picked(single), picked(double)
        row = {
            "engine, from float64": engine - reference,
            "whole sequence, from float64": whole - reference,
            "whole sequence with a softmax of float64, from float64": picked(single.double()) - reference,
            "engine, from whole sequence": engine - whole,
            "float64 with one rounding of the embeddings, from float64": picked(logits_of(noisy, tokens, begin))
            - reference,
            "largest logit": double.abs().amax(-1),
        }
        row["engine from whole sequence, in roundings of the largest logit"] = (engine - whole) / (
            ROUNDING * row["largest logit"]
        )
        for name, values in row.items():
            actual.setdefault(name, []).append(values.abs())
    num_tokens = sum(len(sequence.token_ids) for sequence in drawn)
    print(f"{arguments.model}: {num_tokens} tokens, logits times {arguments.scale:g}")
    for name, parts in actual.items():
        values = torch.cat(parts)
        print(f"  {name}: largest {values.max():.2g}, root mean square {values.square().mean().sqrt():.2g}")


if __name__ == "__main__":
    main()
