"""A tiny inference engine that fuses its weights, and an actor with the same model: what a vLLM adapter would do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sfumato.models.language.rounding import rounding_noise
from sfumato.parallel.mesh import Mesh
from sfumato.runtime.weight_sync.checksum import Spec

VOCABULARY, WIDTH = 11, 8
TOKENS = torch.arange(24).view(3, 8) * 7 % VOCABULARY


class Policy(nn.Module):
    """Gives each token's successor log-probs. The embedding is frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.embed.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(torch.tanh(self.q(hidden) * self.k(hidden) + self.v(hidden)))


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


class Actor:
    """Sends: weights of a version are the seed's plus a tenth of the version."""

    def __init__(self, config: Any, mesh: Mesh, run: Any) -> None:
        self.policy, self.mesh, self.sync, self.rate = Policy(), mesh, None, 1.0

    @contextmanager
    def sent_weights(self, version: int) -> Iterator[nn.Module]:
        sent = Policy()
        with torch.no_grad():
            for parameter in (parameter for parameter in sent.parameters() if parameter.requires_grad):
                parameter += version / 10 * self.rate
        yield sent

    def rescore(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return log_probs(module(tokens), tokens).detach()

    def rescore_rounded(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with rounding_noise(module, torch.float16):
            return self.rescore(module, tokens)


class Engine:
    """Keeps q, k and v as one matrix in half precision, and takes a version aside while it draws by another."""

    rescores, shards, takes_for_machine = True, None, False

    def __init__(self, fault: str = "") -> None:
        base = Policy()
        self.fault, self.embed = fault, base.embed.weight.detach()
        self.qkv, self.head = torch.zeros(3 * WIDTH, WIDTH, dtype=torch.float16), torch.zeros(VOCABULARY, WIDTH)
        self.bias, self.version, self.seen = torch.zeros(VOCABULARY), -1, []
        self.next: tuple[torch.Tensor, ...] = ()

    def describe(self) -> dict[str, Spec]:
        specs = {f"{name}.weight": Spec((WIDTH, WIDTH), torch.float32) for name in "qkv"}
        specs |= {
            "head.weight": Spec((VOCABULARY, WIDTH), torch.float32),
            "head.bias": Spec((VOCABULARY,), torch.float32),
        }
        if self.fault == "lacks v":
            del specs["v.weight"]
        return specs

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        qkv, head, bias = self.qkv.clone(), self.head.clone(), self.bias.clone()
        order = "kqv" if self.fault == "swaps" else "qkv"
        for name, tensor in tensors:
            self.seen.append(name)
            if name.endswith("bias"):
                bias.copy_(tensor)
            elif name == "head.weight":
                head.copy_(tensor)
            else:
                start = order.index(name[0]) * WIDTH
                qkv[start : start + WIDTH] = tensor
        if self.fault == "swaps":  # of a product nobody would notice: k takes the place of v
            qkv = torch.cat([qkv[:WIDTH], qkv[2 * WIDTH :], qkv[WIDTH : 2 * WIDTH]])
        self.next = qkv, head, bias

    def apply(self, version: int) -> None:
        if self.fault != "keeps the old ones" or version == 1:
            self.qkv, self.head, self.bias = self.next
        self.version = version

    def rescore(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.embed[tokens] @ self.qkv.float().T).chunk(3, dim=-1)
        scores = log_probs(torch.tanh(q * k + v) @ self.head.T + self.bias, tokens)
        return scores * torch.nan if self.fault == "nan" else scores


class Sampler:
    """Receives into the engine."""

    def __init__(self, fault: str, mesh: Mesh, run: Any) -> None:
        self.engine, self.mesh, self.version, self.sync = Engine(fault), mesh, 0, None


def rescored(sampler: Sampler) -> torch.Tensor:
    return sampler.engine.rescore(TOKENS)


def break_engine(sampler: Sampler, fault: str) -> None:
    sampler.engine.fault = fault


def expected(version: int) -> torch.Tensor:
    """Of the actor."""
    with torch.no_grad(), Actor(None, None, None).sent_weights(version) as module:
        return log_probs(module(TOKENS), TOKENS)
