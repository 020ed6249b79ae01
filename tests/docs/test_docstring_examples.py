"""Each public name has an example in its docstring, and the examples run as they stand."""

import inspect
import json
import re
import textwrap

import pytest

import kerasdp
from tests.helpers import BACKENDS, PROGRAMS, result_of, run

# Classes each of whose public methods has an example, too.
WITH_METHODS = (kerasdp.Runner,)
EXAMPLE = re.compile(r"^Example:\n((?:[ ]{4}[^\n]*\n|\n)*)", re.M)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)


def public():
    """All public names, with their objects."""
    for name in kerasdp.__all__:
        value = getattr(kerasdp, name)
        yield f"kerasdp.{name}", value
        if inspect.ismodule(value):
            for inner in value.__all__:
                yield f"kerasdp.{name}.{inner}", getattr(value, inner)
        for method, function in vars(value).items() if value in WITH_METHODS else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"kerasdp.{name}.{method}", function


def example_of(value):
    """The code of the example in a docstring; None if there is none."""
    section = EXAMPLE.search((inspect.cleandoc(value.__doc__ or "")) + "\n")
    block = section and BLOCK.search(textwrap.dedent(section[1]))
    return block and block[1]


def examples():
    return {name: example_of(value) for name, value in public()}


def test_each_public_name_has_an_example():
    assert [name for name, code in examples().items() if not code] == []


def test_an_example_is_found():
    def documented():
        """Does it.

        Example:
            ```python
            for each in (1, 2):
                print(each)

            print(3)
            ```

        And so on.
        """

    assert example_of(documented) == "for each in (1, 2):\n    print(each)\n\nprint(3)\n"
    assert example_of(example_of) is None


# A fault, to see that faults are found and named.
FAULT = {"a fault": "import kerasdp\n\nkerasdp.nothing\n"}


def check(folder, chosen, *arguments, **options):
    file = folder / "examples.json"
    file.write_text(json.dumps(FAULT | {name: code for name, code in examples().items() if code}))
    program = PROGRAMS / "docstring_examples.py"
    result = result_of(run(program, file, *arguments, cwd=folder, KERAS_BACKEND=chosen, **options))
    print(json.dumps(result["seconds"]))
    assert result["errors"].pop("a fault").startswith("line 3, `kerasdp.nothing`: AttributeError: ")
    assert not result["errors"], "\n".join(f"{name}: {error}" for name, error in result["errors"].items())


def test_examples_run(tmp_path):
    """On one backend, in one process."""
    backend = "jax" if "jax" in BACKENDS else BACKENDS[0]
    check(tmp_path, backend, backend=backend, KERAS_HOME=str(tmp_path / "keras"))


@pytest.mark.proof
def test_examples_run_as_for_users(backend, tmp_path):
    """On each backend, with the processes that the kit starts."""
    check(tmp_path, backend, "--processes", timeout=1800, KERAS_HOME=str(tmp_path / "keras"))
