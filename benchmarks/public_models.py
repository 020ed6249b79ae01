"""Takes models from the packages that people take them from, in the sizes of `protocol.py`: `torch_loop.py --public`.

ResNet-50 of torchvision, ViT of timm, GPT-2 and BERT of transformers, and its Llama with the adapters of peft. All
begin with random weights, and none drops anything.
"""

import importlib
from typing import Any

import protocol
import torch
from torch import nn


class Logits(nn.Module):
    """A model of transformers, called as `torch_loop.py` calls models, which returns logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, token_ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        names = {"segment_ids": "token_type_ids", "padding_mask": "attention_mask"}
        return self.model(input_ids=token_ids, **{names[name]: array for name, array in more.items()}).logits


def gpt(width: int, vocabulary: int) -> nn.Module:
    """Builds GPT-2, whose embeddings are tied."""
    hub = importlib.import_module("transformers")
    config = hub.GPT2Config(
        vocab_size=vocabulary, n_positions=protocol.SHAPES["gpt"][0], n_embd=width, n_layer=protocol.NUM_BLOCKS,
        n_head=protocol.NUM_HEADS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return Logits(hub.GPT2LMHeadModel(config))


def bert(width: int, vocabulary: int) -> nn.Module:
    """Builds BERT and a classifier of its first place."""
    hub = importlib.import_module("transformers")
    config = hub.BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=protocol.NUM_BLOCKS,
        num_attention_heads=protocol.NUM_HEADS, intermediate_size=4 * width, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=protocol.SHAPES["bert"][0],
        num_labels=protocol.NUM_CLASSES,
    )  # fmt: skip
    return Logits(hub.BertForSequenceClassification(config))


def llama(width: int, vocabulary: int) -> nn.Module:
    """Builds Llama with adapters on queries and values, which alone train."""
    hub, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    config = hub.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=protocol.NUM_BLOCKS,
        num_attention_heads=protocol.NUM_HEADS, num_key_value_heads=protocol.NUM_KEY_HEADS,
        max_position_embeddings=protocol.SHAPES["llama"][0], use_cache=False,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=protocol.LORA_RANK, target_modules=["q_proj", "v_proj"])
    return Logits(peft.get_peft_model(hub.LlamaForCausalLM(config), adapters))


def resnet50() -> nn.Module:
    """Builds ResNet-50."""
    return importlib.import_module("torchvision").models.resnet50(num_classes=protocol.NUM_CLASSES)


def vit(width: int) -> nn.Module:
    """Builds a vision transformer."""
    return importlib.import_module("timm.models").VisionTransformer(
        img_size=protocol.SHAPES["vit"][0], patch_size=protocol.PATCH, num_classes=protocol.NUM_CLASSES,
        embed_dim=width, depth=protocol.NUM_BLOCKS, num_heads=protocol.NUM_HEADS,
    )  # fmt: skip


def make_model(args: Any) -> nn.Module:
    """Builds the model `args.model`."""
    if args.model in protocol.TEXTS:
        return {"gpt": gpt, "bert": bert, "llama": llama}[args.model](args.width, args.vocabulary)
    return vit(args.width) if args.model == "vit" else resnet50()
