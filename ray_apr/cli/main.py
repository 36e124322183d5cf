"""The command line: ``python -m ray_apr init | train | resume | report | samples | verify | ...``.

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
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.cli.quiet import skip_daemons_lines
from ray_apr.cli.reading import add_reading, make_report
from ray_apr.cli.said import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Commands, add_run_dir, complain, show
from ray_apr.core.exceptions import APRError, ConfigError, Stopped, one_line
from ray_apr.run.folder import CONFIG_FILE, check_new_folder
from ray_apr.tools.simulator.arguments import add_simulate_arguments, add_tune_arguments

if TYPE_CHECKING:
    from ray_apr.cli.settings import RunSettings

_TRAIN_EXAMPLE = """\
example:
  python -m ray_apr init my-run
  python -m ray_apr train my-run/run.yaml --set train.steps=10 --dry-run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    skip_daemons_lines()
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        _check_run_dirs(args)
        return args.command(args)
    except ConfigError as error:
        complain(f"error: {error}", args.verbose)
        return EXIT_USAGE
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped()
        complain(str(stopped), verbose=False)
        return stopped.exit_code
    except BrokenPipeError:  # `... | head`: the reader has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:  # noqa: BLE001 (the outermost frame: reported, exit code 1)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        complain(f"error: {type(error).__name__}: {one_line(error)}{notes}", args.verbose)
        if not isinstance(error, APRError) and not args.verbose:
            complain("run again with -v for the traceback", verbose=False)
        return EXIT_FAILED


def _check_run_dirs(args: argparse.Namespace) -> None:
    """Check that folders of runs are there, whatever a command reads of them."""
    for folder in (getattr(args, "run", None), *getattr(args, "runs", ())):
        if folder is not None and not folder.expanduser().is_dir():
            raise ConfigError("RUN_DIR", str(folder), "there is no such folder; correct the path")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ray-apr", description="Asynchronous RL post-training with partial rollouts, on Ray."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, show tracebacks")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", action=Commands
    )

    init = commands.add_parser("init", help="write a starter project: settings, reward, prompts")
    init.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder, or an empty one")
    init.set_defaults(command=_init)

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
    _add_dry_run(train)
    train.set_defaults(command=_train)

    resume = commands.add_parser("resume", help="go on with a run that `train` began")
    add_run_dir(resume)
    _add_overrides(resume)
    _add_dry_run(resume)
    resume.set_defaults(command=_resume)

    add_reading(commands)
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
    verbs = dashboard.add_subparsers(
        title="commands", required=True, metavar="COMMAND", action=Commands
    )
    printed = verbs.add_parser("json", help="print it, to be imported into Grafana")
    printed.set_defaults(command=_dashboard_json)
    installed = verbs.add_parser("install", help="put it where Ray's own Grafana finds it")
    installed.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="another folder of dashboards"
    )
    installed.set_defaults(command=_dashboard_install)

    doctor = commands.add_parser(
        "doctor",
        help="check whether this machine can run ray_apr; of a run, say what holds it back",
    )
    doctor.add_argument(
        "run", metavar="RUN_DIR", type=Path, nargs="?", help="a run, also one that goes on"
    )
    doctor.set_defaults(command=_doctor)
    return parser


def _add_replay(replay: argparse.ArgumentParser) -> None:
    add_run_dir(replay)
    replay.add_argument(
        "--step", metavar="K", type=int, required=True, help="as in metrics.jsonl, from 0"
    )
    _add_overrides(replay)
    replay.add_argument("--json", action="store_true", help="print all of it as JSON")
    replay.set_defaults(command=_replay)


def _add_scale(scale: argparse.ArgumentParser) -> None:
    add_run_dir(scale)
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


def _add_dry_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dry-run", action="store_true", help="check everything and show the plan; start nothing"
    )
    command.add_argument("--json", action="store_true", help="print the plan of a dry run as JSON")


def _init(args: argparse.Namespace) -> int:
    from ray_apr.cli.init import write_starter

    names = write_starter(args.folder)
    show(f"wrote {', '.join(names)}; next:\n")
    show(f"  cd {shlex.quote(str(args.folder))}")
    show("  ray-apr train run.yaml --dry-run\n  ray-apr train run.yaml")
    return EXIT_OK


def _train(args: argparse.Namespace) -> int:
    from ray_apr.cli.settings import load_settings

    overrides = [*args.overrides, *(["run.resume=true"] if args.resume else [])]
    settings = load_settings(args.config, overrides)
    if not settings.run.resume:
        check_new_folder(settings.run_dir)  # before a report is made of what it holds
    return _begin(settings, args)


def _resume(args: argparse.Namespace) -> int:
    from ray_apr.cli.resume import settings_to_resume

    return _begin(settings_to_resume(args.run, args.overrides), args)


def _begin(settings: RunSettings, args: argparse.Namespace) -> int:
    if args.dry_run:
        return _dry_run(settings, as_json=args.json)
    if args.json:
        raise ConfigError("--json", True, "only with --dry-run")
    return _run(settings)


def _dry_run(settings: RunSettings, *, as_json: bool) -> int:
    """Show the plan, and check what a run would check."""
    from ray_apr.cli.launch import dry_run
    from ray_apr.cli.plan import make_plan

    plan = make_plan(settings)
    show(json.dumps(plan, indent=2) if as_json else _plan_text(plan))
    _check_push(settings)
    warnings = dry_run(settings, (lambda _: None) if as_json else show)
    for warning in warnings:
        complain(f"warning: {warning}", verbose=False)
    if not as_json:
        show("\ndry run: nothing was started")
    return EXIT_OK


