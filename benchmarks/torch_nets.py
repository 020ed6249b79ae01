"""Builds the models of keras_nets.py in plain PyTorch, for `torch_loop.py`."""

import protocol
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


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
