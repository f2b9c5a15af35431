"""Run seeds, replay one, or shrink a failing one, by `python -m kit.simulation`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from kit.simulation.fast_tier.fast_jobs import draw_fast
from kit.simulation.plan import Plan, draw
from kit.simulation.simulator import Outcome, Simulation, report, shrink, write


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m kit.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed; with --seconds or --seeds begin with it")
    parser.add_argument("--seeds", type=int, help="run so many seeds")
    parser.add_argument("--seconds", type=float, help="run seeds for so long")
    parser.add_argument("--fast-tier", action="store_true", help="jobs with a fast tier on simulated nodes")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first seed that fails")
    parser.add_argument("--shrink", action="store_true", help="make the plan of a failing seed smaller")
    parser.add_argument("--plan", type=Path, help="run the plan in this file")
    parser.add_argument("--trace", action="store_true", help="show the whole trace of a failing seed")
    parser.add_argument("--verbose", action="store_true", help="show the trace of a seed that does not fail too")
    options = parser.parse_args(arguments)
    check_some(parser, options, "seeds", "seconds")
    plan = None if options.plan is None else _read_plan(parser, options)
    with Simulation() as simulation:
        if plan is None and (options.seeds is not None or options.seconds is not None):
            return _many(simulation, options)
        outcome = simulation.run(plan or _drawn(options, options.seed or 0))
        if not outcome.ok:
            return _failed(simulation, outcome, options, lines=80)
        if options.verbose:
            write("\n".join(outcome.trace))
        write(f"seed {outcome.plan.seed}: all promises held, {outcome.steps} steps, run {outcome.digest}")
        return 0


def check_some(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End with an error if an option says that nothing is to be run: nothing could fail then."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} is {value:g}, it must be above 0")


def _read_plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan:
    others = [name for name in ("seed", "seeds", "seconds", "fast_tier", "keep_going") if getattr(options, name)]
    if others:
        parser.error(f"--plan runs one plan, which has its seed and its nodes: leave out {', '.join(others)}")
    try:
        return Plan.from_json(options.plan.read_text())
    except OSError as error:
        parser.error(f"{options.plan} cannot be read: {error.strerror}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        parser.error(f"{options.plan} is no plan, as --shrink prints it: {error!r}")


def _drawn(options: argparse.Namespace, seed: int) -> Plan:
    return draw_fast(seed) if options.fast_tier else draw(seed)


def _failed(simulation: Simulation, outcome: Outcome, options: argparse.Namespace, *, lines: int) -> int:
    """Show the failure of a seed, or of a smaller plan that fails as it does."""
    if options.shrink:
        outcome = shrink(simulation, outcome)
        write(outcome.plan.to_json())
    write(report(outcome, lines=0 if options.trace else lines))
    return 1


def _many(simulation: Simulation, options: argparse.Namespace) -> int:
    first, began, failed, steps = options.seed or 0, time.monotonic(), 0, 0
    rules: Counter[str] = Counter()
    seed = first
    while True:
        if options.seeds is not None and seed - first >= options.seeds:
            break
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            break
        outcome = simulation.run(_drawn(options, seed))
        steps += outcome.steps
        if not outcome.ok:
            failed += 1
            rules[outcome.rule] += 1
            if not options.keep_going:
                return _failed(simulation, outcome, options, lines=40)
            write(_short(outcome))
        seed += 1
    seconds = time.monotonic() - began
    count = seed - first
    write(
        f"{count} seeds, {steps} steps in {seconds:.1f} s ({count / max(seconds, 1e-9):.1f} seeds/s); {failed} failed"
    )
    for rule, times in rules.most_common():
        write(f"  {times:5} {rule}")
    return 1 if failed else 0


def _short(outcome: Outcome) -> str:
    plan = outcome.plan
    text = " | ".join([line.strip() for line in outcome.failure.splitlines()][-3:])[-300:]
    return f"seed {plan.seed} [{plan.storage}, {plan.board}]: {text}"


if __name__ == "__main__":
    sys.exit(main())
