"""Where the ranks of a job find each other: a key-value store that one of them serves."""

from datetime import timedelta
from typing import Any, Protocol

from torch import distributed

TIMEOUT_S = 300.0
"""How long a rank waits for what another one has to say before the first step."""


class KeyValueStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """The value of a key, waiting for it."""


def c10d() -> Any:
    """torch.distributed without its types, which its own stubs leave out."""
    return distributed


def serve(port: int = 0) -> Any:
    """A store served by this process, on a free port (its ``port``) of this host."""
    store = c10d().TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    return store


def connect(host: str, port: int) -> Any:
    """The store that another process serves."""
    store = c10d().TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    return store


def prefixed(store: KeyValueStore, name: str) -> Any:
    """A part of a store with keys of its own."""
    return c10d().PrefixStore(name, store)
