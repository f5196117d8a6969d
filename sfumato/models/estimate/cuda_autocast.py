"""Autocast as it is on GPUs, for tensors without memory, which are on the CPU.

On GPUs autocast computes norms, softmax, powers and losses in float32, whose inputs and results are twice as large as
those in bf16; on CPUs it leaves them in bf16. torch without CUDA cannot trace tensors of a GPU with gradients, so the
same rules are given to its autocast of CPUs for as long as something is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch._ops import OpOverload

IN_FLOAT32 = (  # noqa: SIM905 - a list of strings would be one line each
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
"""Operations whose inputs autocast of CUDA makes float32: AT_FORALL_FP32 in ATen/autocast_mode.h."""

TO_FLOAT32 = (  # noqa: SIM905
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
"""Operations whose result it makes float32, unless the caller names a dtype: AT_FORALL_FP32_SET_OPT_DTYPE."""

LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextmanager
def as_on_cuda(on_gpu: bool = True) -> Iterator[None]:
    """Inside, autocast of the CPU has the rules of CUDA's; with ``on_gpu`` False nothing is changed."""
    with _register_cuda_rules() if on_gpu else nullcontext():
        yield


@contextmanager
def _register_cuda_rules() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        for names, kernel in ((IN_FLOAT32, _in_float32), (TO_FLOAT32, _to_float32)):
            for name in names:
                packet, _, overload = name.partition(".")
                operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
                # an older torch lacks some; where its autocast of CPUs has a rule of its own, that is float32, too
                has_rule = operation is None or torch._C._dispatch_has_kernel_for_dispatch_key(
                    operation.name(), "AutocastCPU"
                )
                if operation is not None and not has_rule:
                    library.impl(operation, partial(kernel, operation), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _in_float32(operation: Callable[..., object], *args: object, **kwargs: object) -> object:
    with _without_autocast():
        args, kwargs = tree_map_only(Tensor, _widen, (args, kwargs))
        return operation(*args, **kwargs)


def _to_float32(operation: OpOverload, *args: object, **kwargs: object) -> object:
    with _without_autocast():
        is_low = isinstance(args[0], Tensor) and args[0].dtype in LOW_PRECISION
        names = [argument.name for argument in operation._schema.arguments]
        is_named = "dtype" in names and len(args) > names.index("dtype") and args[names.index("dtype")] is not None
        if is_low and not is_named and kwargs.get("dtype") is None:
            return operation(*args[: names.index("dtype")], **{**kwargs, "dtype": torch.float32})
        return operation(*args, **kwargs)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def _without_autocast() -> AbstractContextManager[object]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)
