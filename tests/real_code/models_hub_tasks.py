"""KerasHub's tasks, tiny and without weights, compiled with the loss and the metrics that they bring along."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes, images
from tests.real_code.models_hub import BACKBONES, ENCODER, LENGTH, VOCABULARY, data_for
from tests.real_code.models_hub_vision import BACKBONES as OF_IMAGES
from tests.real_code.models_hub_vision import MIT, deeplab_backbone


def backbone(name: str) -> Any:
    import keras_hub

    choices = BACKBONES[name] if name in BACKBONES else OF_IMAGES[name]
    return getattr(keras_hub.models, f"{name.split()[0]}Backbone")(**choices)


def text_classifier(name: str, **choices: Any) -> None:
    @case("KerasHub, tasks", f"task {name}TextClassifier")
    def make(random: np.random.RandomState) -> Ready:
        import keras_hub

        task = getattr(keras_hub.models, f"{name}TextClassifier")(
            backbone(name), num_classes=CLASSES, preprocessor=None, **choices
        )
        return Ready(model=task, x=data_for(task.input, random), y=classes(random), loss="auto")


def causal_lm(name: str) -> None:
    @case("KerasHub, tasks", f"task {name}CausalLM")
    def make(random: np.random.RandomState) -> Ready:
        import keras_hub

        task = getattr(keras_hub.models, f"{name}CausalLM")(backbone(name), preprocessor=None)
        x = data_for(task.input, random)
        y = np.roll(x["token_ids"], -1, axis=1)
        weights = x["padding_mask"].astype("float32")
        return Ready(model=task, x=x, y=y, loss="auto", fit={"sample_weight": weights})


def masked_lm(name: str) -> None:
    @case("KerasHub, tasks", f"task {name}MaskedLM")
    def make(random: np.random.RandomState) -> Ready:
        import keras_hub

        task = getattr(keras_hub.models, f"{name}MaskedLM")(backbone(name), preprocessor=None)
        x = data_for({key: value for key, value in task.input.items() if key != "mask_positions"}, random)
        x["mask_positions"] = np.sort(random.randint(1, LENGTH // 2, (ROWS, 3))).astype("int32")
        y = random.randint(1, VOCABULARY, (ROWS, 3)).astype("int32")
        weights = (random.rand(ROWS, 3) > 0.2).astype("float32")
        return Ready(model=task, x=x, y=y, loss="auto", fit={"sample_weight": weights})


def image_classifier(name: str, kind: str) -> None:
    @case("KerasHub, tasks", f"task {kind}ImageClassifier")
    def make(random: np.random.RandomState) -> Ready:
        import keras_hub

        build = getattr(keras_hub.models, f"{kind}ImageClassifier")
        task = build(backbone(name), num_classes=CLASSES, preprocessor=None)
        return Ready(model=task, x=data_for(task.input, random), y=classes(random), loss="auto")


for key in ("Bert", "DistilBert", "Roberta", "Albert", "DebertaV3", "FNet"):
    text_classifier(key)
for key in ("GPT2", "OPT", "Llama", "Gemma", "Bloom"):
    causal_lm(key)
for key in ("Bert", "Roberta", "Albert"):
    masked_lm(key)
for key, task_name in (("ViT", "ViT"), ("ResNet v2", "ResNet"), ("MiT", "MiT"), ("EfficientNet", "EfficientNet")):
    image_classifier(key, task_name)


def pixels(random: np.random.RandomState) -> np.ndarray:
    """A class for each pixel, as a vector."""
    return np.eye(CLASSES, dtype="float32")[random.randint(0, CLASSES, (ROWS, 32, 32))]


@case("KerasHub, tasks", "task BartSeq2SeqLM")
def bart(random: np.random.RandomState) -> Ready:
    import keras_hub

    task = keras_hub.models.BartSeq2SeqLM(backbone("Bart"), preprocessor=None)
    x = data_for(task.input, random)
    y = np.roll(x["decoder_token_ids"], -1, axis=1)
    weights = x["decoder_padding_mask"].astype("float32")
    return Ready(model=task, x=x, y=y, loss="auto", fit={"sample_weight": weights})


@case("KerasHub, tasks", "task DeepLabV3ImageSegmenter")
def deeplab(random: np.random.RandomState) -> Ready:
    import keras_hub

    model = deeplab_backbone()
    task = keras_hub.models.DeepLabV3ImageSegmenter(model, num_classes=CLASSES, preprocessor=None)
    return Ready(model=task, x=images(random), y=pixels(random), loss="auto")


@case("KerasHub, tasks", "task SegFormerImageSegmenter")
def segformer(random: np.random.RandomState) -> Ready:
    import keras_hub

    encoder = keras_hub.models.MiTBackbone(**MIT)
    model = keras_hub.models.SegFormerBackbone(image_encoder=encoder, projection_filters=8)
    task = keras_hub.models.SegFormerImageSegmenter(model, num_classes=CLASSES, preprocessor=None)
    return Ready(model=task, x=images(random), y=pixels(random), loss="auto")


@case("KerasHub, tasks", "task Bert with LoRA")
def bert_with_lora(random: np.random.RandomState) -> Ready:
    """The backbone's kernels are held; small products beside them learn."""
    import keras_hub

    model = keras_hub.models.BertBackbone(**ENCODER | {"max_sequence_length": LENGTH})
    model.enable_lora(2)
    task = keras_hub.models.BertTextClassifier(model, num_classes=CLASSES, preprocessor=None)
    return Ready(model=task, x=data_for(task.input, random), y=classes(random), loss="auto")
