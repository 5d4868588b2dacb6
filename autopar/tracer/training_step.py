"""A model as a Graph: built on meta, run twice at two sizes, its indices found, its blocks multiplied."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from autopar.documents.graph import Graph, ModelInfo, Note
from autopar.errors import CaptureError
from autopar.tracer.assemble import assemble, model_info
from autopar.tracer.blocks import BlockList, find_block_lists, only_two_run, stood_in
from autopar.tracer.indices import analyse
from autopar.tracer.record import Recorder, recording_of
from autopar.tracer.recording import Recording
from autopar.tracer.routing import NoInitialValues
from autopar.tracer.sources import Source, open_source, source_line, user_code
from hardware_profiles.schema import did_you_mean

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.bfloat16,  # fp8 recipes keep activations in bf16 and cast inside the matmul
}
BATCH, OTHER_BATCH = 2, 3


def capture(spec: Any, example_inputs: Any = None, *, seq_len: int | None = None, dtype: str = "bf16") -> Graph:
    """One training step of a model as a Graph, on meta tensors.

    `spec`: see `autopar.tracer.sources`; a module or a factory comes with `example_inputs` (batch, seq) -> inputs.
    Raises CaptureError naming module, operator, source line and a way out.
    """
    source = open_source(spec, example_inputs, seq_len)
    if dtype not in DTYPES:
        raise CaptureError(f"dtype '{dtype}' is not known{did_you_mean(dtype, DTYPES)}; allowed: {', '.join(DTYPES)}")
    compute = DTYPES[dtype]
    with _training_defaults(compute):
        model = build_on_meta(source)
        lists = find_block_lists(model)
        _check_inputs_follow_batch(source)
        sizes = ((BATCH, source.seq_len), (OTHER_BATCH, max(2, source.seq_len // 2)))
        first = analyse(_record(source, model, lists, *sizes[0]))
        try:
            second = analyse(_record(source, model, lists, *sizes[1]))
        except CaptureError:
            # The model takes this length only (a window, a fixed grid): batch alone can then be told apart.
            sizes = (sizes[0], (OTHER_BATCH, source.seq_len))
            second = analyse(_record(source, model, lists, *sizes[1]))
    graph = assemble(model, lists, first, second, sizes, str(compute).removeprefix("torch."), source.spec)
    if sizes[0][1] != sizes[1][1] and all(atom.follows in (None, "batch") for atom in graph.indices):
        return graph.model_copy(update={"captured": graph.captured.model_copy(update={"seq": 1})})
    return _with_assumption(graph) if source.assumed_seq_len else graph


def _with_assumption(graph: Graph) -> Graph:
    """The graph with a note that its sequence length is a guess."""
    message = f"sequences of {graph.captured.seq} tokens are assumed: give --seq-len, or SEQ_LEN in the model's file"
    note = Note(kind="assumption", where="model", message=message)
    return graph.model_copy(update={"notes": (note, *graph.notes)})


def build_on_meta(source: Source) -> nn.Module:
    """The model on the meta device, in training mode, its own gradient checkpointing off."""
    way_out = "; build_model must not read values of its tensors, or must be small enough to build on the CPU"
    try:
        with torch.device("meta"), NoInitialValues():
            model = source.build()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            with user_code(source.spec, "build_model()"):
                raise
        with user_code(source.spec, "build_model()", way_out):
            model = source.build()
    except (Exception, SystemExit):
        with user_code(source.spec, "build_model()"):
            raise
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{source.spec}: build_model() returned {type(model).__name__}, expected a torch.nn.Module")
    _check_modules(source, model)
    if next(model.parameters(), None) is None:
        raise CaptureError(f"{source.spec}: the model has no parameters: nothing to train")
    if any(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model = model.to("meta")
    for module in model.modules():
        # Recompute is the planner's to choose; this is the switch that Hugging Face models have.
        if getattr(module, "gradient_checkpointing", None) is True:
            module.gradient_checkpointing = False
    return model.train()


def _check_modules(source: Source, model: nn.Module) -> None:
    """Raise CaptureError for modules whose inside cannot be seen or is not there yet."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{source.spec}: module '{name}' is a torch.jit script, whose inside cannot be seen: return the plain module"
            )
        if any(is_lazy(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())):
            raise CaptureError(
                f"{source.spec}: module '{name}' ({type(module).__name__}) is lazy and has no sizes yet: give it its sizes, "
                "or run one batch through it in build_model()"
            )


