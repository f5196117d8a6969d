"""Tokens a second of the embedded engine, of transformers' ``generate`` and of its continuous batching.

    python benchmarks/text_generation.py [--size tiny small ...] [--requests 32 128 256] [--repeats 5] [--device cpu]

The same tiny model with random weights, the same prompts in groups, fp32, one thread, temperature 1. Every token ends a
completion with one chance in about 40, so that lengths differ as they do in RL; each candidate draws its own. All take
turns within one process; what is printed is the median over the repeats of drawn tokens per second of the process's CPU
time, which other processes do not disturb, and the ratio to ``generate`` in the same repeat. With --device cuda it is
wall-clock time.

``generate`` pads prompts at their left and goes on until the last completion has ended. ``generate_batch`` has
``num_blocks``, ``max_batch_tokens`` and ``page_size`` set to what these requests need. ``ungrouped`` is the engine with
prompts that all differ, so that none of their keys and values is shared.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable

from sfumato.kernels import choose_kernels

choose_kernels()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402

from sfumato.rollout.engines.base import GenerationRequest, Sampling  # noqa: E402
from sfumato.rollout.engines.embedded.complete import complete_requests  # noqa: E402
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine  # noqa: E402

SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32},
}
VOCABULARY, GROUP, PROMPT, LONGEST = 260, 8, (10, 40), 60
STOP = tuple(range(3, 10))


def make_module(size: str, device: str) -> nn.Module:
    """A Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        intermediate_size=4 * SIZES[size]["hidden_size"],
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **SIZES[size],
    )
    return Qwen3ForCausalLM(config).to(device).eval()


def make_requests(count: int, group: int) -> list[GenerationRequest]:
    """Requests in groups of equal prompts."""
    generator = np.random.default_rng(count)
    prompts = [generator.integers(10, VOCABULARY, size=generator.integers(*PROMPT)).tolist() for _ in range(count)]
    return [GenerationRequest(prompts[number // group], number, LONGEST) for number in range(count)]


def with_engine(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> Callable[[int], int]:
    """Draws completions. Returns their tokens."""

    def run(repeat: int) -> int:
        fresh = [dataclasses.replace(request, seed=request.seed + 1000 * repeat) for request in requests]
        return sum(
            len(sequence.token_ids) for sequence in complete_requests(engine, fresh, Sampling(1.0, stop_token_ids=STOP))
        )

    return run


def generation_config() -> GenerationConfig:
    """Plain sampling."""
    return GenerationConfig(
        max_new_tokens=LONGEST,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(STOP),
        pad_token_id=0,
    )


def with_generate(module: nn.Module, requests: list[GenerationRequest]) -> Callable[[int], int]:
    """One padded batch of all."""
    width = max(len(request.prompt_ids) for request in requests)
    input_ids = torch.zeros(len(requests), width, dtype=torch.int64, device=module.device)
    for row, request in enumerate(requests):
        input_ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)

    def run(repeat: int) -> int:
        torch.manual_seed(repeat)
        with torch.no_grad():
            result = module.generate(
                input_ids, attention_mask=(input_ids > 0).long(), generation_config=generation_config()
            )
        return int((result[:, width:] > 0).sum())  # token 0 is padding, and drawn by chance in one of 260

    return run


def with_generate_batch(module: nn.Module, requests: list[GenerationRequest]) -> Callable[[int], int]:
    """transformers' continuous batching."""
    page = 16
    longest = max(len(request.prompt_ids) for request in requests) + LONGEST
    sizes = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=len(requests) * (longest // page + 1),
        max_batch_tokens=max(512, 2 * len(requests)),
        return_logprobs=True,
        seed=0,
    )
    prompts = [list(request.prompt_ids) for request in requests]

    def run(repeat: int) -> int:
        del repeat
        batch = module.generate_batch(prompts, generation_config=generation_config(), continuous_batching_config=sizes)
        return sum(len(value.generated_tokens) for value in batch.values())

    return run


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--requests", nargs="+", type=int, default=[32, 128, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    print("| model | requests | candidate | tokens a second | times generate |\n|---|---|---|---|---|")
    for size in options.size:
        for count in options.requests:
            module, grouped, alone = (
                make_module(size, options.device),
                make_requests(count, GROUP),
                make_requests(count, 1),
            )
            candidates = {
                "generate": with_generate(module, grouped),
                "generate_batch": with_generate_batch(module, grouped),
                "engine": with_engine(EmbeddedEngine(module), grouped),
                "engine, ungrouped": with_engine(EmbeddedEngine(module), alone),
            }
            rates: dict[str, list[float]] = {name: [] for name in candidates}
            for repeat in range(options.repeats + 1):  # the first warms up
                for name, run in candidates.items():
                    began = clock()
                    tokens = run(repeat)
                    rates[name].append(tokens / (clock() - began))
            for name, value in rates.items():
                ratios = [mine / theirs for mine, theirs in zip(value, rates["generate"], strict=True)][1:]
                rate, ratio = statistics.median(value[1:]), statistics.median(ratios)
                print(f"| {size} | {count} | {name} | {rate:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
