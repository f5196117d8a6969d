"""Runs inside vLLM's worker processes, in vLLM's environment: loads weights from safetensors files, or from memory of
the run in their place.

vLLM imports this file when it is given as ``--worker-extension-cls``, which registers ``BACKEND`` as a backend of its
weight transfer interface, since vLLM's own backends need GPUs. The file imports vLLM and safetensors and nothing of
this library, because a copy of it alone is given to a server whose environment does not have the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "sfumato_files"


class VllmWorkerExtension:
    """The class that vLLM adds to its workers. It is empty: naming it has vLLM import this file."""


@dataclass
class VersionsInitInfo(WeightTransferInitInfo):
    """What the two sides agree on before weights are sent."""

    names_versions: bool
    """Whether each update names its version: an older copy of this file does not know it, and is refused at the
    start."""


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):
    """A version, and the folders of its files."""

    folder: str
    """Holds safetensors files with the trained weights, under the names that the model's own files give them."""
    base: str
    """The model's own folder, for weights that are not trained: vLLM loads the layers that it fuses only as wholes.
    Empty where they are not needed."""
    version: str
    """Which the files in ``folder`` must say that they are of: memory may hold another one by now."""


class FilesWeightTransferEngine(WeightTransferEngine[VersionsInitInfo, FilesUpdateInfo]):
    """Loads weights in the phases of vLLM's own backends: layers go back to the form of files, are loaded and processed
    again."""

    init_info_cls = VersionsInitInfo
    update_info_cls = FilesUpdateInfo

    has_begun = False
    """Whether an update was started and not finished."""

    def init_transfer_engine(self, init_info: VersionsInitInfo) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        """Called before the first file: prepares all layers to be loaded again."""
        if self.has_begun:
            # Layers hold what came of an update that failed, and would take it for a part of this one.
            finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)
        self.has_begun = True

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As in the base class, which synchronises a GPU even where vLLM runs on CPUs."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FilesUpdateInfo) -> None:
        """Loads the trained weights, then those that the model's own files have besides."""
        loaded_names: set[str] = set()
        for folder in filter(None, (update_info.folder, update_info.base)):
            paths = sorted(Path(folder).glob("*.safetensors"))
            if not paths:
                raise FileNotFoundError(f"{folder} has no weights (any more)")
            for path in paths:
                with safe_open(path, framework="pt") as file:
                    written = (file.metadata() or {}).get("version")
                    if folder == update_info.folder and written != update_info.version:
                        raise ValueError(f"{path} has weights of version {written}, not {update_info.version}")
                    # trained weights come first and win over those of the same name in the model's own files
                    names = [name for name in file.keys() if name not in loaded_names]  # noqa: SIM118
                    self.model.load_weights((name, file.get_tensor(name)) for name in names)
                    loaded_names.update(names)

    def finish_weight_update(self) -> None:
        """Called after the last file: brings the layers into the form that vLLM computes with."""
        finalize_layerwise_reload(self.model, self.model_config)
        self.has_begun = False
        if self.device.type == "cpu":
            self._pack_output_layer()

    def _pack_output_layer(self) -> None:
        """Packs the output layer anew, of which CPUs have a packed copy in half precision: vLLM does not
        where the layer shares its weights with the embedding, since only that one is loaded."""
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            if (
                method is not None
                and isinstance(layer, ParallelLMHead)
                and isinstance(method, UnquantizedEmbeddingMethod)
            ):
                method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Does nothing: no connection or memory is held."""


WeightTransferEngineFactory.register_engine(BACKEND, FilesWeightTransferEngine)
