"""Builds the models of keras_models.py in plain PyTorch, for `torch_loop.py`."""

import protocol
import torch
import torch.nn.functional as F
from torch import nn


def norm(channels: int, scale: bool = True, epsilon: float = 1e-3, momentum: float = 0.99) -> nn.BatchNorm2d:
    """Makes batch norm with the names and defaults of Keras."""
    layer = nn.BatchNorm2d(channels, epsilon, 1 - momentum)
    layer.weight.requires_grad_(scale)
    return layer


class GPTBlock(nn.Module):
    """Causal attention and two dense layers, each behind layer norm and with a shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = *x.shape[:2], protocol.NUM_HEADS, -1
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """From tokens `(batch, length)` to logits of the next ones, `(batch, length, vocabulary)`."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        (length,) = protocol.SHAPES["gpt"]
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.names = [f"block{number}" for number in range(1, protocol.NUM_BLOCKS + 1)]
        for name in self.names:
            setattr(self, name, GPTBlock(width))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.positions.weight
        for name in self.names:
            x = getattr(self, name)(x)
        return self.logits(self.norm(x))


class Segmentation(nn.Module):
    """From images `(batch, 3, height, width)` to logits `(batch, classes, height, width)`."""

    def __init__(self, width: int):
        super().__init__()
        self.down1, self.down1_norm = nn.Conv2d(3, width, 4, 2, 1, bias=False), norm(width)
        self.down2, self.down2_norm = nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), norm(2 * width)
        self.down3, self.down3_norm = nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False), norm(4 * width)
        self.up1, self.up1_norm = nn.Conv2d(4 * width, 4 * 2 * width, 1, bias=False), norm(2 * width)
        self.up2, self.up2_norm = nn.Conv2d(2 * width, 4 * width, 1, bias=False), norm(width)
        self.logits = nn.Conv2d(width, 4 * protocol.SEGMENTATION_CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = F.relu(self.down1_norm(self.down1(x)))
        quarter = F.relu(self.down2_norm(self.down2(half)))
        x = F.relu(self.down3_norm(self.down3(quarter)))
        x = F.relu(self.up1_norm(F.pixel_shuffle(self.up1(x), 2)) + quarter)
        x = F.relu(self.up2_norm(F.pixel_shuffle(self.up2(x), 2)) + half)
        return F.pixel_shuffle(self.logits(x), 2)
