"""The promise: a model cut into stages learns what it learns whole."""

import json
import re

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, assert_alike, files_of_run, result_of, run, train_resumable

pytestmark = pytest.mark.skipif("torch" not in BACKENDS, reason="of torch's pipelines")


# The first of the models within `random` of small_nets.py.
CUT = "body"


def pipelines(cases):
    """What became of each case."""
    # With one device torch's process group is joined in the program itself, and would be forked with the workers of a
    # later case.
    order = sorted(range(len(cases)), key=lambda place: -cases[place]["num_devices"])
    given = json.dumps([{"backend": "torch"} | cases[place] for place in order])
    # torch would give a single process more threads, which add up in another order.
    done = run(PROGRAMS / "small_nets.py", given, backend="torch", OMP_NUM_THREADS="1")
    results = dict(zip(order, result_of(done), strict=True))
    return [results[place] for place in range(len(cases))]


def cut(num_stages, split_size=4, **case):
    fields = {"num_devices": num_stages, "strategy": "pipeline"}
    return fields | {"split_size": split_size} | case


@pytest.mark.parametrize("rule", ["sgd", pytest.param("adam", marks=pytest.mark.proof)])
def test_stages_train_as_one_device_with_the_same_micro_batches(rule):
    """Four steps (two epochs) of a residual net with batch norm: a plain loop, one stage, several."""
    case = {"net": "norms", "rule": rule}
    plain, whole, *others = pipelines([
        case | {"by_hand": True, "num_devices": 1}, cut(1, **case), cut(2 + (rule == "adam"), **case),
    ])  # fmt: skip
    for received in (whole, *others):  # backward passes begin as soon as possible
        assert received.pop("schedules") == ["Schedule1F1B"]
    assert others == [whole] * len(others)
    # PyTorch's kernel for all weights rounds otherwise than Keras' optimizers, which the loop calls.
    for name in ("losses", "weights"):
        assert_alike(whole[name], plain[name], rtol=2e-6, atol=2e-7, name=name)


def test_without_batch_norm_it_is_the_whole_model():
    """Dropout, penalties, two outputs, a last batch of 4, sample weights, validation: as on one device."""
    case = {"net": "in stages"}
    received, refused, expected = pipelines([
        cut(2, split_size=5, **case | {"cut_at": CUT}), cut(2, **case | {"loss": "dice"}), case | {"num_devices": 1},
    ])  # fmt: skip
    words = r'the loss dice of .* needs the whole batch at once; use strategy="data", or split_size=16 \(then only one'
    assert re.match(words, refused)
    np.testing.assert_allclose(received["outputs"], expected["outputs"], atol=2e-6)
    for name in ("losses", "evaluate", "history"):
        assert_alike(received[name], expected[name], rtol=2e-6, atol=0, name=name)


@pytest.mark.proof
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_in_float64_nothing_but_the_last_bits_differs(rule):
    """With shares of a batch, thirds and twelfths, that float32 rounds; norm and penalties are summed over stages."""
    case = {"net": "in stages", "rule": rule, "precision": "float64", "batch_size": 24}
    cases = [cut(2, 3, **case | {"cut_at": CUT}), cut(3, 4, **case)]
    cases.append(cut(2, 12, **case))
    # A loss of the whole batch.
    in_turns, at_once = pipelines([cut(2, 12, **case | {"loss": "dice"}), case | {"loss": "dice", "num_devices": 1}])
    np.testing.assert_allclose(in_turns["losses"], at_once["losses"], rtol=1e-13)
    *results, whole = pipelines([*cases, case | {"num_devices": 1}])
    for received, name in zip(results, map(str, cases), strict=True):
        np.testing.assert_allclose(received["losses"], whole["losses"], rtol=1e-13, err_msg=name)
        assert_alike(received["weights"], whole["weights"], rtol=0, atol=1e-14, name=name)


STAGES = {"strategy": "pipeline", "split_size": 4}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a pipeline gives if nothing happens, and its files."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return result_of(train_resumable(folder, "torch", 2, checkpoint_every="never", **STAGES)), files_of_run(folder)


@pytest.mark.proof
@pytest.mark.parametrize("new", BACKENDS)
def test_a_pipeline_resumes_on_another_backend(new, undisturbed, tmp_path):
    """Stopped by a signal in its second epoch; its batch norms see 4 rows at a time on each backend."""
    whole, whole_files = undisturbed
    same_rows = STAGES if new == "torch" else {"accumulate": 4}
    done = train_resumable(tmp_path / "run", "torch", 2, trouble="signal", at_step=17, **STAGES)
    assert done.returncode == 99, done.stderr
    result = result_of(train_resumable(tmp_path / "run", new, 2, resume=True, **same_rows))
    if new == "torch":
        assert result == whole
        assert files_of_run(tmp_path / "run") == whole_files
    np.testing.assert_allclose(files_of_run(tmp_path / "run")[0], whole_files[0], rtol=1e-3)
