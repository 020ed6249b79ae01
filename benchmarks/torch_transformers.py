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
