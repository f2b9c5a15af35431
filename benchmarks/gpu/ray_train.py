"""What saves cost a training on GPUs, in Ray Train: the stall against the rate of the copy to pinned memory, slower
steps while an upload runs, a durable save, a restore, and the same losses after a resume.

    python benchmarks/gpu/ray_train.py --model 1b --parallel fsdp --workers 8 --storage s3://bucket/bench

With `--no-gpu --model tiny` the same script runs on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from training import train

from ckptstore.tools.bench import machine
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import OURS, Report, Sample, Workload, WorkloadOutcome
from ckptstore.tools.bench.training import SHAPES
from ckptstore.tools.cli.commands.bench import echo_workload


def main() -> None:
    """Run both starts, hold the losses to each other, and write what was measured as `ckptstore bench` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="1b")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="fsdp")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--storage", required=True, help="Ray's storage_path; an empty place.")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.0, help="How far losses after the resume may be off.")
    parser.add_argument("--json", type=Path, default=Path("ray_train.json"))
    arguments = parser.parse_args()
    told = arguments.json.absolute()
    config = {
        **{name: getattr(arguments, name) for name in ("model", "parallel", "batch", "length", "steps", "saves")},
        "told": str(told),
    }
    reports = [fit({**config, "again": again}, arguments, told) for again in (False, True)]
    first, second = reports
    off = max(abs(first["losses"][step] - loss) for step, loss in second["losses"].items())
    found = {**first, "resume_seconds": second["resume_seconds"], "losses_off_after_resume": off}
    report = report_of(found, config, arguments.workers)
    told.write_text(json.dumps(report.to_json(), indent=1))
    for workload in report.workloads:
        echo_workload(workload)
    if second["resumed_at"] != first["saved_at"] or off > arguments.tolerance:
        raise SystemExit(f"the run went on from step {second['resumed_at']}, with losses that are off by {off}")


def report_of(found: dict[str, Any], config: dict[str, Any], workers: int) -> Report:
    """What rank 0 measured of its own part. The limit of a stall is the copy to pinned memory."""
    samples = {name: [Sample(**one) for one in found.pop(name)] for name in ("stalls", "copies", "saves", "loads")}
    base = Workload(name="", title="", size_bytes=found.pop("state_bytes_of_rank_0"), ranks=workers, outcomes=())
    stalls = (
        WorkloadOutcome.of(OURS, samples["stalls"]),
        WorkloadOutcome.of("copy to host", samples["copies"], role="limit"),
    )
    asked = {name: value for name, value in config.items() if name != "told"}
    return Report(
        created_at=time.time(),
        command="benchmarks/gpu/ray_train.py",
        machine=machine.describe(Place(uri=tempfile.gettempdir())),
        versions=machine.versions(),
        asked=asked,
        workloads=(
            replace(base, name="async", title="Stall", figure="blocked_seconds", outcomes=stalls, facts=found),
            replace(base, name="save", title="Save", outcomes=(WorkloadOutcome.of(OURS, samples["saves"]),)),
            replace(base, name="load", title="Load", outcomes=(WorkloadOutcome.of(OURS, samples["loads"]),)),
        ),
    )


def fit(config: dict[str, Any], arguments: argparse.Namespace, told: Path) -> dict[str, Any]:
    """One start of the run."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    if not ray.is_initialized():
        # A report waits for the controller's next look at the workers; by default that is seconds away.
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
        path = str(Path(__file__).parent)
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="nccl" if arguments.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(storage_path=arguments.storage, name="ckptstore-gpu"),
    ).fit()
    return dict(json.loads(told.read_text()))


if __name__ == "__main__":
    main()
