"""A card says how a model trains; who verifies it notices a card or a model that was changed."""

import functools
import json

import keras
import numpy as np
import pytest

from kerasdp.errors import UserError
from kerasdp.parity import certificate
from tests.helpers import BACKENDS

SOURCE = "0" * 64
FIRST = BACKENDS[:1]


def build(units=3):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def data():
    random = np.random.RandomState(0)
    return random.rand(20, 4).astype("float32"), random.rand(20, 1).astype("float32")


def verified(card, build=build, source=SOURCE, **ways):
    ways = {"backends": FIRST, "device_counts": [1]} | ways
    return certificate.verify(card, build, data, what={"model": "mine"}, source=source, **ways)


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    ways = {"backends": FIRST, "device_counts": [1]}
    made = certificate.certify(build, data, what={"model": "mine"}, source=SOURCE, steps=3, batch_size=7, **ways)
    paths = certificate.write_card(made, str(tmp_path_factory.mktemp("card")))
    assert [path.rpartition("/")[2] for path in paths] == ["card.json", "card.md", "card.svg"]
    return paths[0]


@pytest.fixture
def content(card):
    return certificate.read_card(card)


@pytest.mark.proof
def test_it_is_verified_and_so_is_what_was_changed(content):
    assert verified(content) == []
    assert verified(content, source="1" * 64) == ["the code of the model is another than the card's"]
    wide = verified(content, functools.partial(build, 5))
    assert wide[0].endswith("float64: initial weights are others") and any("loss: expected" in line for line in wide)


@pytest.mark.proof
def test_a_tampered_card(content, tmp_path):
    content["trained"]["float64"]["losses"][1] *= 1.001
    found = verified(content)
    assert found[0] == "the card was changed after it was made: its checksum is wrong"
    assert "float64: step 1: loss: expected" in found[1] and len(found) == 2
    # With a right checksum, its numbers are wrong all the same.
    content["sha256"] = certificate._checksum(content)
    assert verified(content) == found[1:]


@pytest.mark.proof
@pytest.mark.skipif(len(BACKENDS) < 2, reason="two backends")
def test_other_ways(content):
    assert verified(content, backends=BACKENDS, device_counts=[1, 2]) == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"kerasdp card": 2}', '{"kerasdp card": 1, "made": 3}', '{"kerasdp card": true}'],
)
def test_what_is_no_card(text, tmp_path):
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(UserError, match="--card: (cannot read|expected a card of format 1)"):
        certificate.read_card(str(tmp_path / "card.json"))


@pytest.mark.parametrize(
    ("place", "value"),
    [(("what", "steps"), 10**12), (("what", "batch_size"), "x"), (("what", "seed"), None)]
    + [(("trained", "float64", name), ["a"]) for name in ("losses", "gradient_norms")]
    + [(("trained", "float64", "final"), {"w": 5})],
)
def test_each_field_is_checked(tmp_path, place, value):
    trained = {"optimizer": "SGD", "losses": [1.0], "gradient_norms": [1.0], "samples": "", "final": {}, "ways": []}
    card = {
        "kerasdp card": 1, "made": "", "what": {"steps": 1, "batch_size": 2, "seed": 0}, "source": "", "versions": {},
        "initial": "", "trained": {"float64": trained, "float32": dict(trained)}, "sha256": "",
    }  # fmt: skip
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card))
    assert certificate.read_card(str(path)) == card
    *folders, name = place
    functools.reduce(dict.__getitem__, folders, card)[name] = value
    path.write_text(json.dumps(card))
    with pytest.raises(UserError, match="expected a card of format 1"):
        certificate.read_card(str(path))


def test_the_source_of_a_model(tmp_path):
    for name in ("nothere.py:build", "nothere.sub:build"):
        with pytest.raises(UserError, match="--model: cannot read nothere"):
            certificate.source_of(name)
    (tmp_path / "mine.py").write_text("def build(): pass\n")
    one = certificate.source_of(f"{tmp_path}/mine.py:build")
    (tmp_path / "mine.py").write_text("def build(): return\n")
    assert one != certificate.source_of(f"{tmp_path}/mine.py:build")
    assert certificate.source_of("lenet") == certificate.source_of("mlp") != certificate.source_of("json:loads")
