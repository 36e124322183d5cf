"""Commands that read a run folder: report, watch, samples, trace, push, verify."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ray_apr.cli.said import EXIT_FAILED, EXIT_OK, add_run_dir, show
from ray_apr.core.exceptions import ConfigError, SimulationError


def add_reading(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Commands that read a run folder."""
    report = commands.add_parser("report", help="make the report of a run, or compare runs")
    report.add_argument(
        "runs", metavar="RUN_DIR", type=Path, nargs="+", help="a folder, or several"
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="where the page goes; default: report.html in RUN_DIR; several runs need it",
    )
    report.set_defaults(command=_report)

    watch = commands.add_parser(
        "watch",
        help="see how a run goes on, until it ends",
        description="See how a run goes on, until it ends: in a terminal as a view, elsewhere by a "
        "line for each step and evaluation. The exit code is 0 if the run came to its end, else 1.",
    )
    add_run_dir(watch)
    watch.set_defaults(command=_watch)

    _add_samples(commands.add_parser("samples", help="read trained samples of a run"))

    trace = commands.add_parser(
        "trace", help="write what engines and trainer did, and profiles of steps, for Perfetto"
    )
    add_run_dir(trace)
    trace.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json.gz",
        help="where it goes; default: trace.json.gz in RUN_DIR",
    )
    trace.set_defaults(command=_trace)

    push = commands.add_parser(
        "push", help="send the trained model of a run, with a card, to the Hugging Face Hub"
    )
    add_run_dir(push)
    push.add_argument("repo", metavar="OWNER/NAME", nargs="?", help="none: write the card alone")
    push.add_argument("--public", action="store_true", help="a repository that is made is public")
    push.set_defaults(command=_push)

    verify = commands.add_parser(
        "verify",
        help="prove that a run kept what it promises",
        description="Prove, from its folder alone, that a run that has ended kept what it "
        "promises: nothing is lost, doubled or too old. The exit code is 1 where a line is BROKEN.",
    )
    add_run_dir(verify)
    verify.set_defaults(command=_verify)


def _add_samples(samples: argparse.ArgumentParser) -> None:
    add_run_dir(samples)
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


def _report(args: argparse.Namespace) -> int:
    if len(args.runs) == 1:
        make_report(args.runs[0], args.out)
        return EXIT_OK
    if args.out is None:
        raise ConfigError("--out", None, "say where the comparison goes, e.g. --out compare.html")
    from ray_apr.tools.report.compare import comparison_text, write_comparison

    show(comparison_text(write_comparison(args.runs, args.out)))
    show(f"\ncomparison: {args.out}")
    return EXIT_OK


def make_report(run_dir: Path, out: Path | None) -> None:
    """Make the report of a run, and show what matters most.

    Args:
        run_dir: Of the run.
        out: Where the page goes; None puts it into the run folder.
    """
    from ray_apr.tools.report.html import write_report

    report = write_report(run_dir, out)
    show("")
    for name, value in report.headline:
        show(f"  {name:<24} {value}")
    for warning in report.warnings:
        show(f"  warning: {warning}")
    show(f"\nsummary: {report.summary_path}\nreport:  {report.html_path}")


def _watch(args: argparse.Namespace) -> int:
    from ray_apr.tools.watch import watch

    said, is_ok = watch(args.run, show)
    show(said)
    return EXIT_OK if is_ok else EXIT_FAILED


def diagnose(run_dir: Path) -> int:
    """Show what held a run back, which settings to change, and what the simulator makes of that."""
    from ray_apr.tools.diagnosis import findings
    from ray_apr.tools.report.load import load_run
    from ray_apr.tools.report.parts import left_out
    from ray_apr.tools.report.summary import how_it_ended
    from ray_apr.tools.shares import shares_of
    from ray_apr.tools.simulator.of_run import estimate

    run = load_run(run_dir)
    if ended := how_it_ended(run):
        show(f"{ended}\n")
    shares = shares_of(run)
    show(
        f"{run.name}, {len(run.steps)} steps; without {left_out(run)}, in which the engines fill: "
        f"{shares.seconds:.1f} s\n"
        f"  trainer   trains {shares.told(shares.trains)}, is in weight syncs "
        f"{shares.told(shares.syncs)}\n"
        f"            waits for samples {shares.told(shares.starves)}, for the hand-over of a "
        f"batch that is there {shares.told(shares.handed)}\n"
        f"            for checkpoints {shares.told(shares.saves)}\n"
        f"  engines   generate {shares.generates:.0%}, are paused {shares.paused:.0%}, idle "
        f"{shares.idle:.0%}\n"
    )
    found = findings(run, shares)
    for finding in found:
        show(f"{finding.share:4.0%}  {finding.what}\n      -> {finding.remedy}")
    if not found:
        show("nothing that costs much")
    try:
        guess = estimate(run)
    except (ConfigError, SimulationError) as error:
        why = error.remedy if isinstance(error, ConfigError) else error
        show(f"\nno estimates of the simulator: {why}")
        return EXIT_OK
    show(
        "\nthe simulator, with engines and trainer as the rows have them:\n"
        f"  the run as it was: {guess.off:+.0%} of its seconds a step"
    )
    for change in guess.changes:
        show(f"  {change.gain:+5.0%} steps in a time: {change.what}")
    return EXIT_OK


def _samples(args: argparse.Namespace) -> int:
    from ray_apr.tools.samples import ORDERS, as_text, select, tokenizer_of

    order = next((name for name in ORDERS if getattr(args, name) is not None), ORDERS[0])
    number = 5 if getattr(args, order) is None else getattr(args, order)
    rows = select(args.run, step=args.step, order=order, number=number, sample_id=args.id)
    decode, has_colors = tokenizer_of(args.run), sys.stdout.isatty()
    show("\n\n".join(as_text(row, decode, has_colors=has_colors) for row in rows))
    return EXIT_OK


def _trace(args: argparse.Namespace) -> int:
    from ray_apr.tools.trace import write_trace

    show(f"trace: {write_trace(args.run, args.out)} (opens in ui.perfetto.dev)")
    return EXIT_OK


def _push(args: argparse.Namespace) -> int:
    from ray_apr.cli.push import push, write_card
    from ray_apr.tools.model_card import CARD_FILE

    if args.repo is None:
        show(f"card: {write_card(args.run).path}/{CARD_FILE}")
    else:
        show(f"model: {push(args.run, args.repo, private=not args.public)}")
    return EXIT_OK


def _verify(args: argparse.Namespace) -> int:
    from ray_apr.tools.verify import verify

    checks = verify(args.run)
    for check in checks:
        show(f"{'ok    ' if check.ok else 'BROKEN'}  {check.name:<10} {check.seen}")
    return EXIT_OK if all(check.ok for check in checks) else EXIT_FAILED
