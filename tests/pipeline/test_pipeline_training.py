"""The promise: a model cut into stages learns what it learns whole."""

import functools
import json
import shutil

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, all_but, files_of_run, result_of, run, train_resumable

SCHEDULES = {"torch": ["gpipe", "1f1b", "interleaved1f1b"], "jax": ["gpipe", "1f1b"], "tensorflow": ["gpipe", "1f1b"]}


def pipelines(backend, cases):
    """What became of each case. TensorFlow's virtual devices are made once a process."""
    cases = [{"backend": backend, "balance": "flops"} | case if "strategy" in case else {"backend": backend} | case
             for case in cases]  # fmt: skip
    # jax makes its virtual devices at the first; with one device torch's process group is joined in the program itself,
    # and would be forked with the workers of a later case.
    order = sorted(range(len(cases)), key=lambda place: -cases[place]["num_devices"])
    groups = [[place] for place in order] if backend == "tensorflow" else [order]
    results = {}
    for places in groups:
        given = json.dumps([cases[place] for place in places])
        # torch would give a single process more threads, which add up in another order.
        done = run(PROGRAMS / "pipelines.py", given, backend=backend, OMP_NUM_THREADS="1")
        results |= dict(zip(places, result_of(done), strict=True))
    return [results[place] for place in range(len(cases))]


def cut(num_stages, schedule="gpipe", split_size=4, **case):
    num_devices = num_stages // 2 if schedule == "interleaved1f1b" else num_stages
    fields = {
        "num_stages": num_stages,
        "num_devices": num_devices,
        "pipeline_schedule": schedule,
        "strategy": "pipeline",
    }
    return fields | {"split_size": str(split_size)} | case


@all_but("tensorflow", "jax")
@pytest.mark.parametrize("rule", ["sgd", pytest.param("adam", marks=pytest.mark.proof)])
def test_stages_train_as_one_device_with_the_same_micro_batches(backend, rule):
    """Four steps (two epochs) of a residual net with batch norm: a plain loop, one stage, several."""
    by_hand = {"net": "norms", "rule": rule, "by_hand": True, "num_devices": 3 if backend == "jax" else 1}
    cases = [by_hand, cut(1, net="norms", rule=rule)]
    for place, schedule in enumerate(SCHEDULES[backend]):
        if backend == "torch" and rule == "sgd" and schedule != "1f1b":  # each starts processes: the others are proofs
            continue
        count = 4 if schedule == "interleaved1f1b" else 2 + (place + (rule == "adam")) % 2
        cases.append(cut(count, schedule, net="norms", rule=rule))
    plain, whole, *others = pipelines(backend, cases)
    for received, case in zip(others, cases[2:], strict=True):
        if backend == "torch":
            assert received == plain == whole, case
        np.testing.assert_allclose(received["losses"], plain["losses"], rtol=1e-6, err_msg=str(case))
        for own, other, by_loop in zip(received["weights"], whole["weights"], plain["weights"], strict=True):
            np.testing.assert_allclose(own, other, atol=1e-6, err_msg=str(case))
            # Another program, which XLA and TensorFlow round otherwise: Adam makes whole steps of the round-off of
            # gradients near zero (seen: 1.5e-5 on jax, 1.7e-6 on tensorflow; SGD stays below 1e-6).
            np.testing.assert_allclose(own, by_loop, atol=1e-6 if rule == "sgd" else 5e-5, err_msg=str(case))


@all_but("torch", "jax", "tensorflow")
def test_without_batch_norm_it_is_the_whole_model(backend):
    """Dropout, penalties, two outputs, a last batch of 4, validation: as on one device without micro-batches."""
    whole = {"net": "random", "rule": "sgd", "num_devices": 1}
    cases = [cut(2, net="random", rule="sgd", split_size=5)]
    cases += [cut(2, "1f1b", net="random", rule="sgd", split_size=3)] if backend != "torch" else []
    cases += [cut(4, "interleaved1f1b", net="random", rule="sgd", split_size=3)] if backend == "torch" else []
    if backend != "tensorflow":  # two pipelines side by side
        # First: jax makes its virtual devices once a process.
        cases.insert(0, cut(2, net="random", rule="sgd", split_size=2, num_devices=4))
    results = pipelines(backend, [*cases, whole])
    expected = results.pop()
    for case, received in zip(cases, results, strict=True):
        np.testing.assert_allclose(received["losses"], expected["losses"], rtol=2e-6, err_msg=str(case))
        np.testing.assert_allclose(received["outputs"], expected["outputs"], atol=2e-6, err_msg=str(case))
        assert received["evaluate"] == pytest.approx(expected["evaluate"], rel=2e-6)
        for name, values in expected["history"].items():
            assert received["history"][name] == pytest.approx(values, rel=2e-6), (name, case)


