"""Names with arguments, as flags hold them, and functions of the user's own."""

import pytest

from kerasdp.config import choices
from kerasdp.errors import UserError

NO_NAMES = (
    "",
    "sgd(momentum=0.5, momentum=0.7)",
    "f(a=1",
    "f(a=1)(b=2)",
    "f(a=__import__('os'))",
    'sgd(**{"momentum":0.5})',
)


@pytest.mark.parametrize("text", NO_NAMES)
def test_names_that_are_none(text):
    with pytest.raises(UserError) as caught:
        choices.parse(text, "flag")
    assert "--flag: expected a name, or a name with" in str(caught.value) and "\n" not in str(caught.value)


def test_the_users_own_functions(tmp_path):
    file = tmp_path / "mine_for_spec.py"
    file.write_text("def build():\n    return 7\n")
    assert choices.load_user_function(f"{file}:build", "model")() == 7
    assert choices.load_user_function("os.path:join", "model")("a", "b") == "a/b"
    with_flags = tmp_path / "with_flags.py"
    with_flags.write_text("from absl import flags, logging\nflags.DEFINE_integer('v', 1, '')\n")  # logging's, too
    for name, words in [
        (f"{file}:other", "has no function 'other'"),
        (f"{tmp_path}/none.py:build", "cannot be loaded: .* No such file"),
        ("no.such.module:build", "cannot be loaded: No module named 'no'"),
        (f"{with_flags}:build", "this program .*is defined twice.; move build to a file that defines no flags"),
    ]:
        with pytest.raises(UserError, match=words):
            choices.load_user_function(name, "model")
