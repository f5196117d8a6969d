"""Weights in and out of a module on any mesh: from safetensors files, from scratch, and back as whole tensors.

A weight file is a set of tensors that can be read in parts. ``load_weights`` finds where each of the module's weights
is stored, in which of several files and perhaps as many small tensors (experts one by one), and reads this rank's shard
of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from sfumato.errors import ConfigError
from sfumato.parallel.finite import gather_names, list_first, not_finite
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import (
    Shards,
    all_parameters,
    copy_into,
    local_shard,
    persistent_buffers,
    plain_name,
    trainable_parameters,
)
from sfumato.parallel.weight_files import Held, TensorSource, convert_names, file_of, open_weights, read_shard

NAMED = 5
"""Tensors that an error names; the others are counted."""


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor of a module that files must provide."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_meta: bool


def load_weights(
    module: nn.Module,
    files: Path | Sequence[Path],
    mesh: Mesh,
    from_rank0: bool = False,
    strict: bool = True,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    device: torch.device | None = None,
) -> None:
    """Fills a module with the weights of a transformers or diffusers folder. Every rank must call it.

    Weights on meta become real, in the shape of this rank's shard; tensors of the files are cast to the module's
    dtypes. Each rank reads its own part of each tensor. Tensors that transformers renames, joins or stacks when it
    loads (experts that are stored one by one) are treated equally here. Adapters are not touched.

    Args:
        module: plain, ddp, or cut by fsdp2, tensor, expert and pipeline parallelism.
        files: see ``open_weights``.
        mesh: the ranks.
        from_rank0: only rank 0 touches the files; the others receive one whole tensor at a time.
        strict: False ignores tensors that the module has no place for, and lets weights that are not on meta keep
            their values when the files have none.
        rename: from a name in the files to the module's name, or to one that transformers' conversion renames.
        device: device for weights that are on meta; the mesh's if None. The CPU with enable_fsdp_offload.

    Raises:
        ConfigError: on every rank and before anything changes, when tensors are missing, left over, of another shape
            or quantised; or when the module is wrapped by fsdp1, or has adapters or computed buffers on meta.
            Afterwards, when a weight is not finite.
    """
    expected = _expected_tensors(module)
    # The files hold tensors of all pipeline stages: each rank must know them all, to find missing and extra ones.
    expected = mesh.merge(expected, over="pp")
    shared = from_rank0 and mesh.size > 1
    with ExitStack() as stack:
        sources: dict[str, TensorSource] = {}
        problems: list[str] = []
        if mesh.is_first or not shared:
            try:
                stored = _rename(stack.enter_context(open_weights(files)), rename)
                sources, problems = _match_files(stored, expected, module, strict)
            except ConfigError as error:
                problems = [str(error)]
        raise_everywhere(problems, mesh)
        make_real(module, device or mesh.device)
        targets = _tensors_in_files(module)
        # With ``from_rank0`` all ranks loop over rank 0's names, since each of its tensors is a collective.
        for name in mesh.first(list(sources), among="world") if shared else sources:
            source = _from_first(sources.get(name), mesh) if shared else sources[name]
            if name in targets:
                copy_into(targets[name], read_shard(source, targets[name]))
    refuse_not_finite(targets, files, mesh)


def load_whole(module: nn.Module, tensors: Mapping[str, Tensor], mesh: Mesh, from_rank0: bool = False) -> None:
    """Copies this rank's shards of whole tensors into a module's weights. Every rank must call it.

    Args:
        module: any that ``parallelize`` returned, adapters included; not on meta.
        tensors: some or all of its parameters and persistent buffers, by the names of the plain module, on any
            device. With pipeline parallelism tensors of all stages.
        mesh: the ranks.
        from_rank0: only rank 0 has them (elsewhere the argument is not looked at) and sends one at a time.

    Raises:
        ConfigError: on every rank and before anything changes, when a name or shape is not the module's, weights are
            on meta, or the ranks have different numbers of tensors.
    """
    parameters = all_parameters(module)
    buffers = persistent_buffers(module)
    shards = Shards(module, mesh, parameters)
    shapes = {name: tuple(shards.shapes[name]) for name in parameters}
    shapes = mesh.merge(shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()}, over="pp")
    shared = from_rank0 and mesh.size > 1
    problems = []
    if mesh.is_first or not shared:
        unknown = [name for name in tensors if name not in shapes]
        if unknown:
            problems.append(f"the module has no {list_first(unknown, NAMED)}")
        problems += [
            f"{name} has shape {tuple(tensor.shape)}, the module wants {shapes[name]}"
            for name, tensor in tensors.items()
            if name in shapes and tuple(tensor.shape) != shapes[name]
        ]
    on_meta = [name for name, tensor in (parameters | buffers).items() if tensor.is_meta]
    if on_meta:
        problems.append(f"{list_first(on_meta, NAMED)} are on meta: call load_weights or initialise_on_meta first")
    counts = [0] if shared else mesh.gather(len(tensors), over="world")
    if min(counts) != max(counts):
        problems.append(f"the ranks have {min(counts)} to {max(counts)} tensors: give all the same, or set from_rank0")
    raise_everywhere(problems, mesh)
    for name in mesh.first(list(tensors) if mesh.is_first else [], among="world") if shared else tensors:
        held = Held(tensors[name]) if mesh.is_first or not shared else None
        whole_tensor = (_from_first(held, mesh) if shared else cast("Held", held)).tensor
        if name in parameters:
            copy_into(parameters[name], shards.shard(name, whole_tensor))
        elif name in buffers:
            copy_into(buffers[name], whole_tensor)


def whole_weights(
    module: nn.Module, mesh: Mesh, only_trainable: bool = False, share: bool = False
) -> dict[str, Tensor]:
    """A module's whole weights, as the plain module would have them. Every rank must call it.

    They are gathered one at a time. A tied weight has the first of its names.

    Args:
        module: any that ``parallelize`` returned, adapters included.
        mesh: the ranks.
        only_trainable: parameters that require gradients; otherwise all, and persistent buffers.
        share: weights that are whole on the CPU are not copied, so that the result changes with the module.

    Returns:
        On rank 0 whole tensors on the CPU, of all pipeline stages, by name; elsewhere an empty dictionary.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in weights_on_first(module, mesh, only_trainable):
        if tensor is not None and name not in weights:
            weights[name] = tensor.detach().to("cpu", copy=not share)
    return weights


