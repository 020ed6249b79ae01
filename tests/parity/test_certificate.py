"""A card says how a model trains; who verifies it notices a card or a model that was changed."""

import functools

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
    found = certificate.verify(card, build, data, source=source, **({"backends": FIRST, "device_counts": [1]} | ways))
    return [str(difference) for difference in found]


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


def test_the_source_of_a_model(tmp_path):
    (tmp_path / "mine.py").write_text("def build(): pass\n")
    one = certificate.source_of(f"{tmp_path}/mine.py:build")
    (tmp_path / "mine.py").write_text("def build(): return\n")
    assert one != certificate.source_of(f"{tmp_path}/mine.py:build")
    assert certificate.source_of("lenet") == certificate.source_of("mlp") != certificate.source_of("json:loads")
