"""Runs inside vLLM's worker processes, in vLLM's environment: weights from safetensors files.

vLLM imports this file when it is given as ``--worker-extension-cls``, and so knows the backend ``BACKEND`` of its
weight transfer interface. vLLM's own backends need GPUs. It imports vLLM, safetensors and nothing of this library,
because a copy of this file alone is given to a server whose environment does not have the library.
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
    """What vLLM adds to its workers: nothing. It is there so that this file is imported."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing is agreed beforehand."""


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):
    """Which files hold a version."""

    folder: str
    """With safetensors files of the trained weights, by the names of the model's own files."""
    base: str
    """The model's own folder, which has the others: layers that vLLM fuses are only loaded as wholes. Empty: none."""


class FilesWeightTransferEngine(WeightTransferEngine[NoInitInfo, FilesUpdateInfo]):
    """Loads weights in the phases of vLLM's own backends: layers are taken apart, loaded and processed again."""

    init_info_cls = NoInitInfo
    update_info_cls = FilesUpdateInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Before the first file."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, which waits for a GPU that may not be there."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FilesUpdateInfo) -> None:
        """Loads the trained weights, and the others from the model's own files."""
        seen: set[str] = set()
        for folder in filter(None, (update_info.folder, update_info.base)):
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    names = [name for name in file.keys() if name not in seen]  # noqa: SIM118
                    self.model.load_weights((name, file.get_tensor(name)) for name in names)
                    seen.update(names)

    def finish_weight_update(self) -> None:
        """After the last file."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferEngineFactory.register_engine(BACKEND, FilesWeightTransferEngine)
