"""The command `geotrain`: picks a config file and hands over; every knob lives in the file.

Imports are lazy, so that `geotrain daemon` never loads torch and `geotrain --help` is quick.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from geotrain.errors import ConfigError, GeotrainError
from geotrain.version import __version__

EXIT_FAILED = 1
EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for a failure, 2 for a wrong config."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["demo"]:  # has options of its own
            from geotrain.lab.demo import run as demo

            return demo.main(arguments[1:])
        if arguments[:1] == ["lab"]:  # so has this
            from geotrain.commands import lab

            return lab.main(arguments[1:])
        if arguments[:1] == ["bench"]:
            from geotrain.commands import bench

            return bench.main(arguments[1:])
        return _dispatch(_parser(arguments).parse_args(arguments))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    except GeotrainError as error:
        print(f"geotrain: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output is gone, as in `geotrain status | head`; flushing what is left
        # at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"geotrain: cannot write the output: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="geotrain",
        description="Train one model over GPUs in several regions, clouds or companies.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, help: str, *, config: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        if config:
            command.add_argument(
                "--config",
                metavar="FILE",
                help="this site's TOML file (default: $GEOTRAIN_CONFIG)",
            )
        return command

    add("check", "Check a config file: every problem at once, else a short summary.")
    add("daemon", "Run this region's daemon until it is told to end.")
    run = add("run", "Run the daemon and a training command together, with one exit status.")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD ...")
    status = add("status", "Show what this region's daemon sees: ranks, links, bytes, dollars.")
    status.add_argument(
        "--stacks",
        nargs="?",
        const="short",
        choices=("short", "full"),
        help="each rank's Python stack as well: your own files' frames and the last ones (short, "
        "where no word is given), or all",
    )
    status.add_argument("--json", action="store_true", help="the daemon's own JSON")
    simulate = add("simulate", "Draw the step that this run would take over given links.")
    if argv[:1] == ["simulate"]:  # its options need more imports than other commands should pay
        from geotrain.commands.simulate import add_options

        add_options(simulate)
    commands.add_parser("demo", help="Train over emulated regions on this machine.")
    commands.add_parser("bench", help="Measure steps, or a link: geotrain bench --help.")
    commands.add_parser("lab", help="Emulate long-distance links for programs of your own.")
    add("version", "Print the version.", config=False)
    return parser


def _dispatch(options: argparse.Namespace) -> int:
    if options.command == "version":
        print(__version__)
        return 0
    from geotrain.config import load_config

    config = load_config(_config_path(options.config))
    if options.command == "check":
        from geotrain.commands.check import check

        return check(config)
    if options.command == "status":
        from geotrain.commands.status import status

        return status(config, stacks=options.stacks, as_json=options.json)
    if options.command == "simulate":
        from geotrain.commands import simulate

        return simulate.run(config, options)
    if options.command == "run":
        from geotrain.commands.run import run

        return run(config, _training_command(options.argv))
    from geotrain.daemon import main as daemon
    from geotrain.observability.log import setup_logging

    setup_logging(also=("aiohttp", "asyncio"))
    return daemon.run(config)


def _config_path(given: str | None) -> str:
    path = given or os.environ.get("GEOTRAIN_CONFIG", "")
    if not path:
        raise ConfigError("no config file: give --config FILE, or set GEOTRAIN_CONFIG")
    return path


def _training_command(argv: Sequence[str]) -> list[str]:
    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    if not command:
        raise ConfigError("no command: geotrain run --config FILE -- python train.py")
    return command
