"""What is made for a model does not keep it alive."""

import gc
import weakref

from kerasdp.runtime.model_cache import ModelCache


class Model:
    pass


def test_caches_do_not_see_one_anothers_values():
    first, second, model = ModelCache(), ModelCache(), Model()
    assert first.get(model) is None
    first.put(model, 1)
    second.put(model, 2)
    assert (first.get(model), second.get(model), first.get(Model())) == (1, 2, None)


def test_a_value_that_refers_to_its_model_ends_with_it():
    cache, model = ModelCache(), Model()
    cache.put(model, [model])
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_a_value_ends_with_its_cache():
    cache, model, value = ModelCache(), Model(), Model()
    cache.put(model, value)
    seen = weakref.ref(value)
    del cache, value
    gc.collect()
    assert seen() is None
