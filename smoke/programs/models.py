"""The modules that ``make.py`` lowers to the corpus: shapes of real models, weights of none.

Each function returns a module and its inputs, built under PyTorch's fake tensors, so the weights
have no values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def matmul_2x2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The first program of TorchTPU's README: two 2x2 float32 matrices multiplied."""
    return _Product(), (torch.randn(2, 2), torch.randn(2, 2))


def matmul_8192() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two 8192x8192 bfloat16 matrices multiplied."""
    shape = (8192, 8192)
    return _Product(), tuple(torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))


class _Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A decoder layer with the shapes of a 1B Llama: hidden 2048, 32 heads over 8, 1024 tokens."""
    layer = Decoder(hidden=2048, heads=32, groups=8, width=8192)
    return _bfloat16(layer), (torch.randn(1, 1024, 2048, dtype=torch.bfloat16),)


def qwen() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A decoder layer with the shapes of a 1.5B Qwen: hidden 1536, 12 heads over 2, biases."""
    layer = Decoder(hidden=1536, heads=12, groups=2, width=8960, bias=True, normed=True)
    return _bfloat16(layer), (torch.randn(1, 1024, 1536, dtype=torch.bfloat16),)


def _bfloat16(module: nn.Module) -> nn.Module:
    return module.to(torch.bfloat16)


class Decoder(nn.Module):
    """Root-mean-square norm, rotary attention with grouped keys, gated feed-forward.

    Args:
        hidden: Width of a token.
        heads: Heads of the queries.
        groups: Heads of keys and values.
        width: Width of the feed-forward part.
        bias: Whether queries, keys and values have biases.
        normed: Whether queries and keys are normalised for each head.
    """

    def __init__(
        self,
        *,
        hidden: int,
        heads: int,
        groups: int,
        width: int,
        bias: bool = False,
        normed: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, hidden // heads
        self.before, self.after = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=bias)
        self.key = nn.Linear(hidden, groups * self.size, bias=bias)
        self.value = nn.Linear(hidden, groups * self.size, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(self.size) for _ in range(2)) if normed else None
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One layer over a batch of token vectors."""
        x = x + self._attention(self.before(x))
        h = self.after(x)
        fed: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + fed

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        q = self.query(x).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k = self.key(x).view(batch, tokens, self.groups, self.size).transpose(1, 2)
        v = self.value(x).view(batch, tokens, self.groups, self.size).transpose(1, 2)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        angles = self._angles(tokens, x.device)
        mixed = functional.scaled_dot_product_attention(
            _rotate(q, angles), _rotate(k, angles), v, is_causal=True, enable_gqa=True
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        return projected

    def _angles(self, tokens: int, device: torch.device) -> Tensor:
        steps = torch.arange(0, self.size, 2, device=device, dtype=torch.float32)
        places = torch.arange(tokens, device=device, dtype=torch.float32)
        return torch.outer(places, 10000.0 ** (-steps / self.size))


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def conv() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A residual block of two convolutions with batch norm: 64 channels of 56x56, batch 8."""
    return _Residual(), (torch.randn(8, 64, 56, 56),)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norms[0](self.convs[0](x)))
        return functional.relu(x + self.norms[1](self.convs[1](h)))


def embedding() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Token vectors of a vocabulary of 32000, and a cross entropy over it: 8 times 512 tokens."""
    tokens = torch.zeros(8, 512, dtype=torch.int64)
    return _Vocabulary(), (tokens, tokens)


class _Vocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32000, 512)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.table(tokens) @ self.table.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def experts() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two of eight experts for each token: top-k, gather, scatter; 1024 tokens of 512, bfloat16."""
    return _bfloat16(_Experts()), (torch.randn(1024, 512, dtype=torch.bfloat16),)


class _Experts(nn.Module):
    def __init__(self, count: int = 8, chosen: int = 2, hidden: int = 512) -> None:
        super().__init__()
        self.count, self.chosen = count, chosen
        self.router = nn.Linear(hidden, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, hidden, 2 * hidden))
        self.down = nn.Parameter(torch.randn(count, 2 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        tokens, hidden = x.shape
        weights, which = torch.topk(self.router(x).softmax(-1), self.chosen, dim=-1)
        # every expert has room for its share of the tokens; those beyond it are dropped
        room = 2 * tokens * self.chosen // self.count
        hot = functional.one_hot(which.flatten(), self.count)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1)
        kept = place < room
        slot = torch.where(kept, which.flatten() * room + place, self.count * room)
        source = torch.arange(tokens, device=x.device).repeat_interleave(self.chosen)
        store = x.new_zeros(self.count * room + 1, hidden).index_copy(0, slot, x[source])
        batch = store[:-1].view(self.count, room, hidden)
        done = torch.bmm(functional.silu(torch.bmm(batch, self.up)), self.down)
        back = torch.cat((done.flatten(0, 1), x.new_zeros(1, hidden)))[slot]
        return x.new_zeros(tokens, hidden).index_add(0, source, back * weights.reshape(-1, 1))


CORPUS: dict[str, tuple[Any, bool]] = {
    "small": (matmul_2x2, False),
    "large": (matmul_8192, False),
    "llama": (llama, True),
    "qwen": (qwen, True),
    "conv": (conv, True),
    "embedding": (embedding, True),
    "experts": (experts, True),
}
"""Name to what builds it, and whether it is trained (a backward program as well)."""
