"""Builds the models of keras_transformers.py in plain PyTorch, for `torch_loop.py`."""

from typing import Any

import protocol
import torch
import torch.nn.functional as F
from torch import nn


class EncoderBlock(nn.Module):
    """Attention and two dense layers, each with a shortcut and layer norm, first or last."""

    def __init__(self, width: int, is_norm_first: bool, epsilon: float, approximate: str = "none"):
        super().__init__()
        self.is_norm_first, self.approximate = is_norm_first, approximate
        self.norm1, self.norm2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """`mask`: `(batch, 1, 1, length)`, False where nobody attends to."""
        if self.is_norm_first:
            x = x + self._attended(self.norm1(x), mask)
            return x + self._dense(self.norm2(x))
        x = self.norm1(x + self._attended(x, mask))
        return self.norm2(x + self._dense(x))

    def _attended(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        shape = *x.shape[:2], protocol.NUM_HEADS, -1
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(x.shape))

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Transformer(nn.Module):
    """Holds blocks by name."""

    def __init__(self, make_block: Any):
        super().__init__()
        self.names = [f"block{number}" for number in range(1, protocol.NUM_BLOCKS + 1)]
        for name in self.names:
            setattr(self, name, make_block())

    def blocks(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        """Applies them one after the other."""
        for name in self.names:
            x = getattr(self, name)(x, *more)
        return x


class Bert(Transformer):
    """From `token_ids`, `segment_ids` and `padding_mask`, `(batch, length)` each, to logits `(batch, classes)`."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__(lambda: EncoderBlock(width, False, 1e-12, "tanh"))
        (length,) = protocol.SHAPES["bert"]
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, 1e-12)
        self.pooled, self.logits = nn.Linear(width, width), nn.Linear(width, protocol.NUM_CLASSES)

    def forward(self, token_ids: torch.Tensor, segment_ids: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(token_ids) + self.positions.weight + self.segments(segment_ids))
        x = self.blocks(x, padding_mask[:, None, None].bool())
        return self.logits(torch.tanh(self.pooled(x[:, 0])))


class ViT(Transformer):
    """From images `(batch, 3, height, width)` to logits `(batch, classes)`."""

    def __init__(self, width: int):
        super().__init__(lambda: EncoderBlock(width, True, 1e-6))
        rows, columns, channels = protocol.SHAPES["vit"]
        self.patches = nn.Conv2d(channels, width, protocol.PATCH, protocol.PATCH)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Embedding(1 + rows * columns // protocol.PATCH**2, width)
        self.norm, self.logits = nn.LayerNorm(width, 1e-6), nn.Linear(width, protocol.NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions.weight
        return self.logits(self.norm(self.blocks(x))[:, 0])


class AdaptedLinear(nn.Module):
    """A frozen projection to heads, and beside it one of a low rank that trains (LoRA, arXiv:2106.09685).

    As in Keras' EinsumDense each head has a projection to `LORA_RANK` numbers, and all share the one from there.
    """

    def __init__(self, width: int, heads: int, size: int):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.randn(heads * size, width) * width**-0.5)
        self.lora_a = nn.Parameter(torch.randn(heads * protocol.LORA_RANK, width) * width**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(size, protocol.LORA_RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, self.lora_a).unflatten(-1, (self.heads, -1))
        return F.linear(x, self.weight) + F.linear(low, self.lora_b).flatten(-2)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Turns pairs of numbers, of the two halves of the last axis, by a right angle."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class DecoderBlock(nn.Module):
    """Grouped attention and SwiGLU, each behind RMS norm and with a shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.size = width // protocol.NUM_HEADS
        few = protocol.NUM_KEY_HEADS
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.query = AdaptedLinear(width, protocol.NUM_HEADS, self.size)
        self.key, self.value = nn.Linear(width, few * self.size, bias=False), AdaptedLinear(width, few, self.size)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        query, key, value = (
            part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = (part * cos + turned(part) * sin for part in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(Transformer):
    """From tokens `(batch, length)` to logits of the next ones, `(batch, length, vocabulary)`; adapters train."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__(lambda: DecoderBlock(width))
        (length,) = protocol.SHAPES["llama"]
        self.tokens, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width, 1e-6)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        size = width // protocol.NUM_HEADS
        angles = torch.arange(length)[:, None] / protocol.LONGEST_WAVE ** (torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            weight.requires_grad_("lora" in name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(self.blocks(self.tokens(x), self.cos, self.sin)))
