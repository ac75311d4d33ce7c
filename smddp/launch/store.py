"""The process of `smddprun --elastic` that has torch's store, or writes to that of another host.

    python -m smddp.launch.store ADDRESS PORT [DESCRIPTOR]

With the descriptor of a socket that listens it is the store's host. It sets what it reads from its
standard input: a key, a tab and a value in each line; and ends with its input, or its parent.
"""

from __future__ import annotations

import sys
from datetime import timedelta

__all__ = ["main"]


def main() -> None:
    """Serves until the input ends."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port, *descriptor = sys.argv[1:]
    store = TCPStore(
        address,
        int(port),
        is_master=bool(descriptor),
        wait_for_workers=False,
        timeout=timedelta(minutes=5),
        master_listen_fd=int(descriptor[0]) if descriptor else None,
    )
    for line in sys.stdin:
        key, _, value = line.rstrip("\n").partition("\t")
        store.set(key, value)


if __name__ == "__main__":
    main()