@pytest.mark.proof
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_in_float64_nothing_but_the_last_bits_differs(backend, rule):
    """With shares of a batch, thirds and twelfths, that float32 rounds; norm and penalties are summed over stages."""
    case = {"net": "random", "rule": rule, "precision": "float64", "batch_size": 12}
    cases = [cut(3, "1f1b", 4, **case), cut(2, "gpipe", 5, **case)]
    if backend != "tensorflow":  # two pipelines side by side; first: jax makes its virtual devices once a process
        cases.insert(0, cut(2, "1f1b", 3, **case, num_devices=4))
    *others, whole = pipelines(backend, [*cases, case | {"num_devices": 1, "accumulate": 3}, case | {"num_devices": 1}])
    for received, name in zip(others, [*map(str, cases), "accumulate"], strict=True):
        np.testing.assert_allclose(received["losses"], whole["losses"], rtol=1e-13, err_msg=name)
        for own, expected in zip(received["weights"], whole["weights"], strict=True):
            np.testing.assert_allclose(own, expected, rtol=0, atol=1e-14, err_msg=name)


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_two_pipelines_see_twice_the_micro_batch(backend):
    case = {"net": "norms", "rule": "sgd"}
    one, two = pipelines(backend, [cut(2, "1f1b", 4, num_devices=4, **case), cut(2, "1f1b", 8, **case)])
    np.testing.assert_allclose(one["losses"], two["losses"], rtol=1e-6)
    for own, other in zip(one["weights"], two["weights"], strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


STAGES = {"strategy": "pipeline", "num_stages": 2, "split_size": "4", "balance": "flops"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a pipeline of each backend gives if nothing happens, and its files."""

    @functools.cache
    def get(backend):
        folder = tmp_path_factory.mktemp(backend) / "run"
        return result_of(train_resumable(folder, backend, 2, checkpoint_every="never", **STAGES)), files_of_run(folder)

    return get


@pytest.mark.proof
@pytest.mark.parametrize(("old", "new"), [(old, BACKENDS[place - 1]) for place, old in enumerate(BACKENDS)])
def test_a_pipeline_resumes_on_another_backend(old, new, undisturbed, tmp_path):
    """Stopped by a signal in its second epoch."""
    whole, whole_files = undisturbed(old)
    done = train_resumable(tmp_path / "run", old, 2, trouble="signal", at_step=17, **STAGES)
    assert done.returncode == 99, done.stderr
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    (tmp_path / "same.trouble").touch()
    assert result_of(train_resumable(tmp_path / "same", old, 2, resume=True, **STAGES)) == whole
    assert files_of_run(tmp_path / "same") == whole_files
    result_of(train_resumable(tmp_path / "run", new, 2, resume=True, **STAGES))
    np.testing.assert_allclose(files_of_run(tmp_path / "run")[0], whole_files[0], rtol=1e-3)


@pytest.mark.proof  # that a rank is killed, test_failures.py has
@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a stage")
def test_a_stage_that_is_killed_ends_the_run(undisturbed, tmp_path):
    done = train_resumable(tmp_path / "run", "torch", 2, trouble="kill", at_step=17, checkpoint_every="5", **STAGES)
    assert done.returncode == 1
    assert "rank 1 was ended by SIGKILL" in done.stderr
    resumed = result_of(train_resumable(tmp_path / "run", "torch", 2, resume=True, **STAGES))
    assert resumed["weights"] == undisturbed("torch")[0]["weights"]
