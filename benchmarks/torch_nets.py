"""Builds the models of keras_nets.py in plain PyTorch, for `torch_loop.py`."""

import protocol
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch_models import norm


class Tagger(nn.Module):
    """From tokens `(batch, length)`, padded at their ends with 0, to logits `(batch, length, classes)`."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.logits = nn.Linear(2 * width, protocol.NUM_CLASSES)
        for name, weight in self.lstm.named_parameters():
            if name.startswith("bias_hh"):  # Keras has one bias
                nn.init.zeros_(weight.requires_grad_(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x != 0).sum(1).cpu()
        packed = pack_padded_sequence(self.tokens(x), lengths, batch_first=True, enforce_sorted=False)
        return self.logits(pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0])


class HalvingConv2d(nn.Conv2d):
    """A 3x3 convolution with a stride of 2 that pads below and on the right, as Keras' "same" does."""

    def __init__(self, channels: int, filters: int, groups: int = 1, bias: bool = True):
        super().__init__(channels, filters, 3, 2, groups=groups, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class Residual(nn.Module):
    """Two convolutions, between which the timestep is added, and a shortcut."""

    def __init__(self, channels: int, filters: int, width: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(protocol.NUM_GROUPS, channels), nn.Conv2d(channels, filters, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(protocol.NUM_GROUPS, filters), nn.Conv2d(filters, filters, 3, padding=1)
        self.time = nn.Linear(4 * width, filters)
        self.shortcut = nn.Conv2d(channels, filters, 1) if channels != filters else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class ImageAttention(nn.Module):
    """Attention of all pixels behind group norm, with a shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(protocol.NUM_GROUPS, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).flatten(2).transpose(1, 2)
        parts = (part.unflatten(-1, (protocol.NUM_HEADS, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        y = self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + y.transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """From `image`, `(batch, height, width, 3)`, and `timestep`, `(batch,)`, to the noise, as large as images."""

    def __init__(self, width: int):
        super().__init__()
        filters = [width, 2 * width, 4 * width]
        self.register_buffer("waves", protocol.LONGEST_WAVE ** (-torch.arange(width // 2) / (width // 2)), False)
        self.time1, self.time2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, 4 * width)
        self.stem, self.levels = nn.Conv2d(3, width, 3, padding=1), range(len(filters))
        channels = width
        for level, count in enumerate(filters):
            setattr(self, f"down{level}", Residual(channels, count, width))
            if level < len(filters) - 1:
                setattr(self, f"halve{level}", HalvingConv2d(count, count))
            channels = count
        self.first, self.second = (Residual(channels, channels, width) for _ in range(2))
        self.middle = ImageAttention(channels)
        for level, count in reversed(list(enumerate(filters))):
            setattr(self, f"up{level}", Residual(channels + count, count, width))
            if level:
                setattr(self, f"double{level}", nn.Conv2d(count, count, 3, padding=1))
            channels = count
        self.norm, self.noise = nn.GroupNorm(protocol.NUM_GROUPS, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, image: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        angles = timestep[:, None] * self.waves
        time = F.silu(self.time1(torch.cat((angles.sin(), angles.cos()), -1)))
        time = F.silu(self.time2(time))
        x, kept = self.stem(image.permute(0, 3, 1, 2)), []
        for level in self.levels:
            x = getattr(self, f"down{level}")(x, time)
            kept.append(x)
            if level < len(self.levels) - 1:
                x = getattr(self, f"halve{level}")(x)
        x = self.second(self.middle(self.first(x, time)), time)
        for level in reversed(self.levels):
            x = getattr(self, f"up{level}")(torch.cat((x, kept.pop()), 1), time)
            if level:
                x = getattr(self, f"double{level}")(F.interpolate(x, scale_factor=2.0))
        return self.noise(F.silu(self.norm(x))).permute(0, 2, 3, 1)


class Inverted(nn.Module):
    """A block that is wider within: fused, or depthwise with squeeze and excitation; with a shortcut."""

    def __init__(self, channels: int, filters: int, strides: int, widening: int, is_fused: bool):
        super().__init__()
        wide = widening * channels if widening > 1 else filters
        self.has_shortcut, self.is_fused = strides == 1 and channels == filters, is_fused
        size = 3 if is_fused else 1
        is_halving = is_fused and strides == 2
        self.expand = (
            HalvingConv2d(channels, wide, bias=False)
            if is_halving
            else nn.Conv2d(channels, wide, size, padding=size // 2, bias=False)
        )
        self.expand_norm = norm(wide, momentum=0.9)
        if not is_fused:
            self.depthwise = (
                HalvingConv2d(wide, wide, groups=wide, bias=False)
                if strides == 2
                else nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
            )
            self.depthwise_norm = norm(wide, momentum=0.9)
            self.squeeze, self.excite = nn.Conv2d(wide, channels // 4, 1), nn.Conv2d(channels // 4, wide, 1)
        self.narrows = widening > 1
        if self.narrows:
            self.project, self.project_norm = nn.Conv2d(wide, filters, 1, bias=False), norm(filters, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.expand_norm(self.expand(x)))
        if not self.is_fused:
            y = F.silu(self.depthwise_norm(self.depthwise(y)))
            y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        if self.narrows:
            y = self.project_norm(self.project(y))
        return x + y if self.has_shortcut else y


class EfficientNet(nn.Module):
    """From images `(batch, 3, height, width)` to logits `(batch, classes)`."""

    def __init__(self, width: int):
        super().__init__()
        self.stem, self.stem_norm = HalvingConv2d(3, width, bias=False), norm(width, momentum=0.9)
        self.names, channels = [], width
        for stage, (is_fused, num_blocks, part, strides, widening) in enumerate(protocol.STAGES, 1):
            for block in range(1, num_blocks + 1):
                self.names.append(f"stage{stage}_block{block}")
                filters, own = int(part * width), strides if block == 1 else 1
                setattr(self, self.names[-1], Inverted(channels, filters, own, widening, is_fused))
                channels = filters
        self.head, self.head_norm = nn.Conv2d(channels, 12 * width, 1, bias=False), norm(12 * width, momentum=0.9)
        self.logits = nn.Linear(12 * width, protocol.NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.stem_norm(self.stem(x)))
        for name in self.names:
            x = getattr(self, name)(x)
        return self.logits(F.silu(self.head_norm(self.head(x))).mean((2, 3)))
