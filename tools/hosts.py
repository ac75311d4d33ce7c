"""Makes "hosts" out of namespaces of this machine, joined by a switch, and runs programs on them.

    sudo python tools/hosts.py --hosts 2 --ranks 2 --rate 1gbit -- -m smddp.bench

A host has network interfaces and a /dev/shm of its own, and is told apart by SMDDP_NODE_ID, because
the processes of all could share memory. It lives as long as the process that made it: namespaces,
interfaces and files are gone with their last process, however it ends.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

_NETWORK = "10.77.0"


def unavailable() -> str | None:
    """Returns why there can be no hosts here; None if they can be made."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"the program `{program}` is missing (Debian: iproute2, util-linux)"
    attempt = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True)
    return None if attempt.returncode == 0 else "the kernel refuses new namespaces"


@dataclasses.dataclass(frozen=True)
class Namespaces:
    """The network, IPC and mount namespaces of a process that keeps them alive. Pickles."""

    keeper: int

    def enter(self) -> None:
        """Moves this process, which must have one thread, into the namespaces.

        Raises:
            OSError: no root, or several threads.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in ("net", "ipc", "mnt"):
            descriptor = os.open(f"/proc/{self.keeper}/ns/{kind}", os.O_RDONLY)
            try:
                if libc.setns(descriptor, 0) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace")
            finally:
                os.close(descriptor)

    def command(self, *arguments: str) -> list[str]:
        """Returns what runs a command line inside."""
        return ["nsenter", "-t", str(self.keeper), "-n", "-i", "-m", "--", *arguments]

    def run(self, line: str) -> None:
        """Runs a program, given as words with blanks between, to its end."""
        subprocess.run(self.command(*line.split()), check=True, capture_output=True, timeout=30)


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts on a switch, as processes that did not make them know them. Pickles."""

    hosts: tuple[Namespaces, ...]
    switch: Namespaces

    @staticmethod
    def address(host: int) -> str:
        """Returns a host's address on the network; all can reach it."""
        return f"{_NETWORK}.{host + 1}"

    def unplug(self, host: int) -> None:
        """Cuts a host off: what is sent from or to it is lost without a word."""
        self.switch.run(f"ip link set port{host} down")

    def plug(self, host: int) -> None:
        """Ends what unplug() did."""
        self.switch.run(f"ip link set port{host} up")


class Hosts:
    """Makes a network for the length of a with statement.

    Args:
        count: number of hosts.
        rate: what each link carries in each direction, as tc writes it ("1gbit"); None: no limit.
        shm: size of each host's /dev/shm, as mount writes it.
    """

    def __init__(self, count: int, rate: str | None = None, shm: str = "4g") -> None:
        self._count = count
        self._rate = rate
        self._shm = shm
        self._keepers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            network = Network(tuple(self._keep() for _ in range(self._count)), self._keep())
            network.switch.run("ip link add name bridge type bridge")
            network.switch.run("ip link set bridge up")
            for number in range(self._count):
                self._connect(network, number)
            return network
        except BaseException:
            self._close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for keeper in self._keepers:
            assert keeper.stdin is not None
            keeper.stdin.close()
        for keeper in self._keepers:
            keeper.wait(10)
            assert keeper.stdout is not None
            keeper.stdout.close()

    def _keep(self) -> Namespaces:
        script = (
            f"mount -t tmpfs -o size={self._shm} tmpfs /dev/shm && ip link set lo up && echo && cat"
        )
        # `cat` ends with this process, however that ends.
        keeper = subprocess.Popen(
            ["unshare", "--net", "--ipc", "--mount", "sh", "-c", f"{script} >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            raise OSError("the kernel refuses namespaces, or a mount in one")
        return Namespaces(keeper.pid)

    def _connect(self, network: Network, number: int) -> None:
        host, switch = network.hosts[number], network.switch
        switch.run(
            f"ip link add name port{number} type veth peer name eth0 netns {host.keeper}",
        )
        switch.run(f"ip link set port{number} master bridge up")
        host.run(f"ip addr add {network.address(number)}/24 dev eth0")
        host.run("ip link set eth0 up")
        if self._rate is not None:
            shape = f"root tbf rate {self._rate} burst 256k latency 50ms"
            host.run(f"tc qdisc add dev eth0 {shape}")
            switch.run(f"tc qdisc add dev port{number} {shape}")


def launch(network: Network, ranks: int, arguments: list[str]) -> int:
    """Runs a Python program under torchrun on every host; returns a bad exit status, or 0."""
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **os.environ}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    torchrun += ["--nnodes", str(len(network.hosts)), "--nproc-per-node", str(ranks)]
    torchrun += ["--master-addr", network.address(0), "--master-port", "29511"]
    jobs = [
        subprocess.Popen(
            host.command(*torchrun, "--node-rank", str(number), "--", sys.executable, *arguments),
            env={**environment, "SMDDP_NODE_ID": f"host{number}"},
        )
        for number, host in enumerate(network.hosts)
    ]
    try:
        while any(job.poll() is None for job in jobs):
            time.sleep(0.05)
    finally:
        for job in jobs:
            job.terminate()
    return next((job.returncode for job in jobs if job.wait() != 0), 0)


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hosts.py",
        description="Runs a Python program under torchrun on hosts made of namespaces.",
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default 2)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks per host (default 1)")
    parser.add_argument("--rate", help="what each link carries, e.g. 1gbit (default: no limit)")
    parser.add_argument("arguments", nargs="+", help="-- and what follows `python`")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        parser.exit(2, f"hosts.py: {reason}\n")
    with Hosts(options.hosts, options.rate) as network:
        return launch(network, options.ranks, options.arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
