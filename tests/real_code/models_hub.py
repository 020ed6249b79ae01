"""KerasHub's backbones of text and sound, tiny and without weights, each with a head that pools its outputs."""

from typing import Any

import numpy as np

from tests.real_code.cases import ROWS, Ready, case, classes, padding, pooled

VOCABULARY, LENGTH, MELS = 50, 12, 8
ENCODER = {"vocabulary_size": VOCABULARY, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 24}
SHORT = {"max_sequence_length": LENGTH}
GROUPED = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 24,
}
HEADS = GROUPED | {"head_dim": 4}
EXPERTS = {"num_experts": 4, "top_k": 2}
DROPPED = {"dropout": 0.1}
MIXED = ["linear_attention", "full_attention"]
LINEAR = {
    "layer_types": MIXED,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "partial_rotary_factor": 0.5,
}
BOTH_SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 16,
        "intermediate_dim": 24,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }.items()
}

# The class without "Backbone", and what it is made with.
BACKBONES: dict[str, dict[str, Any]] = {
    "Bert": ENCODER | SHORT,
    "DistilBert": ENCODER | SHORT,
    "Roberta": ENCODER | SHORT,
    "XLMRoberta": ENCODER | SHORT,
    "Albert": ENCODER | SHORT | DROPPED | {"embedding_dim": 8},
    "DebertaV3": ENCODER | SHORT | {"bucket_size": 4},
    "Electra": {"vocab_size": VOCABULARY, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "embedding_dim": 8,
                "intermediate_dim": 24} | SHORT,
    "FNet": {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24} | SHORT,
    "RoformerV2": ENCODER | {"head_size": 8},
    "ESM": ENCODER | SHORT,
    "XLNet": ENCODER | DROPPED,
    "GPT2": ENCODER | SHORT,
    "GPTNeoX": ENCODER | SHORT | DROPPED,
    "OPT": ENCODER | SHORT,
    "Bloom": ENCODER | DROPPED,
    "Falcon": {"vocabulary_size": VOCABULARY, "num_layers": 2, "num_attention_heads": 2, "hidden_dim": 16,
               "intermediate_dim": 24, "attention_dropout_rate": 0.1, "feedforward_dropout_rate": 0.1},
    "Llama": GROUPED | DROPPED,
    "Llama3": GROUPED | DROPPED,
    "Mistral": GROUPED | DROPPED | {"sliding_window": 4},
    "Mixtral": GROUPED | DROPPED | EXPERTS,
    "Gemma": HEADS | DROPPED,
    "Gemma3": HEADS | DROPPED | {"image_size": 16, "use_sliding_window_attention": True, "sliding_window_size": 4},
    "Gemma4": HEADS | DROPPED | {"image_size": 16, "sliding_window_size": 4, "sliding_window_pattern": 2},
    "Phi3": GROUPED | DROPPED,
    "Qwen": GROUPED | DROPPED,
    "Qwen3": HEADS | DROPPED,
    "Qwen3_5": HEADS | DROPPED | LINEAR,
    "QwenMoe": GROUPED | DROPPED | EXPERTS | {"moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 8},
    "Qwen3Moe": HEADS | DROPPED | EXPERTS | {"moe_intermediate_dim": 8},
    "GptOss": HEADS | DROPPED | EXPERTS | {"sliding_window": 4},
    "SmolLM3": {"vocabulary_size": VOCABULARY, "hidden_dim": 16, "intermediate_dim": 24, "num_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False, "attention_dropout": 0.1,
                "rope_layer_enabled_list": [True, False], "layer_types": ["full_attention"] * 2, "mlp_bias": False,
                "layer_norm_epsilon": 1e-6, "max_position_embeddings": 32, "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0},
    "RWKV7": {"hidden_size": 16, "head_size": 8, "num_layers": 2, "vocabulary_size": VOCABULARY,
              "intermediate_dim": 24, "gate_lora": 4, "mv_lora": 4, "aaa_lora": 4, "decay_lora": 4},
    "Bart": ENCODER | SHORT,
    "T5": ENCODER,
    "T5Gemma": {"vocabulary_size": VOCABULARY, "dropout_rate": 0.1, "sliding_window": 4,
                "cross_attention_hidden_size": 16} | BOTH_SIDES,
    "EdRec": {"vocab_size": VOCABULARY, "num_layers_enc": 1, "num_layers_dec": 1, "hidden_dim": 16,
              "intermediate_dim": 24, "num_heads": 2} | DROPPED,
    "Whisper": ENCODER | DROPPED | {"num_mels": MELS, "max_encoder_sequence_length": 16,
                                    "max_decoder_sequence_length": LENGTH},
    "Moonshine": {"vocabulary_size": VOCABULARY, "filter_dim": 16, "encoder_num_layers": 1, "decoder_num_layers": 1,
                  "hidden_dim": 16, "intermediate_dim": 24, "encoder_num_heads": 2, "decoder_num_heads": 2,
                  "dropout": 0.1},
}  # fmt: skip


def data_for(inputs: Any, random: np.random.RandomState) -> Any:
    """Data by the names of a backbone's inputs."""
    if not isinstance(inputs, dict):
        return random.rand(ROWS, *inputs.shape[1:]).astype("float32")
    data = {}
    for name, tensor in sorted(inputs.items()):
        if name.endswith("padding_mask"):
            length = 1500 if "encoder_input_values" in inputs and name.startswith("encoder") else LENGTH
            mask = padding(random, length)
            data[name] = mask.astype(tensor.dtype)
        elif name.endswith("token_ids"):
            data[name] = random.randint(1, VOCABULARY, (ROWS, LENGTH)).astype("int32")
        elif name in ("segment_ids", "response_mask"):
            data[name] = (np.arange(LENGTH) >= random.randint(3, 9, (ROWS, 1))).astype("int32")
        elif name == "position_ids":
            data[name] = np.tile(np.arange(LENGTH, dtype="int32"), (ROWS, 1))
        elif name == "encoder_features":
            data[name] = random.randn(ROWS, 16, MELS).astype("float32")
        elif name == "encoder_input_values":
            data[name] = random.randn(ROWS, 1500, 1).astype("float32")
        else:
            data[name] = random.rand(ROWS, *tensor.shape[1:]).astype("float32")
    return data


def with_head(backbone: Any, random: np.random.RandomState) -> Ready:
    import keras

    outputs = backbone.output
    if isinstance(outputs, dict):
        outputs = [outputs[name] for name in sorted(outputs) if not name.endswith("mask")]
    model = keras.Model(backbone.input, pooled(outputs))
    return Ready(model=model, x=data_for(backbone.input, random), y=classes(random))


def register(name: str, choices: dict[str, Any]) -> None:
    @case("KerasHub, text and sound" if name not in ("Whisper", "Moonshine") else "KerasHub, sound", f"hub {name}")
    def make(random: np.random.RandomState) -> Ready:
        import keras_hub

        return with_head(getattr(keras_hub.models, f"{name}Backbone")(**choices), random)


for key, value in BACKBONES.items():
    register(key, value)
