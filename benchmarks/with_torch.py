"""The rival that torch is, run by a Python that has it: its draws, and the eager step of a GPT of the same block.

`init ROWS` serves draws of the matrices named; `rss DRAW ROWS` prints the memory of one; `train SIZES` serves steps.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness import forget_peak, peak_bytes, serve

DRAWS = {
    "torch normal_": lambda x: x.normal_(0, 0.02),
    "torch trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.02, a=-0.04, b=0.04),
}


def drawn(draw: str, shapes: list[list[int]]) -> list[torch.Tensor]:
    """One tensor a matrix, as torch has it."""
    with torch.no_grad():
        return [DRAWS[draw](torch.empty(shape)) for shape in shapes]


def memory(draw: str, shapes: list[list[int]]) -> dict[str, float]:
    """The peak over what was held before, by the parameters' bytes."""
    drawn(draw, [[8, 8]])
    base = forget_peak()
    kept = drawn(draw, shapes)
    return {"peak": (peak_bytes() - base) / sum(4 * x.numel() for x in kept)}


class Block(nn.Module):
    """Pre-norm attention and GELU MLP without biases."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(d) for _ in range(2))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        B, T, D = x.shape
        q, k, v = (
            y.view(B, T, self.heads, D // self.heads).transpose(1, 2) for y in self.qkv(self.norm_1(x)).split(D, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Tied head, learned positions."""

    def __init__(self, layers: int, d: int, heads: int, seq: int, vocab: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(seq, d)
        self.blocks, self.norm = nn.Sequential(*(Block(d, heads) for _ in range(layers))), nn.LayerNorm(d)
        for name, x in self.named_parameters():
            if x.dim() > 1:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(x, std=0.02 / (math.sqrt(2 * layers) if last else 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T, V)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def train(layers: int, d: int, heads: int, seq: int, batch: int, vocab: int = 256) -> None:
    """Serve steps, AdamW as it comes and fused."""
    torch.manual_seed(0)
    tokens = torch.randint(vocab, (batch, seq + 1))

    def stepping(fused: bool) -> Any:
        model = Gpt(layers, d, heads, seq, vocab)
        adamw = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=fused)

        def step() -> None:
            adamw.zero_grad()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            loss.item()

        return step

    serve({"torch, eager": stepping(False), "torch, eager, fused AdamW": stepping(True)})


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    if verb == "init":
        shapes = json.loads(given[0])
        serve({draw: lambda draw=draw: drawn(draw, shapes) for draw in DRAWS})
    elif verb == "rss":
        print("\n" + json.dumps(memory(given[0], json.loads(given[1]))))
    else:
        train(**json.loads(given[0]))
