"""Where machines of torch come and go: what they read of each other, which torch unpickles, is signed."""

import os
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import RendezvousStateError  # noqa: E402
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend  # noqa: E402

from kerasdp.backends.torch.elastic import _SignedBackend  # noqa: E402


class Gadget:
    """What runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_the_state_of_a_rendezvous_is_signed(tmp_path, monkeypatch):
    store = torch.distributed.FileStore(str(tmp_path / "store"))
    ours = _SignedBackend(store, "run")
    assert ours.get_state() is None
    state, token, is_set = ours.set_state(b"state")
    assert (state, is_set) == (b"state", True) and ours.get_state() == (b"state", token)
    assert ours.set_state(b"newer", token)[::2] == (b"newer", True)
    assert ours.set_state(b"late", token)[::2] == (b"newer", False)
    # Of a stranger, who knows torch's own form, and of one with another secret.
    stranger = C10dRendezvousBackend(store, "run")
    assert stranger.set_state(pickle.dumps(Gadget(str(tmp_path / "ran"))), stranger.get_state()[1])[2]
    with pytest.raises(RendezvousStateError, match="does not know KERASDP_SECRET"):
        ours.get_state()
    monkeypatch.setenv("KERASDP_SECRET", "another one, as long as it has to be")
    other = _SignedBackend(store, "other run")
    other.set_state(b"state")
    monkeypatch.undo()
    with pytest.raises(RendezvousStateError):
        _SignedBackend(store, "other run").get_state()
    assert not (tmp_path / "ran").exists()
