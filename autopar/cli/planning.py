"""Commands that need no GPU: capture, plan, simulate, explain, profiles."""

from __future__ import annotations

import argparse

import autopar
from autopar.cli.arguments import (
    DTYPES,
    KERNELS,
    MODEL_HELP,
    fraction,
    own_output_only,
    positive,
    positive_number,
    straggler,
)
from autopar.documents.base import require_writable


def _capture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-o", "--output", default="graph.json", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--seq-len", type=positive, metavar="S", help="tokens of a sequence; default: the model's own")
    parser.add_argument("--json", action="store_true", help="print the Graph instead of a summary")


def _capture(options: argparse.Namespace) -> None:
    require_writable(options.output)
    with own_output_only():
        graph = autopar.capture(options.model, seq_len=options.seq_len)
    graph.save(options.output)
    if options.json:
        print(graph.to_json())
        return
    chains = ", ".join(f"{chain.count} blocks in {chain.name or 'the model itself'}" for chain in graph.chains)
    flops = graph.flops("model", 1, graph.captured.seq)
    print(f"{graph.model.spec}: {graph.model.parameters:,} parameters, {chains or 'no repeated blocks'}")
    one = f"sequence of {graph.captured.seq} tokens" if graph.captured.seq > 1 else "sample"
    print(f"one {one}: {flops / 1e12:.4g} TFLOP forward and backward")
    for note in graph.notes:
        print(f"note: {note.where}: {note.message}")
    print(f"wrote {options.output}")
    print(f"next: autopar plan {options.output} --cluster a100x64 --global-batch 512")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--cluster", required=True, metavar="C", help="a built-in name (autopar profiles) or a YAML file"
    )
    parser.add_argument("--global-batch", required=True, type=positive, metavar="N", help="sequences per step")
    parser.add_argument("--seq-len", type=positive, metavar="S", help="tokens of a sequence; default: the model's own")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="compute dtype; default: %(default)s")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--objective", default="time", choices=["time"], help="what is best; default: %(default)s")
    parser.add_argument(
        "--fix", default="", metavar="K=V,...", help="choices that are not the planner's: tp=8,pp=4,zero=1"
    )
    parser.add_argument("--forbid", default="", metavar="K,...", help="what the plan may not use: pp,recompute")
    parser.add_argument("--kernels", default="eager", choices=KERNELS, help="default: %(default)s")
    parser.add_argument("--devices", type=positive, metavar="N", help="use N of the cluster's devices; default: all")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="seconds after which the best plan so far is given"
    )
    parser.add_argument(
        "--memory-margin", default="5%", metavar="M", help="device memory left free; default: %(default)s"
    )
    parser.add_argument(
        "--moe-imbalance",
        type=positive_number,
        default=1.0,
        metavar="F",
        help="assumed: tokens of the most loaded ep rank over the mean; default: %(default)s",
    )
    parser.add_argument(
        "--target",
        default="run",
        metavar="NAME",
        help="who carries the plan out: run (autopar run), or megatron or torchtitan, which offers cp, ep and etp too, prices "
        "that framework's habits and marks the plan export-only; default: %(default)s",
    )
    parser.add_argument("-o", "--output", default="plan.json", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the Plan instead of a summary")


def _plan(options: argparse.Namespace) -> None:
    from autopar.planner.explain import summary
    from autopar.planner.request import parse_fixed, parse_names

    require_writable(options.output)
    with own_output_only():
        plan = autopar.plan(
            options.model,
            options.cluster,
            global_batch=options.global_batch,
            seq_len=options.seq_len,
            dtype=options.dtype,
            optimizer=options.optimizer,
            kernels=options.kernels,
            objective=options.objective,
            fixed=parse_fixed(options.fix),
            forbid=parse_names(options.forbid),
            devices=options.devices,
            time_limit=options.time_limit,
            memory_margin=fraction(options.memory_margin),
            moe_imbalance=options.moe_imbalance,
            target=options.target,
        )
    plan.save(options.output)
    if options.json:
        print(plan.to_json())
        return
    print(summary(plan))
    print(f"wrote {options.output}")
    print(f"next: autopar simulate {options.output} --trace trace.json --picture pipeline.png")


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (opens in ui.perfetto.dev)")
    parser.add_argument("--picture", metavar="FILE", help="draw the pipeline and its memory (.png or .svg)")
    parser.add_argument("--timeline", metavar="FILE", help="write the Timeline itself")
    parser.add_argument("--straggler", metavar="rank=R,slow=X", help="pp rank R computes X times slower")
    parser.add_argument("--json", action="store_true", help="print step time, parts and peak bytes as JSON")


def _simulate(options: argparse.Namespace) -> None:
    from autopar.report.text import timeline_json, timeline_summary

    plan = autopar.Plan.load(options.plan)
    for path in filter(None, (options.trace, options.picture, options.timeline)):
        require_writable(path)
    if options.picture:
        from autopar.report.pictures import picture_format

        picture_format(options.picture)
    line = autopar.simulate(plan, slow=straggler(options.straggler, plan.mesh.pp))
    written = []
    if options.trace:
        from autopar.report.trace import write_trace

        write_trace(plan, line, options.trace)
        written.append(f"trace    {options.trace}  (open it in ui.perfetto.dev)")
    if options.picture:
        from autopar.report.pictures import write_picture

        write_picture(plan, line, options.picture)
        written.append(f"picture  {options.picture}")
    if options.timeline:
        line.save(options.timeline)
        written.append(f"timeline {options.timeline}")
    if options.json:
        print(timeline_json(line))
        return
    print(timeline_summary(plan, line))
    for item in written:
        print(f"wrote {item}")
    print(f"next: autopar explain {options.plan}")


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    parser.add_argument("--against", metavar="OTHER", help="another plan for the same model, to say what differs")


def _explain(options: argparse.Namespace) -> None:
    against = autopar.Plan.load(options.against) if options.against else None
    print(autopar.explain(autopar.Plan.load(options.plan), against))


def _profiles_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a built-in cluster or chip, or a YAML file")


def _profiles(options: argparse.Namespace) -> None:
    from hardware_profiles.describe import describe_all, describe_one

    print(describe_one(options.name) if options.name else describe_all())


COMMANDS = {
    "capture": (
        _capture,
        _capture_arguments,
        "record one training step of a model as a Graph",
        ["autopar capture examples/llama3_8b.py -o graph.json", "autopar capture config.json --seq-len 4096"],
    ),
    "plan": (
        _plan,
        _plan_arguments,
        "find the best way to train a model on a cluster",
        [
            "autopar plan examples/llama3_8b.py --cluster a100x64 --global-batch 512",
            "autopar plan graph.json --cluster my.yaml --global-batch 256 --fix tp=8,pp=4 --forbid recompute",
            "autopar plan examples/llama31_405b.py --cluster h100x16384 --global-batch 2048 --seq-len 8192 --json",
        ],
    ),
    "simulate": (
        _simulate,
        _simulate_arguments,
        "replay one step of a plan event by event",
        ["autopar simulate plan.json --trace trace.json --picture pipeline.png"],
    ),
    "explain": (
        _explain,
        _explain_arguments,
        "say why a plan was chosen and what each rank holds",
        ["autopar explain plan.json", "autopar explain plan.json --against other.json"],
    ),
    "profiles": (
        _profiles,
        _profiles_arguments,
        "list the built-in chips and clusters, or one with its sources",
        ["autopar profiles", "autopar profiles a100x64"],
    ),
}
