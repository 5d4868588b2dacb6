"""Commands that train or measure: run, compare, calibrate."""

from __future__ import annotations

import argparse
import os
import sys

import autopar
from autopar.cli.arguments import MODEL_HELP, own_output_only, positive, positive_number
from autopar.documents.base import require_writable, write_atomically


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    parser.add_argument(
        "--steps", type=positive, default=100, metavar="N", help="train up to step N; default: %(default)s"
    )
    parser.add_argument("--model", metavar="MODEL", help=f"the same model from another place ({MODEL_HELP})")
    parser.add_argument("--nproc", type=positive, metavar="N", help="ranks to start here; default: all the plan's")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="of weights and data; default: %(default)s")
    parser.add_argument("--clip-norm", type=positive_number, metavar="C", help="clip the gradients' norm to C")
    parser.add_argument("--checkpoint", metavar="DIR", help="where checkpoints are kept")
    parser.add_argument("--save-every", type=positive, metavar="N", help="save a checkpoint every N steps")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, whatever plan wrote it"
    )
    parser.add_argument("--init-from", metavar="DIR", help="start from the weights in a folder of .safetensors files")
    parser.add_argument(
        "--initialise",
        choices=("auto", "whole", "parts"),
        default="auto",
        help="whole: every rank builds the model and keeps its part; parts: a rank makes its part only, by names; default: "
        "%(default)s, by the host's memory",
    )
    parser.add_argument("--metrics", metavar="FILE", help="write a JSON line for each step")
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=600.0,
        metavar="S",
        help="seconds any rank waits; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print the run's lines instead of a summary")


def _run(options: argparse.Namespace) -> None:
    from autopar.report.progress import RunProgress
    from autopar.report.text import run_json, run_summary

    plan = autopar.Plan.load(options.plan)
    if options.metrics:
        require_writable(options.metrics)
    with own_output_only():
        lines = autopar.run(
            plan,
            steps=options.steps,
            model=options.model,
            nproc=options.nproc,
            seed=options.seed,
            clip_norm=options.clip_norm,
            checkpoint=options.checkpoint,
            save_every=options.save_every,
            resume=options.resume,
            init_from=options.init_from,
            initialise=options.initialise,
            metrics=options.metrics,
            timeout_seconds=options.timeout,
            report=RunProgress(options.steps, plan.workload.unit),
        )
    if os.environ.get("RANK", "0") != "0":
        return  # of torchrun's ranks the first speaks for all
    if options.json:
        print(run_json(lines))
        return
    print(run_summary(plan, lines))
    if options.metrics:
        print(f"wrote {options.metrics}")
        print(f"next: autopar compare {options.plan} {options.metrics}")
    else:
        print(f"next: autopar run {options.plan} --steps {options.steps} --metrics run.jsonl")


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    parser.add_argument("lines", metavar="LINES", help="run.jsonl, as run --metrics wrote it")


def _compare(options: argparse.Namespace) -> None:
    print(autopar.compare(autopar.Plan.load(options.plan), options.lines))


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", default="my_machine.yaml", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats: under 30 seconds")
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="processes that measure at once; default: the GPUs, else the cores"
    )


def _calibrate(options: argparse.Namespace) -> None:
    from hardware_profiles.profile import to_yaml

    require_writable(options.output)
    cluster = autopar.calibrate(options.ranks, quick=options.quick, report=lambda text: print(text, file=sys.stderr))
    write_atomically(options.output, to_yaml(cluster))
    chip = cluster.node_groups[0].chip
    rates = ", ".join(f"{rate:.3g} {dtype}" for dtype, rate in chip.teraflops.items())
    print(f"{cluster.devices} ranks, each: {rates} TFLOP/s; memory {chip.memory_gigabytes_per_second:.3g} GB/s")
    for curve in cluster.curves:
        size, seconds = curve.bytes[-1], curve.seconds[-1]
        print(
            f"  {curve.kind:<15} {curve.ranks} ranks: {size / seconds / 1e9:.3g} GB/s, {curve.seconds[0] * 1e6:.3g} us at least"
        )
    print(f"wrote {options.output}")
    print(f"next: autopar plan MODEL --cluster {options.output} --global-batch N")


COMMANDS = {
    "run": (
        _run,
        _run_arguments,
        "train by a plan, on ranks started here or by torchrun",
        [
            "autopar run plan.json --steps 200 --metrics run.jsonl",
            "autopar run plan.json --checkpoint ckpt --save-every 50 --resume",
            "torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST -m autopar run plan.json",
        ],
    ),
    "compare": (
        _compare,
        _compare_arguments,
        "set a plan's prediction against what its run measured",
        ["autopar compare plan.json run.jsonl"],
    ),
    "calibrate": (
        _calibrate,
        _calibrate_arguments,
        "measure this machine and write its cluster profile",
        ["autopar calibrate --quick --ranks 4 -o here.yaml"],
    ),
}
