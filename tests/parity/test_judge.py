"""What the kit passes and what it does not, on records of trainings made by hand."""

import dataclasses

import numpy as np
import pytest

from kerasdp.parity import Comparison, Outcome, Way
from kerasdp.parity.divergence import difference, first_divergence, locate, tolerance_for
from kerasdp.parity.trace import Trace

SGD, ADAM, EXACT = tolerance_for("float32", "SGD"), tolerance_for("float32", "Adam"), tolerance_for("float64", "Adam")


def made(**changes):
    random = np.random.RandomState(0)
    kernel = random.randn(4, 3).astype("float32")
    plain = {
        "initial": {"dense/kernel": kernel, "seed": np.array([7, 0])},
        "final": {"dense/kernel": kernel + 0.1, "seed": np.array([7, 5])},
        "losses": np.linspace(2, 1, 5),
        "gradient_norms": np.linspace(1, 0.5, 5),
        "samples": [np.arange(step, step + 6) for step in range(5)],
        "metrics": {"loss": 1.5, "accuracy": 0.5},
        "optimizer": "SGD",
        "outputs": {"inputs": kernel, "dense": kernel * 2},
        "gradients": {"dense/kernel": kernel, "dense/bias": kernel[0]},
    }
    return Trace(**{**plain, **changes})


def changed(array, place, factor):
    array = np.array(array)
    array[place] = array[place] * factor
    return array


def test_the_tolerance_grows_as_the_docstring_says():
    assert SGD.after(0) == ADAM.after(0) == pytest.approx(1.2e-6, rel=0.01)
    assert SGD.after(40) == pytest.approx(1.1e-4, rel=0.02)
    assert ADAM.after(10) == pytest.approx(1e-5, rel=0.1)
    assert ADAM.after(41) == ADAM.after(1000) == 5e-3
    assert EXACT.after(1000) == 1e-6


def test_equal_and_round_off_pass():
    assert first_divergence(made(), made(), SGD) is None
    other = made(losses=changed(made().losses, 4, 1 + 1e-6), gradient_norms=changed(made().gradient_norms, 2, 1.001))
    assert first_divergence(made(), other, SGD) is None


@pytest.mark.parametrize(
    ("changes", "step", "what", "where"),
    [
        ({"initial": {"dense/kernel": np.nextafter(made().initial["dense/kernel"], 9), "seed": np.array([7, 0])}},
         None, "initial weights", "dense/kernel"),
        ({"initial": {"other/kernel": made().initial["dense/kernel"]}}, None, "initial weights", ""),
        ({"samples": [*made().samples[:2], made().samples[2][::-1], *made().samples[3:]]}, 2, "samples", "row 0"),
        ({"samples": [*made().samples[:3], made().samples[3][1:], made().samples[4]]}, 3, "samples", ""),
        ({"losses": changed(made().losses, 3, 1 + 1e-4)}, 3, "loss", ""),
        ({"losses": changed(made().losses, 3, np.nan)}, 3, "loss", ""),
        ({"losses": made().losses[:4]}, 4, "samples", ""),
        ({"gradient_norms": changed(made().gradient_norms, 1, 1.05)}, 1, "gradient", "norm over all weights"),
        ({"metrics": {"loss": 1.5, "accuracy": 0.6}}, None, "metrics", "accuracy"),
        ({"metrics": {"loss": 1.5}}, None, "metrics", "accuracy"),
        ({"final": {"dense/kernel": made().final["dense/kernel"] + 0.01, "seed": np.array([7, 5])}},
         None, "final weights", "most in dense/kernel"),
        ({"final": made().final | {"seed": np.array([7, 6])}}, None, "final weights", "seed"),
    ],
)  # fmt: skip
def test_all_else_parts(changes, step, what, where):
    divergence = first_divergence(made(), made(**changes), SGD)
    assert (divergence.step, divergence.what, divergence.where.partition(" (")[0]) == (step, what, where), divergence
    assert what in str(divergence)


def test_where_it_parts():
    assert locate(made(), made(), SGD) == ("", False)
    other = made(outputs={"inputs": made().outputs["inputs"], "dense": made().outputs["dense"] + 1e-2})
    words, is_forward = locate(made(), other, SGD)
    assert words.startswith("the output of dense differs first") and is_forward
    words, is_forward = locate(made(), made(losses=made().losses * 1.001), SGD)
    assert "but the loss differs" in words and is_forward
    other = made(gradients={name: gradient * 2 for name, gradient in made().gradients.items()})
    words, is_forward = locate(made(), other, SGD)
    assert "the gradient of dense/bias differs first, by 5.0e-01" in words and not is_forward
    other = made(gradients={"dense/kernel": made().gradients["dense/kernel"]})
    assert "the gradient of dense/bias differs first, by inf" in locate(made(), other, SGD)[0]


def test_differences():
    assert difference(np.array([1.0, 2.0]), np.array([1.0, 2.1])) == pytest.approx(0.1 / 2.1)
    assert difference(0.0, 0.0) == 0
    assert difference(np.ones(2), np.ones(3)) == np.inf
    assert difference(1.0, np.nan) == np.inf


def test_table_and_picture(tmp_path):
    ways = [Way(backend="jax", num_devices=1), Way(backend="torch", num_devices=2)]
    good = Outcome(way=ways[0], reference=ways[0], losses=made().losses, differences=np.zeros(5), seconds=3.0)
    divergence = first_divergence(made(), made(losses=changed(made().losses, 3, 1.1)), SGD)
    bad = dataclasses.replace(good, way=ways[1], differences=np.array([0, 1e-7, 0, 0.1, 0]), divergence=divergence)
    comparison = Comparison(outcomes=[good, bad], tolerance=SGD)
    lines = comparison.table().splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["jax", "x", "1", "(reference)", "none", "3.0"],
        ["torch", "x", "2", "1.0e-01", "3", "3.0"],
    ]
    assert lines[3].startswith("torch x 2 diverges from jax x 1: step 3: loss: expected 1.25, received 1.375")
    assert not comparison.passed
    excused = dataclasses.replace(bad, round_off=1e-12)
    assert excused.passed and "by round-off alone (in float64 they are 1.0e-12 apart)" in str(excused)
    failed = dataclasses.replace(good, error="no memory", losses=np.empty(0), differences=np.empty(0))
    assert not failed.passed and "failed: no memory" in str(failed)
    Comparison(outcomes=[good, bad, failed], tolerance=SGD).draw(str(tmp_path / "parity.png"))
    assert (tmp_path / "parity.png").stat().st_size > 10_000
