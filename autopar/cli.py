"""The commands. Exit status 0: done; 2: a user's error, in one message; 3: no plan fits; 130: interrupted."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from typing import NoReturn

import autopar
from autopar.documents.base import require_writable
from autopar.errors import AutoparError, NoPlanFits, RequestError
from hardware_profiles.schema import did_you_mean

USER_ERROR, NOTHING_FITS, INTERRUPTED = 2, 3, 130

MODEL_HELP = (
    "model.py, model.py:factory, package.module:factory, a Hugging Face config.json or its folder, or graph.json"
)
MOST = 10**9
"""Of sequences, tokens of one, devices: far above what anyone trains, and what a search can still count."""
DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8")
KERNELS = ("eager", "compiled", "fused")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], None] = options.command
        command(options)
        sys.stdout.flush()
    except NoPlanFits as error:
        return _fail(error, NOTHING_FITS)
    except AutoparError as error:
        return _fail(error, USER_ERROR)
    except KeyboardInterrupt:
        print("autopar: interrupted, nothing was written", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()  # the reader went away (`autopar plan ... | head`)
    except OSError as error:
        _drop_stdout()
        print(f"autopar: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        return USER_ERROR
    return 0


def _drop_stdout() -> None:
    """Leave nothing for the interpreter to flush at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _own_output_only() -> AbstractContextManager[object]:
    """What the user's model prints goes to stderr: stdout holds the answer and nothing else."""
    return redirect_stdout(sys.stderr)


def _fail(error: AutoparError, status: int) -> int:
    print(f"autopar: {error}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors say what was probably meant."""

    def error(self, message: str) -> NoReturn:
        if "invalid choice" in message:
            given = message.partition("invalid choice: ")[2].partition(" (")[0].strip("'")
            action = next((item for item in self._actions if item.choices and given not in item.choices), None)
            message += (
                did_you_mean(given, [str(choice) for choice in action.choices]) if action and action.choices else ""
            )
        raise RequestError(f"{message}\n{self.format_usage().strip()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autopar", description="Turns a PyTorch model and a GPU cluster into a training plan that is proven best."
    )
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (run, arguments, text, examples) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        arguments(command)
        command.set_defaults(command=run)
    return parser


def _capture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-o", "--output", default="graph.json", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--seq-len", type=_positive, metavar="S", help="tokens of a sequence; default: the model's own")
    parser.add_argument("--json", action="store_true", help="print the Graph instead of a summary")


def _capture(options: argparse.Namespace) -> None:
    require_writable(options.output)
    with _own_output_only():
        graph = autopar.capture(options.model, seq_len=options.seq_len)
    graph.save(options.output)
    if options.json:
        print(graph.to_json())
        return
    chains = ", ".join(f"{chain.count} blocks in {chain.name}" for chain in graph.chains)
    flops = graph.flops("model", 1, graph.captured.seq)
    print(f"{graph.model.spec}: {graph.model.parameters:,} parameters, {chains or 'no repeated blocks'}")
    print(f"one sequence of {graph.captured.seq} tokens: {flops / 1e12:.4g} TFLOP forward and backward")
    for note in graph.notes:
        print(f"note: {note.where}: {note.message}")
    print(f"wrote {options.output}")
    print(f"next: autopar plan {options.output} --cluster a100x64 --global-batch 512")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--cluster", required=True, metavar="C", help="a built-in name (autopar profiles) or a YAML file"
    )
    parser.add_argument("--global-batch", required=True, type=_positive, metavar="N", help="sequences per step")
    parser.add_argument("--seq-len", type=_positive, metavar="S", help="tokens of a sequence; default: the model's own")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="compute dtype; default: %(default)s")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--objective", default="time", choices=["time"], help="what is best; default: %(default)s")
    parser.add_argument(
        "--fix", default="", metavar="K=V,...", help="choices that are not the planner's: tp=8,pp=4,zero=1"
    )
    parser.add_argument("--forbid", default="", metavar="K,...", help="what the plan may not use: pp,recompute")
    parser.add_argument("--kernels", default="eager", choices=KERNELS, help="default: %(default)s")
    parser.add_argument("--devices", type=_positive, metavar="N", help="use N of the cluster's devices; default: all")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="seconds after which the best plan so far is given"
    )
    parser.add_argument(
        "--memory-margin", default="5%", metavar="M", help="device memory left free; default: %(default)s"
    )
    parser.add_argument("-o", "--output", default="plan.json", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the Plan instead of a summary")


def _plan(options: argparse.Namespace) -> None:
    from autopar.planner.explain import summary
    from autopar.planner.request import parse_fixed, parse_names

    require_writable(options.output)
    with _own_output_only():
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
            memory_margin=_fraction(options.memory_margin),
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
    line = autopar.simulate(plan, slow=_straggler(options.straggler, plan.mesh.pp))
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


def _positive(text: str) -> int:
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if value > MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is given, but at most {MOST:,} is planned for")
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is given, but at least 1 is needed")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise RequestError(f"--memory-margin {text}: give a share such as 5% or 0.05") from None
    if not 0 <= value < 1:
        raise RequestError(f"--memory-margin {text}: must lie between 0% and 100%")
    return value


def _straggler(text: str | None, stages: int) -> dict[int, float] | None:
    if text is None:
        return None
    given = dict(item.partition("=")[::2] for item in text.split(","))
    try:
        rank, slow = int(given["rank"]), float(given["slow"])
    except (KeyError, ValueError):
        raise RequestError(f"--straggler {text}: give it as rank=3,slow=1.2") from None
    if not 0 <= rank < stages or not 0 < slow < math.inf:
        raise RequestError(
            f"--straggler {text}: the plan has pp ranks 0 to {stages - 1}, and slow must be a number above 0"
        )
    return {rank: slow}


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
