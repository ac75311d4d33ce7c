"""The command line: `python -m smddp.bench`, or `smddp bench`.

Starts its ranks on this machine. Under torchrun or mpirun this process is one of the ranks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import smddp
from smddp.bench import ddp, numa, options, plot, table, tune
from smddp.bench.about import (
    about,
    given,
    nodes_of_ranks,
    print_written,
    record_start,
    write_file,
    write_json,
    written,
)
from smddp.bench.bounds import BoundContender, copy_rate, link_rate
from smddp.bench.contender import Contender
from smddp.bench.launch import complete_rendezvous, is_rank, launch
from smddp.bench.measure import Bench, Case, Measurement
from smddp.bench.mpi import MPIS, MpiContender, MpiError
from smddp.bench.torch_calls import TorchContender
from smddp.tools._command import run
from smddp.tools._spans import plural


class _Rank:
    """One rank of a run: a context manager that creates the contenders and closes them."""

    def __init__(self, run: options.Run) -> None:
        self._run = run
        self._contenders: dict[Case, Contender] = {}
        self._exit = contextlib.ExitStack()
        self._notes = list(run.left_out)
        if run.tune is not None:
            self._notes.append("smddp: what the built-in table chooses; the others by their names")
        self._start = record_start()
        self.prints = dist.get_rank() == 0

    def __enter__(self) -> _Rank:
        try:
            self._nodes = nodes_of_ranks()
            wires = [case.wire for case in self._run.cases]
            self._notes += options.notes_about_wires(wires, self._nodes)
            self._numa: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(self._numa, numa.nodes_of())
            self._limits = self._measure_limits()
            for case in self._run.cases:
                contender = self._contender(case)
                if contender is not None:
                    self._contenders[case] = contender
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _measure_limits(self) -> dict[str, float | None]:
        if not any(case.backend == table.BOUND for case in self._run.cases):
            return {}
        return {"copy_gbps": copy_rate(), "link_gbps": link_rate(self._nodes)}

    def _contender(self, case: Case) -> Contender | None:
        largest = max(size for _, size in self._run.workload.tasks)
        if case.backend == table.BOUND:
            bound = BoundContender(self._nodes, largest, self._limits["link_gbps"])
            self._exit.callback(bound.close)
            return bound
        if case.backend in MPIS:
            if max(self._nodes) > 0:
                self._notes.append(f"{case.backend} is left out: it is measured on one host only")
                return None
            mpi = MpiContender(case.backend, self._run.mpi)
            self._exit.callback(mpi.close)
            self._notes.append(f"{case.backend}: {mpi.library}")
            return mpi
        algorithm = ""
        if case.algorithm:
            collective = self._run.workload.tasks[0][0].collective
            algorithm = f"{tune.NAMES[collective]}/{case.algorithm}"
        return TorchContender(case.backend, case.memory, algorithm, case.wire)

    def _description(self) -> str:
        groups = [c.group for case, c in self._contenders.items() if isinstance(c, TorchContender)
                  and case.backend == "smddp"]  # fmt: skip
        return smddp.describe(groups[0]) if groups else ""

    def _print(self, text: str) -> None:
        if self.prints:
            print(text, flush=True)

    def _progress(self, text: str) -> None:
        """Prints a line of progress on a terminal; the next one replaces it."""
        if self.prints and sys.stderr.isatty():
            room = shutil.get_terminal_size().columns - 1  # of a longer one a part would stay
            print(f"\r\033[K{text[:room]}", end="", file=sys.stderr, flush=True)

    def run(self) -> list[list[Measurement]]:
        """Measures and prints everything; returns the rows."""
        self._introduce()
        bench = Bench(self._run.workload, self._contenders, dist.get_world_size())
        tasks: list[list[Measurement]] = []
        collective = ""
        wanted = self._run.workload.tasks
        self._announce(0)
        for number, rows in enumerate(bench.run()):
            self._progress("")
            task = wanted[number][0]
            if task.collective != collective:
                collective = task.collective
                self._print(f"# {collective}\n{table.header()}")
            if rows:
                self._print(table.format_rows(rows))
            tasks.append(rows)
            self._announce(number + 1)
        for sentence in bench.left_out:
            self._print(f"# {sentence}")
        self._print(table.footer(tasks))
        return tasks

    def _announce(self, done: int) -> None:
        wanted = self._run.workload.tasks
        if done < len(wanted):
            task, size = wanted[done]
            self._progress(f"{task.collective}, {size} bytes ({done + 1} of {len(wanted)}) ...")

    def _introduce(self) -> None:
        self._print(f"# median of calls, each on its slowest rank; {dist.get_world_size()} ranks")
        for line in self._start.lines():
            self._print(f"# {line}")
        self._print(f"# {self._description()}")
        if self._limits:
            link = self._limits["link_gbps"]
            between = "" if link is None else f", {link:.3f} GB/s from node 1 to node 0 by TCP"
            self._print(
                f"# limits: {self._limits['copy_gbps']:.1f} GB/s copied from memory to memory by "
                f"each rank{between}"
            )
        # Several hosts use the same numbers for their NUMA nodes, so the line is for one host only.
        places = "" if max(self._nodes) > 0 else numa.describe(self._numa)
        for note in [*filter(None, [places]), *self._notes]:
            self._print(f"# {note}")

    def _about(self) -> dict[str, Any]:
        return about(
            self._start,
            ranks_of_nodes=[self._nodes.count(node) for node in range(max(self._nodes) + 1)],
            description=self._description(),
            numa_nodes=self._numa,
            limits=self._limits,
            notes=self._notes,
        )

    def write(self, tasks: list[list[Measurement]]) -> bool:
        """Writes the files that were asked for; returns whether all of them could be written."""
        run, where = self._run, self._about()
        nodes = where["config"]["ranks_of_nodes"]
        title = f"{plural(dist.get_world_size(), 'rank')}, {plural(len(nodes), 'node')}"

        def as_json() -> None:
            if run.json is not None:
                write_json(run.json, table.as_json(tasks, where, run.every_call))

        def as_plot() -> None:
            if run.plot is not None:
                plot.draw(tasks, title, run.plot)
                print_written(run.plot)

        def as_tuning() -> None:
            if run.tune is None:
                return
            found = tune.findings(tasks, nodes)
            verdicts = list(tune.verdicts(found))
            for sentence in verdicts:
                self._print(f"# {sentence}")
            lines = [f"{self._start.time}, {title}", f"smddp.bench {' '.join(given())}"]
            lines += [*self._start.lines(), *verdicts]
            write_file(run.tune, tune.write(tune.rows(found, nodes), lines))

        are_written = [written(each) for each in (as_json, as_plot, as_tuning)]
        return all(are_written)


def _be_rank(run: options.Run) -> int:
    # Torch's Flight Recorder adds 2 us to each call of a backend that torch does not ship, and
    # nothing to gloo. It would distort the comparison.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    # The benchmark's own messages always go through gloo.
    dist.init_process_group("gloo")
    is_written = True
    try:
        with _Rank(run) as rank:
            tasks = rank.run()
            if rank.prints:
                is_written = rank.write(tasks)
    except MpiError as error:  # on all ranks
        if dist.get_rank() == 0:
            print(f"smddp.bench: {error}", file=sys.stderr)
        dist.destroy_process_group()
        return 1
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_written and not table.count_wrong(tasks) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 when it failed or a result was wrong, 2 for bad arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["ddp"]:
        return ddp.main(arguments[1:])
    parsed = options.parser().parse_args(arguments)
    try:
        run = options.parse(parsed, int(os.environ["WORLD_SIZE"]) if is_rank() else None)
        if is_rank():
            complete_rendezvous()
    except (ValueError, OSError) as error:
        print(f"smddp.bench: {error}", file=sys.stderr)
        return 2
    if not is_rank():
        return launch(run.layout, arguments, run.limit)
    return _be_rank(run)


if __name__ == "__main__":
    run(main)
