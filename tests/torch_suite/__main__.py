"""Runs torch's tests and compares the results with the record."""

from __future__ import annotations

import argparse
import re
import sys

from torch_suite import record
from torch_suite.suite import Suite


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torch_suite", description=__doc__)
    names = [configuration.name for configuration in record.CONFIGURATIONS]
    parser.add_argument("configuration", choices=names, help="cpu or mapped, and the world size")
    parser.add_argument("-k", default="", metavar="REGEX", help="only tests whose name has this")
    parser.add_argument("--first", action="store_true", help="only what this one has to pass in CI")
    parser.add_argument(
        "--third", type=int, choices=(0, 1, 2), help="only every third test, from this one on"
    )
    parser.add_argument("--record", action="store_true", help="write down how the tests end")
    parser.add_argument("-v", action="store_true", help="show the output of tests that fail")
    return parser.parse_args()


def main() -> int:
    """Runs the command line; returns 1 if a test has a worse result than recorded."""
    options = _arguments()
    configuration = next(c for c in record.CONFIGURATIONS if c.name == options.configuration)
    suite = Suite(configuration.world_size, configuration.mapped, quiet=not options.v)
    names = record.served_first_by(configuration) if options.first else suite.names()
    names = [name for name in names if re.search(options.k, name)]
    if options.third is not None:
        names = names[options.third :: 3]
    found = {}
    for name, outcome in suite.run(names):
        found[name] = record.explain(outcome)
        print(f"{outcome.seconds:6.1f} s  {name}: {found[name]}", flush=True)
        if options.v and outcome.status == "fails":
            print(outcome.detail, flush=True)
    counts = record.counts(found.values())
    print(", ".join(f"{number} {how}" for how, number in counts.items()))
    if options.record:
        others = record.read(configuration) if options.k else {}
        record.write(configuration, {**others, **found})
        return 0
    worse, new = record.differences(record.read(configuration), found)
    for sentence in new:
        print(f"new: {sentence}")
    for sentence in worse:
        print(f"WORSE: {sentence}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