def _check_inputs_follow_batch(source: Source) -> None:
    """Raise CaptureError where no tensor of the inputs grows with the batch: its sizes would be told apart wrongly."""
    with torch.device("meta"):
        made = [source.batch(batch, source.seq_len) for batch in (BATCH, OTHER_BATCH)]
    shapes = [[tuple(leaf.shape) for leaf in tree_leaves(one) if isinstance(leaf, torch.Tensor)] for one in made]
    if shapes[0] and shapes[0] == shapes[1]:
        raise CaptureError(
            f"{source.spec}: example_inputs(batch, seq) gives shapes {shapes[0][:4]} for {BATCH} and for {OTHER_BATCH} "
            "sequences alike: use its `batch` (and `seq`) in the shapes"
        )


def _record(source: Source, model: nn.Module, lists: list[BlockList], batch: int, seq: int) -> Recording:
    with torch.device("meta"):
        args, kwargs = source.batch(batch, seq)
    recorder: Recorder | None = None
    try:
        recording = recording_of(model, stood_in(lists), (args, kwargs), lambda: _real_batch(source, batch, seq))
        with only_two_run(model, lists), recording as recorder:
            output = model(*args, **kwargs)
            source.loss_of(output, args, kwargs).backward()
    except CaptureError as error:
        raise CaptureError(_with_spec(source, str(error))) from None
    except (Exception, SystemExit) as error:
        raise CaptureError(_failure(source, model, recorder, error)) from None
    finally:
        model.zero_grad(set_to_none=True)
    return recorder.recording


def _with_spec(source: Source, message: str) -> str:
    return message if message.startswith(source.spec) else f"{source.spec}: {message}"


def _real_batch(source: Source, batch: int, seq: int) -> Any:
    """The inputs with values, for models that look at them."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return source.batch(batch, seq)


def _failure(source: Source, model: nn.Module, recorder: Recorder | None, error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, TypeError) and "forward()" in text:
        return f"{source.spec}: example_inputs do not fit the model: {text}{source_line(error)}"
    module = recorder.current_module if recorder else ""
    kind = type(model.get_submodule(module)).__name__
    where = f"module '{module}' ({kind})" if module else f"the model itself ({kind})"
    operator = recorder.running if recorder else "none"
    return (
        f"{source.spec}: the training step cannot run on meta tensors: in {where}, operator {operator}"
        f"{source_line(error)}: {type(error).__name__}: {text}. If it runs on real tensors: where values of activations "
        "decide what runs (.item(), .numpy(), a mask that selects), write it without them; where an operator has no meta "
        "kernel, give it one (torch.library.register_fake); or leave it out in a build_model() made for planning"
    )


@contextmanager
def _training_defaults(dtype: torch.dtype) -> Iterator[None]:
    """Default dtype for the build, gradients on, the collector off: a recording makes many small objects that all stay."""
    before, collected = torch.get_default_dtype(), gc.isenabled()
    torch.set_default_dtype(dtype)
    gc.disable()
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)
        if collected:
            gc.enable()


def identify(source: Source) -> ModelInfo:
    """Which model a source builds, without running it. Raises CaptureError."""
    with _training_defaults(torch.bfloat16):
        return model_info(build_on_meta(source), source.spec)


def example_batch(spec: Any, batch: int, seq_len: int | None, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one forward, on meta, as `capture` gives them."""
    source = open_source(spec, None, seq_len)
    with _training_defaults(DTYPES[dtype]), torch.device("meta"):
        return source.batch(batch, source.seq_len)


def rehearsal(
    spec: Any, seq_len: int | None = None, dtype: str = "bf16"
) -> tuple[nn.Module, Callable[[int, int], None]]:
    """A model on meta and a function (batch, seq) that runs one training step of it, equal blocks stood in for.

    The step raises CaptureError like `capture`; it is what a dry run runs after changing the model's shapes.
    """
    source = open_source(spec, None, seq_len)
    with _training_defaults(DTYPES[dtype]):
        model = build_on_meta(source)
    lists = find_block_lists(model)

    def step(batch: int, seq: int) -> None:
        with _training_defaults(DTYPES[dtype]):
            _record(source, model, lists, batch, seq)

    return model, step
