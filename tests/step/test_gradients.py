"""`kerasdp.value_and_grad` gives the same on each backend."""

import numpy as np
import pytest

from tests.helpers import BACKENDS, results

WORDS = (
    "expected <lambda> to return a floating-point scalar. Received: shape (5, 1)",
    "expected variables or tensors for which to compute gradients. Received: none; build the model first",
    "expected floating-point values. Received: a tensor of int",
    "value_and_grad of <lambda>: expected variables or an argument of <lambda>. Received: neither",
    "expected <lambda> to return (scalar, aux); return both, or leave out has_aux",
)


@pytest.mark.short("torch")
def test_gradients(backend):
    received, expected = (results("gradients.py", name) for name in (backend, BACKENDS[0]))
    for name, values in expected.items():
        if name != "errors":
            own = received[name]
            assert [value is None for value in own] == [value is None for value in values], name
            given = [[value for value in each if value is not None] for each in (own, values)]
            np.testing.assert_allclose(*given, rtol=2e-4, atol=1e-5, err_msg=name)
    assert received["structure"][1] is None and received["structure"][2] > 0 and received["stopped"] == [None]
    assert None in received["penalty"] and len(received["errors"]) == len(WORDS)
    assert all(words in error for words, error in zip(WORDS, received["errors"], strict=True))
