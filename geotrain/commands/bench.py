"""`geotrain bench`: measurements on this machine."""

import argparse
from collections.abc import Sequence

from geotrain.commands import bench_link, bench_step
from geotrain.lab.bench.link_options import LinkBench
from geotrain.lab.bench.options import BenchOptions


def main(argv: Sequence[str]) -> int:
    """Run one measurement. Returns the exit status."""
    options = parse(argv)
    if isinstance(options, LinkBench):
        from geotrain.lab.bench import link

        return link.main(options)
    from geotrain.lab.bench import step

    return step.main(options)


def parse(argv: Sequence[str]) -> BenchOptions | LinkBench:
    """The options; argparse's own message and exit status 2 for what cannot be."""
    parser = argparse.ArgumentParser(prog="geotrain bench", description="Measure on this machine.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="WHAT")
    step, link = bench_step.add_to(verbs), bench_link.add_to(verbs)
    given = parser.parse_args(argv)
    own, of = (link, bench_link) if given.verb == "link" else (step, bench_step)
    try:
        options: BenchOptions | LinkBench = of.options_of(given)
    except ValueError as error:
        own.error(str(error))
    return options
