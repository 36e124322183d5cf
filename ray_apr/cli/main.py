"""The command line: ``python -m ray_apr train | resume | report | samples | verify | ...``.

Also installed as ``ray-apr``.

Exit codes: 0 done; 1 the run (or a check) failed; 2 a setting or an argument is
wrong; 130 stopped by Ctrl-C, 143 by SIGTERM. Heavy packages load inside the commands that need
them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.core.exceptions import APRError, ConfigError, Stopped, one_line
from ray_apr.run.folder import check_new_folder
from ray_apr.tools.simulator.arguments import add_simulate_arguments, add_tune_arguments

if TYPE_CHECKING:
    from ray_apr.cli.settings import RunSettings

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

_TRAIN_EXAMPLE = """\
example:
  python -m ray_apr train examples/arithmetic/quickstart.yaml --set train.steps=10 --dry-run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        return args.command(args)
    except ConfigError as error:
        _complain(f"error: {error}", args.verbose)
        return EXIT_USAGE
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped()
        _complain(str(stopped), verbose=False)
        return stopped.exit_code
    except BrokenPipeError:  # `... | head`: the reader has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:  # noqa: BLE001 (the outermost frame: reported, exit code 1)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        _complain(f"error: {type(error).__name__}: {one_line(error)}{notes}", args.verbose)
        if not isinstance(error, APRError) and not args.verbose:
            _complain("run again with -v for the traceback", verbose=False)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ray-apr", description="Asynchronous RL post-training with partial rollouts, on Ray."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, show tracebacks")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a model as a YAML file says",
        epilog=_TRAIN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG.yaml", type=Path)
    _add_overrides(train)
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run of this run.name, if there is one (as --set run.resume=true)",
    )
    train.add_argument(
        "--dry-run", action="store_true", help="check everything and show the plan; start nothing"
    )
    train.add_argument("--json", action="store_true", help="print the plan of a dry run as JSON")
    train.set_defaults(command=_train)

    resume = commands.add_parser("resume", help="go on with a run that `train` began")
    resume.add_argument("run", metavar="RUN_DIR", type=Path)
    _add_overrides(resume)
    resume.set_defaults(command=_resume)

    _add_reading(commands)
    _add_replay(
        commands.add_parser(
            "replay", help="train a step of a run again, and compare it with what the run has of it"
        )
    )
    _add_scale(
        commands.add_parser(
            "scale", help="give a run that trains another number of engines, while it goes on"
        )
    )

    simulate = commands.add_parser(
        "simulate", help="predict a run: a mode on a trace and a cluster"
    )
    add_simulate_arguments(simulate)
    simulate.set_defaults(command=_simulate)

    tune = commands.add_parser("tune", help="find the best settings for a trace and a cluster")
    add_tune_arguments(tune)
    tune.set_defaults(command=_tune)

    dashboard = commands.add_parser("dashboard", help="the Grafana dashboard of all runs")
    verbs = dashboard.add_subparsers(title="commands", required=True, metavar="COMMAND")
    printed = verbs.add_parser("json", help="print it, to be imported into Grafana")
    printed.set_defaults(command=_dashboard_json)
    installed = verbs.add_parser("install", help="put it where Ray's own Grafana finds it")
    installed.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="another folder of dashboards"
    )
    installed.set_defaults(command=_dashboard_install)

    doctor = commands.add_parser("doctor", help="check whether this machine can run ray_apr")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_reading(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Commands that read a run folder."""
    report = commands.add_parser("report", help="make the report of a run, or compare two runs")
    report.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="one or two folders")
    report.add_argument(
        "--out", type=Path, metavar="FILE.html", help="where the page goes (needed for two runs)"
    )
    report.set_defaults(command=_report)

    watch = commands.add_parser("watch", help="see how a run goes on, until it ends")
    watch.add_argument("run", metavar="RUN_DIR", type=Path)
    watch.set_defaults(command=_watch)

    _add_samples(commands.add_parser("samples", help="read trained samples of a run"))

    verify = commands.add_parser("verify", help="prove that a run kept what it promises")
    verify.add_argument("run", metavar="RUN_DIR", type=Path)
    verify.set_defaults(command=_verify)


def _add_samples(samples: argparse.ArgumentParser) -> None:
    samples.add_argument("run", metavar="RUN_DIR", type=Path)
    samples.add_argument(
        "--step", metavar="K", type=int, help="as in metrics.jsonl, from 0 (default: the last one)"
    )
    which = samples.add_mutually_exclusive_group()
    for order, whose in (
        ("worst", "of the least reward (default: 5)"),
        ("best", "of the largest reward"),
        ("longest", "with the most tokens"),
    ):
        which.add_argument(f"--{order}", metavar="N", type=int, help=f"so many {whose}")
    which.add_argument("--id", metavar="SAMPLE_ID", help="this one, of whatever step")
    samples.set_defaults(command=_samples)


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("run", metavar="RUN_DIR", type=Path)
    replay.add_argument(
        "--step", metavar="K", type=int, required=True, help="as in metrics.jsonl, from 0"
    )
    _add_overrides(replay)
    replay.add_argument("--json", action="store_true", help="print all of it as JSON")
    replay.set_defaults(command=_replay)


def _add_scale(scale: argparse.ArgumentParser) -> None:
    scale.add_argument("run", metavar="RUN_DIR", type=Path)
    scale.add_argument("--replicas", metavar="N", type=int, required=True, help="engines, from 1")
    scale.add_argument(
        "--timeout", metavar="S", type=_seconds, default=1200.0, help="wait so long (%(default)g)"
    )
    scale.set_defaults(command=_scale)


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace one setting, e.g. train.steps=10 or mode=sync; may be repeated",
    )


def _train(args: argparse.Namespace) -> int:
    from ray_apr.cli.launch import dry_run, make_plan
    from ray_apr.cli.settings import load_settings

    overrides = [*args.overrides, *(["run.resume=true"] if args.resume else [])]
    settings = load_settings(args.config, overrides)
    if not settings.run.resume:
        check_new_folder(settings.run_dir)  # before a report is made of what it holds
    if args.dry_run:
        plan = make_plan(settings)
        _show(json.dumps(plan, indent=2) if args.json else _plan_text(plan))
        warnings = dry_run(settings)
        for warning in warnings:
            _complain(f"warning: {warning}", verbose=False)
        if not args.json:
            _show("\ndry run: nothing was started")
        return EXIT_OK
    if args.json:
        raise ConfigError("--json", True, "only with --dry-run")
    return _run(settings)


def _resume(args: argparse.Namespace) -> int:
    from ray_apr.cli.resume import settings_to_resume

    return _run(settings_to_resume(args.run, args.overrides))


def _run(settings: RunSettings) -> int:
    """Show the plan, train, and make the report."""
    from ray_apr.cli.launch import make_plan, run_training

    began_at = time.monotonic()
    _show(_plan_text(make_plan(settings)) + "\n")
    with _report_at_end(settings.run_dir):
        run_training(settings, progress=_show)
    minutes, seconds = divmod(round(time.monotonic() - began_at), 60)
    _show(f"took:    {minutes} min {seconds:02d} s, with the start and end of Ray")
    return EXIT_OK


@contextlib.contextmanager
def _report_at_end(run_dir: Path) -> Iterator[None]:
    """Make the report of a run that ends or fails, from what it wrote; never hide its error. A run
    that was refused has written nothing."""
    settings = run_dir / "config.json"
    before, failed = _written_at(settings), True
    try:
        yield
        failed = False
    finally:
        if not failed:
            _make_report(run_dir, None)
        elif _written_at(settings) != before:
            try:
                _make_report(run_dir, None)
            except Exception as error:  # noqa: BLE001 (the run's own error goes on)
                _complain(f"the report could not be made: {error}", verbose=False)


def _written_at(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def _report(args: argparse.Namespace) -> int:
    if len(args.runs) == 1:
        _make_report(args.runs[0], args.out)
        return EXIT_OK
    if len(args.runs) > 2:
        raise ConfigError("RUN_DIR", [str(r) for r in args.runs], "give one folder, or two")
    if args.out is None:
        raise ConfigError("--out", None, "say where the comparison goes, e.g. --out compare.html")
    from ray_apr.tools.report.compare import comparison_table, write_comparison

    first, second = args.runs
    rows = write_comparison(first, second, args.out)
    _show(comparison_table(rows))
    _show(f"\ncomparison: {args.out}")
    return EXIT_OK


def _make_report(run_dir: Path, out: Path | None) -> None:
    from ray_apr.tools.report.html import write_report

    report = write_report(run_dir, out)
    _show("")
    for name, value in report.headline:
        _show(f"  {name:<24} {value}")
    for warning in report.warnings:
        _show(f"  warning: {warning}")
    _show(f"\nsummary: {report.summary_path}\nreport:  {report.html_path}")


def _watch(args: argparse.Namespace) -> int:
    from ray_apr.tools.watch import watch

    _show(watch(args.run, _show))
    return EXIT_OK


def _samples(args: argparse.Namespace) -> int:
    from ray_apr.tools.samples import ORDERS, as_text, select, tokenizer_of

    order = next((name for name in ORDERS if getattr(args, name) is not None), ORDERS[0])
    number = 5 if getattr(args, order) is None else getattr(args, order)
    rows = select(args.run, step=args.step, order=order, number=number, sample_id=args.id)
    decode, has_colors = tokenizer_of(args.run), sys.stdout.isatty()
    _show("\n\n".join(as_text(row, decode, has_colors=has_colors) for row in rows))
    return EXIT_OK


def _verify(args: argparse.Namespace) -> int:
    from ray_apr.tools.verify import verify

    checks = verify(args.run)
    for check in checks:
        _show(f"{'ok    ' if check.ok else 'BROKEN'}  {check.name:<10} {check.seen}")
    return EXIT_OK if all(check.ok for check in checks) else EXIT_FAILED


def _replay(args: argparse.Namespace) -> int:
    from ray_apr.cli.replay import replay_json, replay_run, replay_text

    replay = replay_run(args.run, args.step, args.overrides)
    _show(replay_json(replay) if args.json else replay_text(replay))
    return EXIT_OK if replay.is_same else EXIT_FAILED


def _scale(args: argparse.Namespace) -> int:
    from ray_apr.run.scale_requests import scale

    answer = scale(args.run, args.replicas, timeout_s=args.timeout)
    if answer.outcome != "done":
        _complain(f"{answer.outcome}: {answer.reason}; engines: {answer.after}", verbose=False)
        return EXIT_FAILED
    _show(f"engines: {answer.before} → {answer.after} in {answer.seconds:.1f} s")
    return EXIT_OK


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


def _simulate(args: argparse.Namespace) -> int:
    from ray_apr.tools.simulator.commands import simulate

    _show(simulate(args))
    return EXIT_OK


def _tune(args: argparse.Namespace) -> int:
    from ray_apr.tools.simulator.commands import tune

    _show(tune(args))
    return EXIT_OK


def _dashboard_json(args: argparse.Namespace) -> int:
    from ray_apr.tools.grafana.dashboard import dashboard_json

    _show(dashboard_json().rstrip("\n"))
    return EXIT_OK


def _dashboard_install(args: argparse.Namespace) -> int:
    from ray_apr.tools.grafana.dashboard import install

    _show(f"dashboard: {install(args.folder)}")
    return EXIT_OK


def _doctor(args: argparse.Namespace) -> int:
    from ray_apr.cli.doctor import run_checks

    num_problems = 0
    for check in run_checks():
        num_problems += not check.ok
        _show(f"{'ok     ' if check.ok else 'problem'}  {check.name:<22} {check.seen}")
        if not check.ok:
            _show(f"{'':<33}-> {check.remedy}")
    _show(f"\n{num_problems or 'no'} problem{'' if num_problems == 1 else 's'}")
    return EXIT_FAILED if num_problems else EXIT_OK


def _plan_text(plan: Mapping[str, Mapping[str, Any]]) -> str:
    width = max(len(name) for section in plan.values() for name in section)
    lines = []
    for section, values in plan.items():
        lines.append(section)
        lines += [f"  {name:<{width}}  {value}" for name, value in values.items()]
    return "\n".join(lines)


def _show(text: str) -> None:
    print(text, flush=True)


def _complain(text: str, verbose: bool) -> None:
    print(text, file=sys.stderr, flush=True)
    if verbose:
        traceback.print_exc()