def weights_on_first(
    module: nn.Module,
    mesh: Mesh,
    only_trainable: bool = False,
    dtype_of: Callable[[str, torch.dtype], torch.dtype] = lambda _, dtype: dtype,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yields a module's whole weights one at a time. Every rank must take all of them.

    Args:
        module, mesh, only_trainable: see ``whole_weights``.
        dtype_of: dtype in which a weight of this name and dtype is gathered.

    Yields:
        The name of a parameter or persistent buffer, of all pipeline stages, a second time where two stages hold it;
        and on rank 0 the whole tensor, which may share memory with the module, elsewhere None.
    """
    parameters = trainable_parameters(module) if only_trainable else all_parameters(module)
    shards = Shards(module, mesh, parameters)
    buffers = {} if only_trainable else persistent_buffers(module)
    own_specs = {name: (tuple(shards.shapes[name]), parameter.dtype) for name, parameter in parameters.items()}
    own_specs |= {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}
    ranks = dist.get_process_group_ranks(mesh.group("pp")) if mesh.layout.pp > 1 else [mesh.rank]
    stage = ranks.index(mesh.rank)
    for owner_stage, specs in enumerate(mesh.gather(own_specs, over="pp")):
        for name, (shape, stored_dtype) in specs.items():
            dtype = dtype_of(name, stored_dtype)
            tensor: Tensor | None = None
            if owner_stage == stage:
                if name in buffers:
                    tensor = buffers[name].detach().to(dtype)
                else:
                    tensor = shards.whole(name, local_shard(parameters[name].detach()).to(dtype))
                # Along the pipeline of rank 0 alone: the others hold the same weights.
                if stage > 0 and ranks[0] == 0:
                    dist.send(tensor.to(mesh.device).contiguous(), dst=0, group=mesh.group("pp"))
            elif mesh.is_first:
                tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
                dist.recv(tensor, src=ranks[owner_stage], group=mesh.group("pp"))
            yield name, tensor if mesh.is_first else None


def each_whole_weight(
    module: nn.Module, mesh: Mesh, dtype: torch.dtype | None = None, with_frozen: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields a module's whole weights one at a time, on every rank. Every rank must take all of them.

    A rank holds one whole weight at a time besides those that the caller keeps. Not with pipeline parallelism. A tied
    weight has the first of its names.

    Args:
        module: any that ``parallelize`` returned, adapters included.
        mesh: the ranks.
        dtype: float32 weights are cast to it before they are gathered; None casts none.
        with_frozen: whether to gather parameters that require no gradients, too.

    Yields:
        The name of a parameter or persistent buffer and the whole tensor, on the mesh's device, which shares no memory
        with the module.
    """
    assert mesh.layout.pp == 1, "a rank of a pipeline has no part of the other stages' weights"
    parameters = all_parameters(module) if with_frozen else trainable_parameters(module)
    shards = Shards(module, mesh, parameters)
    for name, parameter in parameters.items():
        held = local_shard(parameter.detach())
        shard = held.to(mesh.device, dtype if dtype is not None and held.dtype == torch.float32 else held.dtype)
        tensor = shards.whole(name, shard)
        is_shared = tensor.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        yield name, tensor.clone() if is_shared else tensor
    for name, buffer in persistent_buffers(module).items():
        yield name, buffer.detach().to(mesh.device, copy=True)


def weights_not_finite(module: nn.Module, mesh: Mesh | None = None) -> list[str]:
    """Names of a module's parameters and persistent buffers that hold NaN or infinite values, on any rank.

    Args:
        module: plain or as ``parallelize`` returned it; weights on meta are skipped.
        mesh: the ranks, all of which must call it; None checks this process only.
    """
    names = not_finite(all_parameters(module) | persistent_buffers(module))
    return names if mesh is None else gather_names(names, mesh)


def refuse_not_finite(
    loaded: nn.Module | Mapping[str, Tensor], files: Path | Sequence[Path], mesh: Mesh | None = None
) -> None:
    """Checks weights that were just loaded.

    Args:
        loaded: a module, or some of its weights by name.
        files: the files they were loaded from, for the message.
        mesh: the ranks, all of which must call it; None checks this process only.

    Raises:
        ConfigError: when a weight is NaN or infinite; it names the file and the first few weights.
    """
    bad = weights_not_finite(loaded) if isinstance(loaded, nn.Module) else not_finite(loaded)
    bad = bad if mesh is None else gather_names(bad, mesh)
    if bad:
        raise ConfigError(
            f"{file_of(files, bad[0])}: weights are NaN or infinite: {list_first(bad)}. The file is damaged, or the "
            "run that wrote it had diverged: fetch it again, or take an earlier one"
        )


def refuse_misread(module: nn.Module, files: Path, is_whole: bool) -> None:
    """Checks a module that a library has loaded against its files, of which it ignores what does not fit.

    Args:
        module: plain, without adapters.
        files: its folder.
        is_whole: whether the module takes every tensor of the files; an encoder may be a part of a published model.

    Raises:
        ConfigError: when a tensor is quantised, or of a whole module, when one is missing or left over.
    """
    with open_weights(files) as stored:
        if is_whole:
            problems = _match_files(stored, _expected_tensors(module), module, strict=True)[1]
        else:
            problems = [
                _describe_quantised(name, source) for name, source in stored.items() if _is_float8(source.dtype)
            ]
    if problems:
        raise ConfigError(
            f"{files}: {list_first(problems, NAMED, '; ')}. Its config.json and its weights must be of the same model, "
            "as it was published"
        )


def build_on_meta(build: Callable[[], nn.Module], smallest: int | None = None) -> nn.Module:
    """Builds a module whose parameters take no memory, while its buffers have their values.

    Buffers that are computed when a module is built (frequencies of rotary embeddings) are in no file, so they must be
    real.

    Args:
        build: builds the module on the CPU; each parameter has memory until it is registered.
        smallest: parameters of fewer elements stay on the CPU, and those on meta are initialised, for who records that.
            None: all are on meta, and transformers initialises none of them, which would take time alone.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter on meta is kept as the object that it is: it may be registered again, as a tied weight.
        if param is not None and not param.is_meta and param.numel() >= (smallest or 0):
            attributes = param.__dict__
            param = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(param).update(attributes)
            if smallest is None:
                vars(param)["_is_hf_initialized"] = True
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        return build()
    finally:
        nn.Module.register_parameter = register


@contextmanager
def real_stand_ins(module: nn.Module) -> Iterator[None]:
    """While it lasts, weights on meta are replaced by zeros on the CPU that share one element, so take no memory.

    Adapters that are added meanwhile are real, with the same random values as beside real weights; peft would put them
    on meta. Only for initialisations that do not read the weights.
    """
    replaced = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                replaced.append((owner, name, parameter))
                owner._parameters[name] = nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for owner, name, parameter in replaced:
            parameter.requires_grad_(cast("nn.Parameter", owner._parameters[name]).requires_grad)
            owner._parameters[name] = parameter


def make_real(module: nn.Module, device: torch.device) -> None:
    """Allocates memory on a device, without values, for this rank's shards of weights on meta. Other weights stay."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, key))
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for (first, name), *tied in places.values():
        for owner, key in tied:  # ``_apply`` has made a parameter for each name; tied weights become one again
            owner._parameters[key] = first._parameters[name]


def _tensors_in_files(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module that files hold, by their names there: parameters without adapters, persistent buffers.

    Raises:
        ConfigError: when the module is wrapped by fsdp1, or has adapters or computed buffers on meta.
    """
    refuse_fsdp1(module)
    buffers = persistent_buffers(module)
    computed = [name for name, buffer in module.named_buffers() if buffer.is_meta and plain_name(name) not in buffers]
    if computed:
        raise ConfigError(f"buffers that are in no file are on meta: {list_first(computed, NAMED)}; use build_on_meta")
    adapters = tuple(
        f"{plain_name(f'{name}.')}{adapter}."
        for name, submodule in module.named_modules()
        if hasattr(submodule, "base_layer")
        for adapter in getattr(submodule, "adapter_layer_names", ())
    )
    parameters = all_parameters(module)
    on_meta = [name for name, parameter in parameters.items() if name.startswith(adapters) and parameter.is_meta]
    if on_meta:
        raise ConfigError(f"adapters are on meta: {list_first(on_meta, NAMED)}; add them inside real_stand_ins")
    loadable = {name: parameter for name, parameter in parameters.items() if not name.startswith(adapters)}
    loadable |= buffers
    return {re.sub(r"(\.base_layer)+\.", ".", name): tensor for name, tensor in loadable.items()}


def refuse_fsdp1(module: nn.Module) -> None:
    if any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules()):
        raise ConfigError(
            "fsdp1 has flattened the weights, so none can be read into them: load before parallelize, with "
            "train.init_device cpu; or set train.data_parallel_mode fsdp2"
        )


def _expected_tensors(module: nn.Module) -> dict[str, ExpectedTensor]:
    """The tensors that files must provide, by name."""
    loadable = _tensors_in_files(module).items()
    return {name: ExpectedTensor(tuple(tensor.shape), tensor.dtype, tensor.is_meta) for name, tensor in loadable}


def _rename(
    stored: dict[str, TensorSource], rename: Callable[[str], str] | Mapping[str, str] | None
) -> dict[str, TensorSource]:
    if rename is None:
        return stored
    renamed: dict[str, TensorSource] = {}
    for name, source in stored.items():
        new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
        if new in renamed:
            raise ConfigError(f"rename gives two tensors of the files the name {new!r}")
        renamed[new] = source
    return renamed


def _match_files(
    stored: dict[str, TensorSource], expected_tensors: dict[str, ExpectedTensor], module: nn.Module, strict: bool
) -> tuple[dict[str, TensorSource], list[str]]:
    """A tensor of the files for each name that the module expects, and a list of problems."""
    root = _transformers_model(module)
    if root is not None:
        stored = convert_names(stored, root, {name: expected.shape for name, expected in expected_tensors.items()})
    root = module if root is None else root
    # A tied weight may be stored under any of its names: by module and by the class's declaration.
    names_of: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), set()).add(plain_name(name))
    same = [names for names in names_of.values() if len(names) > 1]
    same += [set(pair) for pair in getattr(root, "all_tied_weights_keys", {}).items()]
    sources = {}
    missing = []
    misfits = []
    for name, expected in expected_tensors.items():
        names = [name, *sorted(chain.from_iterable(group for group in same if name in group))]
        source = next((stored[alias] for alias in names if alias in stored), None)
        if source is not None:
            sources[name] = source
            misfits += _describe_misfit(name, source, expected)
        elif expected.is_meta or (strict and not _may_differ(root, "missing", name)):
            missing.append(name)
    allowed = {*expected_tensors, *chain.from_iterable(same), *(plain_name(name) for name, _ in module.named_buffers())}
    extra = [name for name in stored if strict and name not in allowed and not _may_differ(root, "unexpected", name)]
    problems = (
        [f"the files have no {list_first(missing, NAMED)}; is this the folder of another model?"] if missing else []
    )
    problems += [f"the module has no place for {list_first(extra, NAMED)} of the files"] if extra else []
    return sources, problems + misfits


def _describe_misfit(name: str, source: TensorSource, expected: ExpectedTensor) -> list[str]:
    if source.shape != expected.shape:
        return [f"{name} has shape {source.shape} in the files, the module wants {expected.shape}"]
    if expected.dtype.is_floating_point and (not source.dtype.is_floating_point or _is_float8(source.dtype)):
        return [_describe_quantised(name, source)]
    return []


def _is_float8(dtype: torch.dtype) -> bool:
    """Whether it is one of the formats of 8 bits, whose numbers mean something with their scales alone."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _describe_quantised(name: str, source: TensorSource) -> str:
    """What is said of a tensor that is quantised in the files."""
    return f"{name} is quantised in the files ({source.dtype}): take weights in bf16, fp16 or fp32"


def _may_differ(model: nn.Module, kind: str, name: str) -> bool:
    """Whether the model's class declares that a tensor may be missing or unexpected (``kind``) in the files."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    computed = (r"rotary_emb\.inv_freq$",) if kind == "unexpected" else ()
    return any(re.search(pattern, name) for pattern in (*patterns, *computed))


def _transformers_model(module: nn.Module) -> nn.Module | None:
    """The transformers model that a module is, or that it contains with equal names, as a pipeline's ``Stages`` do."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    names = all_parameters(module).keys()
    models = (submodule for submodule in module.modules() if isinstance(submodule, PreTrainedModel))
    return next((model for model in models if model is module or all_parameters(model).keys() <= names), None)


def raise_everywhere(problems: list[str], mesh: Mesh) -> None:
    """Raises ConfigError on every rank when any rank has a problem. Every rank must call it."""
    all_problems = sorted(set(chain.from_iterable(mesh.gather(problems, over="world"))))
    if all_problems:
        raise ConfigError(f"weights: {list_first(all_problems, NAMED, '; ')}")


def _from_first(source: TensorSource | None, mesh: Mesh) -> Held:
    """A whole tensor that rank 0 reads and broadcasts.

    Args:
        source: on rank 0 the tensor, elsewhere None.
        mesh: the ranks, all of which must call it.

    Raises:
        ConfigError: on every rank, when rank 0 cannot read it.
    """
    header: tuple[torch.Size, torch.dtype] | str | None = None  # a str is the message of a failure
    if source is not None:
        try:
            tensor = source.read(tuple(slice(0, size) for size in source.shape)).to(mesh.device).contiguous()
            header = (tensor.shape, tensor.dtype)
        except (OSError, SafetensorError) as error:
            header = f"rank 0 cannot read a weight: {error}"
    header = cast("tuple[torch.Size, torch.dtype] | str", mesh.first(header, among="world"))
    if isinstance(header, str):
        raise ConfigError(header)
    if source is None:
        tensor = torch.empty(header[0], dtype=header[1], device=mesh.device)
    dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
    return Held(tensor)
