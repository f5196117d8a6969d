"""Kandinsky 5 from text to images, with the latents of an AutoencoderKL."""

from __future__ import annotations

from torch import Tensor

from sfumato.models.diffusion.kandinsky_text import KandinskyText
from sfumato.models.diffusion.latents import KLLatents
from sfumato.models.diffusion.scratch import build_autoencoder


class Kandinsky5(KLLatents, KandinskyText):
    """Kandinsky 5 Image Lite. Its pipeline takes the autoencoder to make an eighth of a side."""

    pipeline_class = "Kandinsky5T2IPipeline"
    build_vae = staticmethod(build_autoencoder)
    template_words = (
        "system\nYou are a prompt engineer. Describe the image by detailing the color, shape, size, texture, quantity, "
        "text, spatial relationships of the objects and background:\nuser\n{}"
    )

    @property
    def vae_factor(self) -> int:
        return self.pipeline.vae_scale_factor_spatial

    def _latent_scale(self, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        return 0.0, self.pipeline.vae.config.scaling_factor  # the pipeline does not shift them

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.predict_rows(latents[:, :, None], sigma, embeddings)[:, :, 0]
