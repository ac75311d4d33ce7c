"""Runs programs on several "hosts" of one machine: namespaces that are joined by a network switch.

    sudo python tools/hosts.py --hosts 2 --ranks 2 --rate 1gbit -- -m smddp.bench

Each host has its own network interfaces and its own /dev/shm. Processes of different hosts could
still share memory, so each host has its own SMDDP_NODE_ID. Namespaces, interfaces and files vanish
with their last process, so nothing is left when this process ends, even if it is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

_NETWORK = "10.77.0"
_MOST_HOSTS = 254  # of that network
_RELAY = Path(__file__).with_name("relay.py")


def unavailable() -> str | None:
    """Returns the reason why hosts cannot be created here; None if they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"the program `{program}` is missing (Debian: iproute2, util-linux)"
    attempt = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True)
    return None if attempt.returncode == 0 else "the kernel refuses new namespaces"


@dataclasses.dataclass(frozen=True)
class Namespaces:
    """The network, IPC and mount namespaces of the process `keeper`. Can be pickled."""

    keeper: int

    def enter(self) -> None:
        """Moves this process into the namespaces; its folder stays the same.

        Raises:
            OSError: this process is not root, or has several threads.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        folder = os.getcwd()
        for kind in ("net", "ipc", "mnt"):
            descriptor = os.open(f"/proc/{self.keeper}/ns/{kind}", os.O_RDONLY)
            try:
                if libc.setns(descriptor, 0) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace")
            finally:
                os.close(descriptor)
        os.chdir(folder)

    def command(self, *arguments: str) -> list[str]:
        """Returns a command line that runs another one inside the namespaces."""
        enter = ["nsenter", "-t", str(self.keeper), "-n", "-i", "-m", "--"]
        # nsenter leaves the program in /, where relative paths lead elsewhere.
        return [*enter, "env", "-C", os.getcwd(), *arguments]

    def run(self, line: str) -> None:
        """Runs a command line inside the namespaces, and waits for its end.

        Raises:
            subprocess.SubprocessError: it failed, or took more than 30 s.
        """
        subprocess.run(self.command(*line.split()), check=True, capture_output=True, timeout=30)


@dataclasses.dataclass(frozen=True)
class Network:
    """The hosts and the switch. Can be pickled, for other processes."""

    hosts: tuple[Namespaces, ...]
    switch: Namespaces

    @staticmethod
    def address(host: int) -> str:
        """Returns the IP address of a host, which all hosts can reach."""
        return f"{_NETWORK}.{host + 1}"

    def unplug(self, host: int) -> None:
        """Disconnects a host: packets from it and to it are dropped silently."""
        self.switch.run(f"ip link set port{host} down")

    def plug(self, host: int) -> None:
        """Connects a host again after unplug()."""
        self.switch.run(f"ip link set port{host} up")

    def cut(self, host: int, how: str) -> None:
        """Drops packets silently: those "to" a host, those "from" it, or "both".

        One direction only is for links without a rate. Then "from" a host means to all others.
        """
        if how == "both":
            return self.unplug(host)
        for port in self._deaf(host, how):
            # A bucket that is too small for any packet.
            self.switch.run(f"tc qdisc add dev port{port} root tbf rate 8bit burst 10 limit 100")
        return None

    def join(self, host: int, how: str) -> None:
        """Lets packets pass again after cut()."""
        if how == "both":
            return self.plug(host)
        for port in self._deaf(host, how):
            self.switch.run(f"tc qdisc del dev port{port} root")
        return None

    def interrupt(self, host: int, how: str, seconds: float) -> None:
        """Drops packets for some seconds, as cut() does; returns when they pass again."""
        self.cut(host, how)
        time.sleep(seconds)
        self.join(host, how)

    def _deaf(self, host: int, how: str) -> list[int]:
        return [port for port in range(len(self.hosts)) if (port == host) == (how == "to")]


class Hosts:
    """A context manager that creates hosts and a network between them.

    Args:
        count: number of hosts.
        rate: bandwidth of each link in each direction, in the notation of tc ("1gbit"); None: no
            limit.
        delay: seconds that each packet takes to another host; 0: the kernel's switch.
        shm: size of each host's /dev/shm, in the notation of mount ("4g").

    Raises:
        OSError: the kernel refuses namespaces or mounts.
    """

    def __init__(
        self, count: int, rate: str | None = None, shm: str = "4g", delay: float = 0.0
    ) -> None:
        self._count = count
        self._rate = rate
        self._delay = delay
        self._shm = shm
        self._keepers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            network = Network(tuple(self._keep() for _ in range(self._count)), self._keep())
            if not self._delay:
                network.switch.run("ip link add name bridge type bridge")
                network.switch.run("ip link set bridge up")
            for number in range(self._count):
                self._connect(network, number)
            if self._delay:
                ports = [f"port{number}" for number in range(self._count)]
                relay = [sys.executable, str(_RELAY), str(self._delay), *ports]
                self._start(network.switch.command(*relay))
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
        # When this process ends, even if it is killed, `cat` reads the end of its input and exits.
        unshare = ["unshare", "--net", "--ipc", "--mount", "sh", "-c", f"{script} >/dev/null"]
        return Namespaces(self._start(unshare))

    def _start(self, command: list[str]) -> int:
        """Starts a process that ends when its input does; returns its number when it is ready."""
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            raise OSError("the kernel refuses namespaces, or a mount in one")
        return keeper.pid

    def _connect(self, network: Network, number: int) -> None:
        host, switch = network.hosts[number], network.switch
        switch.run(
            f"ip link add name port{number} type veth peer name eth0 netns {host.keeper}",
        )
        switch.run(f"ip link set port{number} {'' if self._delay else 'master bridge '}up")
        host.run(f"ip addr add {network.address(number)}/24 dev eth0")
        host.run("ip link set eth0 up")
        if self._rate is not None:
            # A larger burst would let whole packets of 64 KiB pass: 0.5 s each at 1 Mbit/s.
            burst = "256k" if self._rate.endswith("gbit") else "16k"
            shape = f"root tbf rate {self._rate} burst {burst} latency 50ms"
            host.run(f"tc qdisc add dev eth0 {shape}")
            switch.run(f"tc qdisc add dev port{number} {shape}")


def launch(network: Network, ranks: int, arguments: list[str]) -> int:
    """Runs a Python program under torchrun on every host.

    Args:
        network: the hosts.
        ranks: number of ranks per host.
        arguments: the command line after `python`.

    Returns:
        0, or the exit status of a torchrun that failed.
    """
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **os.environ}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    torchrun += ["--nnodes", str(len(network.hosts)), "--nproc-per-node", str(ranks)]
    torchrun += ["--master-addr", network.address(0), "--master-port", "29511"]
    jobs = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(number), "--", sys.executable, *arguments],
            env={**environment, "SMDDP_NODE_ID": f"host{number}"},
            preexec_fn=host.enter,
        )
        for number, host in enumerate(network.hosts)
    ]
    try:
        while any(job.poll() is None for job in jobs):
            time.sleep(0.05)
    finally:
        for job in jobs:
            job.terminate()
        statuses = [job.wait() for job in jobs]  # each ends its ranks first
    return next((status for status in statuses if status != 0), 0)


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hosts.py",
        description="Runs a Python program under torchrun on hosts made of namespaces.",
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default 2)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks per host (default 1)")
    parser.add_argument("--rate", help="bandwidth of each link, such as 1gbit (default: no limit)")
    parser.add_argument(
        "--delay", type=float, default=0.0, metavar="MS", help="of each packet to another host"
    )
    parser.add_argument("arguments", nargs="+", help="-- and the command line after `python`")
    options = parser.parse_args()
    if not 1 <= options.hosts <= _MOST_HOSTS:
        parser.error(f"--hosts {options.hosts}: expects from 1 to {_MOST_HOSTS}")
    if options.delay < 0:
        parser.error(f"--delay {options.delay:g}: expects at least 0")
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: expects at least 1")
    reason = unavailable()
    if reason is not None:
        parser.exit(2, f"hosts.py: {reason}\n")
    # Also when another signal than Ctrl-C ends this process, the ranks have to be ended.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with Hosts(options.hosts, options.rate, delay=options.delay / 1e3) as network:
            return launch(network, options.ranks, options.arguments)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or [str(error)]
        parser.exit(2, f"hosts.py: the hosts cannot be made: {said[0]}\n")
    except OSError as error:
        parser.exit(2, f"hosts.py: {error}\n")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
