"""What kind of kernel an aten operator is, read from its name through one table.

Kinds: ``view`` (moves nothing), ``gemm``, ``attention``, or a class of pointwise efficiency (copy, add, norm, softmax,
activation, dropout, embedding, loss).
"""

from __future__ import annotations

from functools import lru_cache

from autopar.documents.graph import Operator

VIEWS = frozenset(
    (
        "view",
        "reshape",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "expand",
        "squeeze",
        "unsqueeze",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "detach",
        "alias",
        "as_strided",
        "chunk",
        "narrow",
        "view_as",
        "flatten",
        "unflatten",
        "swapaxes",
        "movedim",
        "diagonal",
        "lift_fresh",
        "numpy_T",
        "split_copy",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)
GEMMS = frozenset(
    (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "linear",
        "matmul",
        "_grouped_mm",
        "grouped_mm",
        "_scaled_mm",
        "convolution",
        "convolution_backward",
        "conv1d",
        "conv2d",
        "conv3d",
    )
)
ATTENTIONS = frozenset(
    (
        "attention",
        "attention_backward",
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    )
)
CLASS_WORDS = (
    ("embedding", "embedding"), ("index_select", "embedding"), ("gather", "embedding"), ("log_softmax", "softmax"),
    ("softmax", "softmax"), ("nll_loss", "loss"), ("cross_entropy", "loss"), ("mse_loss", "loss"), ("norm", "norm"),
    ("rsqrt", "norm"), ("mean", "norm"), ("var", "norm"), ("dropout", "dropout"), ("gelu", "activation"),
    ("silu", "activation"), ("relu", "activation"), ("sigmoid", "activation"), ("tanh", "activation"),
    ("erf", "activation"), ("exp", "activation"), ("copy", "copy"), ("clone", "copy"), ("cat", "copy"),
    ("contiguous", "copy"), ("fill", "copy"), ("zeros", "copy"),
)  # fmt: skip
LINEAR = (
    frozenset(
        (
            "_to_copy",
            "to",
            "clone",
            "neg",
            "contiguous",
            "add",
            "sub",
            "copy_",
            "sum",
            "add_",
            "cat",
        )
    )
    | VIEWS
)
"""Linear in their tensors taken together: partial sums in, a partial sum out (where every tensor read is one)."""
RAGGED = frozenset(
    (
        "_grouped_mm",
        "grouped_mm",
    )
)


@lru_cache(maxsize=4096)
def base_name(name: str) -> str:
    """``aten.mm.default`` -> ``mm``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def kind_of(operator: Operator) -> str:
    """The kind of an operator; a name not in the table is priced as ``add``."""
    if operator.traffic == () and not operator.executed_flops:
        return "view"
    return _kind(operator.name)


@lru_cache(maxsize=4096)
def _kind(name: str) -> str:
    base = base_name(name)
    if base in VIEWS:
        return "view"
    if base in GEMMS:
        return "gemm"
    if base in ATTENTIONS:
        return "attention"
    return next((kind for word, kind in CLASS_WORDS if word in base), "add")
