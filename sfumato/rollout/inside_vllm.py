"""Loads weights from safetensors files inside vLLM's worker processes, in vLLM's environment.

vLLM imports this file because of the option ``--worker-extension-cls``, and so gets to know the backend ``BACKEND`` of
its weight transfer interface; vLLM's own backends need GPUs. The file imports vLLM and safetensors and nothing of this
library: a server whose environment does not have the library gets a copy of this file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "sfumato_files"


class VllmWorkerExtension:
    """Adds nothing to vLLM's workers. It exists so that vLLM imports this file."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Empty: this backend needs no initialisation."""


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):
    """Which files hold a version."""

    folder: str
    """Contains safetensors files of the trained weights, with the tensor names of the model's own files."""
    base: str
    """The model's own folder, for the weights that are not trained: vLLM loads a fused layer only as a whole. Empty:
    none."""


class FilesWeightTransferEngine(WeightTransferEngine[NoInitInfo, FilesUpdateInfo]):
    """Loads weights in the phases of vLLM's own backends: start (layers return to the form in which they are loaded),
    receive, finish (layers are processed again, such as fused or quantised)."""

    init_info_cls = NoInitInfo
    update_info_cls = FilesUpdateInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Prepares the layers; called before the first file."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, but that synchronises a GPU, and there may be none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FilesUpdateInfo) -> None:
        """Loads the trained weights, then all others from the model's own files."""
        seen: set[str] = set()
        for folder in filter(None, (update_info.folder, update_info.base)):
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    names = [name for name in file.keys() if name not in seen]  # noqa: SIM118
                    self.model.load_weights((name, file.get_tensor(name)) for name in names)
                    seen.update(names)

    def finish_weight_update(self) -> None:
        """Processes the layers; called after the last file."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to free."""


WeightTransferEngineFactory.register_engine(BACKEND, FilesWeightTransferEngine)