def _run(settings: RunSettings) -> int:
    """Show the plan, train, and make the report."""
    from ray_apr.cli.launch import run_training
    from ray_apr.cli.plan import make_plan
    from ray_apr.cli.push import push_at_end
    from ray_apr.cli.quiet import RAY_LOG
    from ray_apr.cli.resume import is_anything_left
    from ray_apr.cli.said import tell
    from ray_apr.run.final import FINAL_FILE

    _check_push(settings)
    is_verbose = logging.getLogger().isEnabledFor(logging.DEBUG)
    began_at, log = time.monotonic(), None if is_verbose else settings.run_dir / RAY_LOG
    tell(_plan_text(make_plan(settings)) + "\n")
    try:
        with _report_at_end(settings.run_dir):
            run_training(settings, progress=tell, ray_log=log)
    except KeyboardInterrupt:
        if (settings.run_dir / FINAL_FILE).is_file():
            on = f"go on:   ray-apr resume {shlex.quote(str(settings.run_dir))}"
            tell(on if is_anything_left(settings.run_dir) else _next_line(settings.run_dir))
        raise
    if log is not None:
        tell(f"ray:     {log}")
    if settings.run.push_to_hub is not None:
        private = settings.run.hub_private
        tell(push_at_end(settings.run_dir, settings.run.push_to_hub, private=private))
    minutes, seconds = divmod(round(time.monotonic() - began_at), 60)
    tell(f"took:    {minutes} min {seconds:02d} s, with the start and end of Ray")
    tell(_next_line(settings.run_dir))
    return EXIT_OK


def _next_line(run_dir: Path) -> str:
    """The commands that tell most of a run that has ended, to be pasted as they are."""
    here = Path.cwd()
    folder = run_dir.relative_to(here) if run_dir.is_relative_to(here) else run_dir
    verbs = ("samples", "doctor", "verify")
    commands = (f"ray-apr {verb} {shlex.quote(str(folder))}" for verb in verbs)
    return f"next:    {'; '.join(commands)}"


def _check_push(settings: RunSettings) -> None:
    """Refuse a model that could not be pushed, before it is trained."""
    from ray_apr.cli.push import check_token

    if settings.run.push_to_hub is not None:
        check_token("run.push_to_hub", settings.run.push_to_hub)


@contextlib.contextmanager
def _report_at_end(run_dir: Path) -> Iterator[None]:
    """Make the report of a run that ends or fails, from what it wrote; whether that can be done
    changes nothing about how the run ended. A run that was refused has written nothing."""
    settings = run_dir / CONFIG_FILE
    before = _written_at(settings)
    try:
        yield
    finally:
        if _written_at(settings) != before:
            try:
                make_report(run_dir, None)
            except Exception as error:  # noqa: BLE001 (the run's own end goes on)
                complain(f"the report could not be made: {error}", verbose=False)


def _written_at(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def _replay(args: argparse.Namespace) -> int:
    from ray_apr.cli.replay import replay_json, replay_run, replay_text

    replay = replay_run(args.run, args.step, args.overrides)
    show(replay_json(replay) if args.json else replay_text(replay))
    return EXIT_OK if replay.is_same else EXIT_FAILED


def _scale(args: argparse.Namespace) -> int:
    from ray_apr.run.scale_requests import scale

    answer = scale(args.run, args.replicas, timeout_s=args.timeout)
    if answer.outcome != "done":
        complain(f"{answer.outcome}: {answer.reason}; engines: {answer.after}", verbose=False)
        return EXIT_FAILED
    show(f"engines: {answer.before} → {answer.after} in {answer.seconds:.1f} s")
    return EXIT_OK


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


def _simulate(args: argparse.Namespace) -> int:
    from ray_apr.tools.simulator.commands import simulate

    show(simulate(args))
    return EXIT_OK


def _tune(args: argparse.Namespace) -> int:
    from ray_apr.tools.simulator.commands import tune

    show(tune(args))
    return EXIT_OK


def _dashboard_json(args: argparse.Namespace) -> int:
    from ray_apr.tools.grafana.dashboard import dashboard_json

    show(dashboard_json().rstrip("\n"))
    return EXIT_OK


def _dashboard_install(args: argparse.Namespace) -> int:
    from ray_apr.tools.grafana.dashboard import install

    show(f"dashboard: {install(args.folder)}")
    return EXIT_OK


def _doctor(args: argparse.Namespace) -> int:
    if args.run is not None:
        from ray_apr.cli.reading import diagnose

        return diagnose(args.run)
    from ray_apr.cli.doctor import run_checks

    num_problems = 0
    for check in run_checks():
        num_problems += not check.ok
        show(f"{'ok     ' if check.ok else 'problem'}  {check.name:<22} {check.seen}")
        if not check.ok:
            show(f"{'':<33}-> {check.remedy}")
    show(f"\n{num_problems or 'no'} problem{'' if num_problems == 1 else 's'}")
    return EXIT_FAILED if num_problems else EXIT_OK


def _plan_text(plan: Mapping[str, Mapping[str, Any]]) -> str:
    width = max(len(name) for section in plan.values() for name in section)
    lines = []
    for section, values in plan.items():
        lines.append(section)
        lines += [f"  {name:<{width}}  {value}" for name, value in values.items()]
    return "\n".join(lines)
