"""`shard-runner`: what a pod runs.

    shard-runner run   --run <run uri> --shard <shard id>     answer a shard
    shard-runner probe --run <run uri>                        can the model do this task?
    shard-runner check-device                                 is the GPU sane?

A run is an absolute URI, or a path below MILLRACE_LAKE. Models come from MILLRACE_MODELS. Exit codes: 0 complete, 2 the plan or
configuration is wrong, 3 engine or endpoint unavailable, 4 too many unusable answers, 75 told to stop with everything saved.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from millrace.errors import ExitCode, MillraceError
from shard_runner.leash import end_with_parent, hold_descendants, kill_descendants

# A process that multiprocessing spawns imports its parent's main module, hence this one: so the engine's processes end with the runner.
end_with_parent()

# An engine that does not shut down must not keep a GPU, nor change the outcome of finished work.
TEARDOWN_SECONDS = 20.0

log = logging.getLogger("shard_runner")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shard-runner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="answer the requests of one shard")
    run.add_argument("--run", required=True, help="the run's URI, or its path below MILLRACE_LAKE")
    run.add_argument("--shard", required=True, help="shard id, as the manifest has it")
    run.add_argument("--attempt", help="id of this execution (default: random)")
    probe = commands.add_parser("probe", help="show that the model can answer the golden prompts")
    probe.add_argument("--run", required=True, help="the run's URI, or its path below MILLRACE_LAKE")
    probe.add_argument("--model", help="one of the plan's models (default: the plan's default model)")
    probe.add_argument("--stage", choices=["cpu", "all"], default="all", help="cpu: without starting the engine")
    commands.add_parser("check-device", help="show that each GPU computes, before a model is loaded")
    return parser


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one command and leave the process, with an engine's threads and children or without."""
    args = _parser().parse_args(argv)
    _log_to_stdout()
    hold_descendants()
    # Imported here: the signal handlers must stand before anything slow is imported or loaded.
    from shard_runner.guard import Signals

    signals = Signals()
    signals.install()
    code, close = _execute(args, signals)
    leave(code, close)


def _log_to_stdout() -> None:
    """Our own lines only: the libraries' chatter at every start would hide them."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _execute(args: argparse.Namespace, signals: object) -> tuple[ExitCode, Callable[[], None]]:
    from millrace.lake import Lake
    from millrace.layout import RunPaths, new_attempt
    from shard_runner.guard import Signals

    assert isinstance(signals, Signals)
    try:
        if args.command == "check-device":
            from shard_runner.device import check_device

            message = check_device()
            log.info("%s (exit 0)", message)
            return ExitCode.COMPLETE, lambda: None
        root, paths = RunPaths.parse(args.run)
        lake = Lake(root) if root else Lake.from_env()
        if args.command == "run":
            from shard_runner.run import Attempt

            attempt = Attempt(lake, paths, args.shard, args.attempt or new_attempt(), signals)
            code, message = attempt.run()
            close = attempt.close
        else:
            from shard_runner.probe import Probe

            probe = Probe(lake, paths, args.model, signals)
            code, message = ExitCode.COMPLETE, probe.run(engine=args.stage == "all")
            close = probe.close
    except MillraceError as error:
        code, message, close = error.exit_code, str(error), lambda: None
    log.log(logging.INFO if code == ExitCode.COMPLETE else logging.ERROR, "%s (exit %d)", message, code)
    return code, close


def leave(code: ExitCode, close: Callable[[], None]) -> NoReturn:
    """Close the engine within a deadline, end what it left running, and exit with `code` whatever teardown does."""

    def quietly() -> None:
        try:
            close()
        except Exception as error:  # everything worth keeping is saved already
            log.warning("the engine did not close cleanly (%s)", type(error).__name__)

    teardown = threading.Thread(target=quietly, daemon=True)
    teardown.start()
    teardown.join(TEARDOWN_SECONDS)
    if teardown.is_alive():
        log.warning("the engine did not close within %.0f s; leaving it", TEARDOWN_SECONDS)
    kill_descendants()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))
