"""FID and KID of pictures by torchmetrics (extra ``evaluation``), with a network of a local file or folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.config.trust import refuse_code
from sfumato.data.media.pictures import read_image
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.evaluation.sources import PICTURES, is_picture_folder

BATCH = 16
"""Pictures in one forward pass."""

KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000
"""Of the published KID (arXiv 1801.01401); fewer pictures make smaller subsets."""

INCEPTION_FEATURES = 2048


class TorchScriptFeatures(nn.Module):
    """The Inception of FID as a TorchScript file: the one of StyleGAN, ``inception-2015-12-05.pt``."""

    num_features = INCEPTION_FEATURES

    def __init__(self, path: Path, device: torch.device) -> None:
        """Raises ConfigError for a file that is no TorchScript; such a file is a program, which needs trust."""
        super().__init__()
        refuse_code(f"--features {path} (TorchScript)")
        try:
            self.network = torch.jit.load(str(path), map_location=device).eval()
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"--features {path} is no TorchScript file: {str(error)[:200]}") from error
        self.device = device

    def forward(self, images: Tensor) -> Tensor:
        """Features ``[B, D]`` of uint8 ``[B, 3, H, W]``; the network scales them to 299 x 299 itself."""
        return self.network(images.to(self.device), return_features=True).flatten(1).float()


class FolderFeatures(nn.Module):
    """A CLIP or DINOv2 model of transformers: FD-DINOv2 (arXiv 2306.04675), CMMD's features."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises ConfigError when the folder holds no such model."""
        from transformers import AutoModel

        from sfumato.rewards.networks.embedder import IMAGE_MODELS
        from sfumato.rewards.networks.folder import check_model_type, load_image_processor, load_model

        super().__init__()
        self.kind = check_model_type(folder, IMAGE_MODELS)
        self.processor = load_image_processor(folder)
        self.network = load_model(AutoModel, folder, torch.float32, device)
        self.device = device
        self.num_features = self(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape[-1]

    def forward(self, images: Tensor) -> Tensor:
        """Features ``[B, D]`` of uint8 ``[B, 3, H, W]``, prepared as the folder's image processor says."""
        pixels = self.processor(images=[*images.permute(0, 2, 3, 1).cpu().numpy()], return_tensors="pt").pixel_values
        network = cast(Any, self.network)  # one of three classes without a common base
        embed = network if self.kind == "dinov2" else network.get_image_features
        return embed(pixel_values=pixels.to(self.device)).pooler_output.float()


def load_features(path: Path, device: torch.device) -> TorchScriptFeatures | FolderFeatures:
    """The network that sees pictures. Raises ConfigError where there is none."""
    if path.is_file():
        return TorchScriptFeatures(path, device)
    if not path.is_dir():
        raise ConfigError(f"--features {path} does not exist: give inception-2015-12-05.pt, or a model's folder")
    return FolderFeatures(path, device)


class PictureDistances:
    """Distances of sets of pictures from those of a folder."""

    def __init__(self, reference: Path, features: Path, device: torch.device) -> None:
        """Reads the folder.

        Args:
            reference: folder of pictures.
            features: a TorchScript file, or the folder of a CLIP or DINOv2 model.
            device: of the network.

        Raises:
            ConfigError: when one of them is not there, or fewer than two pictures.
            DataError: when a picture is broken.
            MissingDependencyError: when torchmetrics is not installed.
        """
        try:
            import torchmetrics.image  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                f"--reference needs torchmetrics: pip install 'sfumato[evaluation]' ({error})"
            ) from error
        if not is_picture_folder(reference):
            raise ConfigError(f"--reference {reference} is no folder of pictures ({', '.join(PICTURES)})")
        self.network = load_features(features, device)
        self.reference = reference
        self.features = features
        self._real = self.features_of(read_pictures(reference))

    @property
    def prefix(self) -> str:
        """What the distances are called besides FID of Inception."""
        if isinstance(self.network, TorchScriptFeatures):
            return "fid"
        return f"fd_{self.network.kind}"

    def describe(self) -> str:
        """A line for people."""
        return f"{self.prefix} and kid: {len(self._real)} pictures of {self.reference}, features of {self.features}"

    def distances(self, drawn: Tensor) -> dict[str, float]:
        """FID and KID, by their names.

        Args:
            drawn: features of at least two pictures, from ``features_of``.

        Raises:
            ConfigError: for fewer.
        """
        from torchmetrics.image.fid import FrechetInceptionDistance
        from torchmetrics.image.kid import KernelInceptionDistance

        if min(len(drawn), len(self._real)) < 2:
            raise ConfigError(f"--reference: {len(drawn)} and {len(self._real)} pictures: both sides need at least two")
        subset_size = min(KID_SUBSET_SIZE, len(drawn), len(self._real))
        # both metrics are given the features, which are computed once
        fid = FrechetInceptionDistance(feature=_PassedFeatures(drawn.shape[1])).set_dtype(torch.float64)
        with warnings.catch_warnings():  # that it holds the features in memory, as this class does
            warnings.simplefilter("ignore", UserWarning)
            passed = _PassedFeatures(drawn.shape[1])
            kid = KernelInceptionDistance(feature=passed, subsets=KID_SUBSETS, subset_size=subset_size)
        for metric in (fid, kid):
            metric.update(self._real, real=True)
            metric.update(drawn, real=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of the subsets
            kid_mean, _ = kid.compute()
        return {self.prefix: float(fid.compute()), f"kid_{self.prefix}": float(kid_mean)}

    @torch.no_grad()
    def features_of(self, pictures: Iterable[np.ndarray]) -> Tensor:
        """Features of all pictures, float64 ``[N, D]`` on the CPU.

        Args:
            pictures: uint8 ``[H, W, 3]``, or videos ``[F, H, W, 3]`` whose frames count each.
        """
        features: list[Tensor] = []
        batch: list[Tensor] = []

        def flush() -> None:
            if batch:
                features.append(self.network(torch.stack(batch)).double().cpu())
                batch.clear()

        for content in pictures:
            for frame in content if content.ndim == 4 else content[None]:
                picture = torch.from_numpy(np.array(frame)).permute(2, 0, 1)  # files give arrays that are read-only
                if batch and (batch[0].shape != picture.shape or len(batch) == BATCH):
                    flush()
                batch.append(picture)
        flush()
        return torch.cat(features) if features else torch.zeros(0, self.network.num_features, dtype=torch.float64)


class _PassedFeatures(nn.Module):
    """Passes features on, for metrics that would compute them of pictures."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def read_pictures(folder: Path) -> Iterable[np.ndarray]:
    """The pictures of a folder and of those below it, in the order of their names: uint8 ``[H, W, 3]`` each.

    Raises:
        DataError: when one is broken; names it.
    """
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES):
        yield np.asarray(read_image(path, str(path)))
